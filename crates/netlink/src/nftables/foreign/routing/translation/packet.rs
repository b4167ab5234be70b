//! Way of one packet through a rule, as far as the packet is known.

use std::net::IpAddr;

use fairlead_address::octets;

use super::steps::{Field, NatRule, Operand, Step, Translation};
use crate::Result;
use crate::nftables::foreign::routing::expressions::{PROTOCOL_UDP, VERDICT_REGISTER};
use crate::nftables::foreign::walk::{Verdict, padded};
use crate::nftables::foreign::{NFPROTO_IPV4, NFPROTO_IPV6};
use crate::nftables::uapi::NFPROTO_INET;
use crate::nftables::{CONNECTION_ORIGINAL, Comparison, DestinationType, Header, STATE_NEW};

/// Offsets of the next protocol and of the destination in the header of IPv4 (RFC 791, section 3.1) and in that of IPv6 (RFC 8200, section 3).
const IPV4: (u32, u32) = (9, 16);
const IPV6: (u32, u32) = (6, 24);
/// Offset of the destination's port in the header of UDP (RFC 768).
const DESTINATION_PORT: u32 = 2;
/// All registers in bytes: `NFT_REG_1` to `_4` have 16 each, and `NFT_REG32_00` to `_15`, from 8 on, are the same ones in fours.
const REGISTERS: usize = 64;
const WORD: usize = 4;
const LONGEST: usize = 16;

/// First packet of a flow from another node to a UDP port of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Index of the link by which it comes in.
    pub link: u32,
    /// Name of that link.
    pub input: String,
    /// Destination, an address of this host.
    pub destination: IpAddr,
    /// Port of the destination.
    pub port: u16,
}

/// Sets of a table.
pub(super) trait Sets {
    /// Length of the keys in bytes; `None` if there is no such set.
    fn key_length(&mut self, set: &str) -> Result<Option<usize>>;

    /// Verdict that a map has for a key, [`Verdict::None`] if what has the key has none; `None` if nothing has it.
    fn element(&mut self, set: &str, key: &[u8]) -> Result<Option<Verdict>>;

    /// All verdicts of a map, or as many as are looked at.
    fn verdicts(&mut self, set: &str) -> Result<Vec<Verdict>>;
}

/// A packet, and addresses of this host.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet<'a> {
    pub(super) arrival: &'a Arrival,
    pub(super) own: &'a [IpAddr],
}

/// Passage of a packet through a rule whose conditions it may meet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Passage {
    /// Whether it certainly meets all of them.
    pub(super) is_certain: bool,
    /// Whether it meets one on its port.
    pub(super) names_port: bool,
    pub(super) end: End,
}

/// Continuation of its way.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The next rule.
    Next,
    /// Delivery to another destination.
    Translated,
    /// Verdict, one of these.
    Verdicts(Vec<Verdict>),
}

/// Leads a packet through a rule; `None` if it does not meet a condition.
pub(super) fn pass<S: Sets>(rule: &NatRule, packet: Packet<'_>, sets: &mut S) -> Result<Option<Passage>> {
    let mut state = State { packet, registers: Registers::default(), is_certain: true, names_port: false };
    let mut end = End::Next;
    for step in &rule.steps {
        match state.step(step, sets)? {
            Progress::End(last) => {
                end = last;
                break;
            }
            Progress::Fails => return Ok(None),
            Progress::Next => {}
        }
    }
    Ok(Some(Passage { is_certain: state.is_certain, names_port: state.names_port, end }))
}

/// A byte of a register; nothing is known of it by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Byte {
    value: Option<u8>,
    is_of_port: bool,
}

fn known(bytes: &[u8]) -> Vec<Byte> {
    bytes.iter().map(|byte| Byte { value: Some(*byte), is_of_port: false }).collect()
}

fn values(bytes: &[Byte]) -> Option<Vec<u8>> {
    bytes.iter().map(|byte| byte.value).collect()
}

impl Packet<'_> {
    fn field(self, field: Field) -> Vec<Byte> {
        match field {
            Field::ConnectionDirection => known(&[CONNECTION_ORIGINAL]),
            Field::ConnectionState => known(&STATE_NEW.to_ne_bytes()),
            Field::DestinationType => known(&DestinationType::Local.number().to_ne_bytes()),
            Field::Input => known(&padded(&self.arrival.input)),
            Field::InputIndex => known(&self.arrival.link.to_ne_bytes()),
            Field::NetworkProtocol => known(&[self.family()]),
            Field::Payload { header, offset, length } => {
                let offsets = (0..length).take(LONGEST).map(|index| offset.saturating_add(index));
                offsets.map(|offset| self.byte(header, offset)).collect()
            }
            Field::Protocol => known(&[PROTOCOL_UDP]),
            Field::Unknown => vec![Byte::default(); LONGEST],
        }
    }

    fn family(self) -> u8 {
        if self.arrival.destination.is_ipv4() { NFPROTO_IPV4 } else { NFPROTO_IPV6 }
    }

    fn byte(self, header: u32, offset: u32) -> Byte {
        let within =
            |bytes: &[u8], start: u32| bytes.get(usize::try_from(offset.checked_sub(start)?).ok()?).copied();
        if header == Header::Transport.number() {
            let value = within(&self.arrival.port.to_be_bytes(), DESTINATION_PORT);
            return Byte { value, is_of_port: value.is_some() };
        }
        if header != Header::Network.number() {
            return Byte::default();
        }
        let (protocol, destination) = if self.arrival.destination.is_ipv4() { IPV4 } else { IPV6 };
        let is_protocol = offset == protocol;
        let value = if is_protocol {
            Some(PROTOCOL_UDP)
        } else {
            within(&octets(self.arrival.destination), destination)
        };
        Byte { value, is_of_port: false }
    }
}

#[derive(Debug)]
struct Registers([Byte; REGISTERS]);

impl Default for Registers {
    fn default() -> Self {
        Self([Byte::default(); REGISTERS])
    }
}

impl Registers {
    /// The bytes from a register on; those behind the last one are not known.
    fn load(&self, register: u32, length: usize) -> Vec<Byte> {
        let from = first(register).and_then(|first| self.0.get(first..)).unwrap_or_default();
        from.iter().copied().chain(std::iter::repeat(Byte::default())).take(length.min(REGISTERS)).collect()
    }

    /// The kernel fills the last four bytes up with zeros.
    fn store(&mut self, register: u32, bytes: &[Byte]) {
        let zeros = known(&[0; WORD]);
        let length = bytes.len().next_multiple_of(WORD);
        let filled = bytes.iter().chain(&zeros).take(length);
        let into = first(register).and_then(|first| self.0.get_mut(first..)).unwrap_or_default();
        into.iter_mut().zip(filled).for_each(|(to, from)| *to = *from);
    }

    fn forget(&mut self, register: u32) {
        self.store(register, &[Byte::default(); LONGEST]);
    }
}

/// Place of a register's first byte; `None` for that of the verdict, and where there is none.
fn first(register: u32) -> Option<usize> {
    let register = usize::try_from(register).ok()?;
    match register {
        1..=4 => register.checked_sub(1)?.checked_mul(LONGEST),
        8..=23 => register.checked_sub(8)?.checked_mul(WORD),
        _ => None,
    }
}

/// Way from one step of a rule.
enum Progress {
    End(End),
    Fails,
    Next,
}

struct State<'a> {
    packet: Packet<'a>,
    registers: Registers,
    is_certain: bool,
    names_port: bool,
}

impl State<'_> {
    fn step<S: Sets>(&mut self, step: &Step, sets: &mut S) -> Result<Progress> {
        Ok(match step {
            Step::Bitwise { from, to, operands } => {
                let bytes = self.registers.load(*from, operands.len());
                let masked: Vec<Byte> =
                    bytes.into_iter().zip(operands).map(|(byte, operand)| byte.masked(*operand)).collect();
                self.registers.store(*to, &masked);
                Progress::Next
            }
            Step::Compare { register, operation, with } => {
                let bytes = self.registers.load(*register, with.len());
                let is_met = operation.and_then(|operation| compare(&bytes, operation, with));
                self.condition(is_met, is_of_port(&bytes))
            }
            Step::Constant { register, bytes } => {
                self.registers.store(*register, &known(bytes));
                Progress::Next
            }
            Step::Load { register, field } => {
                self.registers.store(*register, &self.packet.field(*field));
                Progress::Next
            }
            Step::Lookup { set, register, result, is_inverted } => {
                return self.look_up(set, *register, (*result, *is_inverted), sets);
            }
            Step::Never => Progress::Fails,
            Step::Ports { ranges, is_inverted } => {
                let port = self.packet.arrival.port;
                let is_within = ranges.iter().any(|(first, last)| (*first..=*last).contains(&port));
                self.condition(Some(is_within != *is_inverted), true)
            }
            Step::Range { register, is_inverted, first, last } => {
                let bytes = self.registers.load(*register, first.len());
                let is_within = values(&bytes).map(|it| it >= *first && it <= *last);
                self.condition(is_within.map(|within| within != *is_inverted), is_of_port(&bytes))
            }
            Step::Translate(translation) => self.translate(translation),
            Step::Unknown => {
                self.registers = Registers::default();
                self.condition(None, false)
            }
            Step::Verdict(verdict) => Progress::End(End::Verdicts(vec![verdict.clone()])),
        })
    }

    /// `None` is for a condition of which is not known whether it is met.
    fn condition(&mut self, is_met: Option<bool>, is_of_port: bool) -> Progress {
        match is_met {
            Some(false) => return Progress::Fails,
            Some(true) => self.names_port |= is_of_port,
            None => self.is_certain = false,
        }
        Progress::Next
    }

    fn look_up<S: Sets>(
        &mut self,
        set: &str,
        register: u32,
        (result, is_inverted): (Option<u32>, bool),
        sets: &mut S,
    ) -> Result<Progress> {
        let length = sets.key_length(set)?;
        let bytes = self.registers.load(register, length.unwrap_or_default());
        let Some(key) = length.and_then(|_| values(&bytes)) else {
            self.is_certain = false;
            if result == Some(VERDICT_REGISTER) {
                return Ok(Progress::End(End::Verdicts(sets.verdicts(set)?)));
            }
            self.registers.forget(result.unwrap_or_default());
            return Ok(Progress::Next);
        };
        let found = sets.element(set, &key)?;
        if found.is_some() == is_inverted {
            return Ok(Progress::Fails);
        }
        self.names_port |= is_of_port(&bytes);
        if let (Some(VERDICT_REGISTER), Some(verdict)) = (result, found) {
            return Ok(Progress::End(End::Verdicts(vec![verdict])));
        }
        self.registers.forget(result.unwrap_or_default());
        Ok(Progress::Next)
    }

    /// A chain of a table for both families passes over what is for the other one.
    fn translate(&self, Translation { family, address, port }: &Translation) -> Progress {
        let families = [self.packet.family(), NFPROTO_INET].map(u32::from);
        if family.is_some_and(|family| !families.contains(&family)) {
            return Progress::Next;
        }
        let destination = self.packet.arrival.destination;
        let mut own = self.packet.own.iter().filter(|own| own.is_ipv4() == destination.is_ipv4());
        let stays = *address == Operand::Same || own.any(|own| self.gives(address, &octets(*own)));
        let port_stays = *port == Operand::Same || self.gives(port, &self.packet.arrival.port.to_be_bytes());
        let end = if stays && port_stays { End::Verdicts(vec![Verdict::Accept]) } else { End::Translated };
        Progress::End(end)
    }

    fn gives(&self, operand: &Operand, bytes: &[u8]) -> bool {
        match operand {
            Operand::Bytes(given) => given.starts_with(bytes),
            Operand::Other | Operand::Same => false,
            Operand::Register(register) => {
                values(&self.registers.load(*register, bytes.len())).is_some_and(|given| given == bytes)
            }
        }
    }
}

impl Byte {
    /// Keeps the bits of a mask, and inverts others then.
    fn masked(self, (mask, inverted): (u8, u8)) -> Self {
        Self { value: self.value.map(|value| (value & mask) ^ inverted), ..self }
    }
}

fn is_of_port(bytes: &[Byte]) -> bool {
    bytes.iter().any(|byte| byte.is_of_port)
}

/// Whether a comparison holds; `None` if that is not known.
fn compare(bytes: &[Byte], operation: Comparison, with: &[u8]) -> Option<bool> {
    let mut pairs = bytes.iter().zip(with);
    let differs = pairs.any(|(byte, with)| byte.value.is_some_and(|value| value != *with));
    if differs && [Comparison::Equal, Comparison::NotEqual].contains(&operation) {
        return Some(operation == Comparison::NotEqual);
    }
    let ordering = values(bytes)?.as_slice().cmp(with);
    Some(match operation {
        Comparison::AtLeast => ordering.is_ge(),
        Comparison::AtMost => ordering.is_le(),
        Comparison::Equal => ordering.is_eq(),
        Comparison::Greater => ordering.is_gt(),
        Comparison::Less => ordering.is_lt(),
        Comparison::NotEqual => ordering.is_ne(),
    })
}
