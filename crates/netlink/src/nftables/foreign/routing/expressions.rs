//! Effect and conditions of a rule, from its expressions.
//!
//! iptables-nft has its own extensions (`linux/netfilter/nf_tables_compat.h`): the targets `MARK` and `CONNMARK`, and the match `rpfilter`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_address::IpFamily;

use super::conditions::{Conditions, DeviceName};
use super::effect::{Effect, MarkChange};
use super::extensions;
use crate::nftables::attributes::{Parsed, array, attributes, be32, find, require, text};
use crate::nftables::foreign::walk::{META_INPUT, META_OUTPUT, Verdict, parse_verdict};
use crate::nftables::foreign::{MATCH_INFO, MATCH_NAME, META_MARK, NFPROTO_IPV4, NFPROTO_IPV6, value};
use crate::nftables::uapi::rule;

/// `NFT_REG_VERDICT`
pub(super) const VERDICT_REGISTER: u32 = 0;
/// `NFT_META_L4PROTO`, and `IPPROTO_UDP`.
const META_PROTOCOL: u32 = 16;
pub(super) const PROTOCOL_UDP: u8 = 17;
/// `NFT_META_NFPROTO`
const META_NETWORK_PROTOCOL: u32 = 15;
/// `NFT_PAYLOAD_NETWORK_HEADER`, and where the destination is in it (RFC 791, section 3.1; RFC 8200, section 3).
const NETWORK_HEADER: u32 = 1;
const DESTINATION_IPV4: u32 = 16;
const DESTINATION_IPV6: u32 = 24;
/// `NFTA_FIB_F_SADDR`, `_MARK`, `_IIF`
const FIB_SOURCE: u32 = 1;
const FIB_MARK: u32 = 4;
const FIB_INPUT: u32 = 8;
/// `NFT_FIB_RESULT_OIF`, `_OIFNAME`
const FIB_DEVICE: [u32; 2] = [1, 2];
/// `XT_RPFILTER_LOOSE`, `_VALID_MARK`, `_INVERT` (`linux/netfilter/xt_rpfilter.h`)
const RPFILTER_LOOSE: u8 = 1;
const RPFILTER_VALID_MARK: u8 = 2;
const RPFILTER_INVERT: u8 = 8;

/// A rule as the kernel shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ParsedRule {
    pub(super) handle: u64,
    pub(super) effect: Option<Effect>,
    /// Conditions that a packet has met when the effect comes; others may follow.
    pub(super) before: Conditions,
    pub(super) conditions: Conditions,
    pub(super) packets: Option<u64>,
    pub(super) verdict: Verdict,
}

/// Reads the expressions of a rule in a table whose chains see packets of this family, or of both; the handle is none of them.
pub(super) fn parse_expressions(expressions: &[u8], family: Option<IpFamily>) -> Parsed<ParsedRule> {
    let mut reader = Reader { family, ..Reader::default() };
    for element in attributes(expressions) {
        let (_, element) = element?;
        let data = find(element, rule::EXPRESSION_DATA)?.unwrap_or_default();
        reader.expression(text(require(element, rule::EXPRESSION_NAME)?)?, data)?;
    }
    Ok(reader.finish())
}

/// Content of a register.
#[derive(Debug, Clone, Copy)]
enum Loaded {
    /// Bytes that are the destination of packets of this family.
    Destination(IpFamily),
    Device {
        is_input: bool,
    },
    Mark(MarkChange),
    NetworkProtocol,
    Protocol,
    /// Device by which the source is reached without the packet's mark, zero if it is not the one by which the packet came.
    SourceDevice,
}

/// Follows a rule's expressions.
#[derive(Debug, Default)]
struct Reader {
    parsed: ParsedRule,
    /// Family of all packets that come this far.
    family: Option<IpFamily>,
    registers: BTreeMap<u32, Loaded>,
    /// Whether it is for packets that fail a check of their source.
    checks_source: bool,
}

impl Reader {
    fn expression(&mut self, name: &str, data: &[u8]) -> Parsed<()> {
        match name {
            "bitwise" => self.bitwise(data)?,
            "cmp" => self.compare(data)?,
            "counter" => {
                let packets = find(data, rule::COUNTER_PACKETS)?.map(array).transpose()?;
                self.parsed.packets = packets.map(u64::from_be_bytes);
            }
            // `NFTA_CT_DREG`; without one it sets something.
            "ct" => {
                if let Some(register) = find(data, 1)? {
                    self.load(register, Some(Loaded::Mark(MarkChange::UNKNOWN)))?;
                }
            }
            "fib" => self.look_up_source(data)?,
            "immediate" => self.immediate(data)?,
            "log" => {}
            "lookup" => {
                self.registers.clear();
                self.parsed.conditions.has_more = true;
                // `NFTA_LOOKUP_DREG`: of a map of verdicts, some end the way of packets.
                if find(data, 3)?.map(be32).transpose()? == Some(VERDICT_REGISTER) {
                    self.parsed.verdict = Verdict::Accept;
                }
            }
            "match" => self.extension(data)?,
            "meta" => self.meta(data)?,
            "payload" => self.payload(data)?,
            "reject" => self.parsed.verdict = Verdict::Refuse,
            "target" => self.target(data)?,
            _ => {
                self.registers.clear();
                self.parsed.conditions.has_more = true;
            }
        }
        Ok(())
    }

    fn finish(mut self) -> ParsedRule {
        if self.checks_source && self.parsed.verdict == Verdict::Refuse {
            self.has_effect(Effect::SourceCheck);
        } else if self.checks_source {
            self.parsed.conditions.has_more = true;
        }
        self.parsed
    }

    fn has_effect(&mut self, effect: Effect) {
        self.parsed.effect = Some(effect);
        self.parsed.before = self.parsed.conditions.clone();
    }

    /// `None` is for what does not matter.
    fn load(&mut self, register: &[u8], loaded: Option<Loaded>) -> Parsed<()> {
        let register = be32(register)?;
        match loaded {
            Some(loaded) => {
                self.registers.insert(register, loaded);
            }
            None => {
                self.registers.remove(&register);
            }
        }
        Ok(())
    }

    fn loaded(&self, register: &[u8]) -> Parsed<Option<Loaded>> {
        Ok(self.registers.get(&be32(register)?).copied())
    }

    /// `NFTA_BITWISE_SREG`, `_DREG`, `_MASK`, `_XOR` and `_OP`, of which the first is the one with a mask.
    fn bitwise(&mut self, data: &[u8]) -> Parsed<()> {
        let is_mask = find(data, 6)?.map_or(Ok(0), be32)? == 0;
        // `NFTA_BITWISE_SREG2`: what two registers give is not followed, and may have all bits of the mark.
        self.parsed.conditions.has_more |= find(data, 8)?.is_some();
        let operands = number(value(data, 4)?).zip(number(value(data, 5)?));
        let result = match (self.loaded(require(data, 1)?)?, operands) {
            (Some(Loaded::Mark(change)), Some((mask, inverted))) if is_mask => {
                Some(Loaded::Mark(change.masked(mask, inverted)))
            }
            _ => None,
        };
        self.load(require(data, 2)?, result)
    }

    /// `NFTA_CMP_SREG`, `_OP` (0 is equal, 1 is not equal) and `_DATA`.
    fn compare(&mut self, data: &[u8]) -> Parsed<()> {
        let operation = be32(require(data, 2)?)?;
        let with = value(data, 3)?;
        match (self.loaded(require(data, 1)?)?, operation) {
            (Some(Loaded::Device { is_input }), 0 | 1) => {
                let condition = DeviceName { is_input, is_equal: operation == 0, bytes: with.to_vec() };
                self.parsed.conditions.devices.push(condition);
            }
            (Some(Loaded::Destination(family)), 0) => {
                let is_known = self.family == Some(family);
                self.parsed.conditions.destinations.extend(address(with).filter(|_| is_known));
                self.parsed.conditions.has_more = true;
            }
            (Some(Loaded::NetworkProtocol), 0) => {
                self.family = network_protocol(with).or(self.family);
                self.parsed.conditions.has_more = true;
            }
            (Some(Loaded::Protocol), 0) if with == [PROTOCOL_UDP] => {}
            (Some(Loaded::SourceDevice), 0) if with.iter().all(|byte| *byte == 0) => {
                self.checks_source = true;
            }
            _ => self.parsed.conditions.has_more = true,
        }
        Ok(())
    }

    /// `NFTA_FIB_DREG`, `_RESULT` and `_FLAGS`.
    fn look_up_source(&mut self, data: &[u8]) -> Parsed<()> {
        let result = be32(require(data, 2)?)?;
        let flags = be32(require(data, 3)?)?;
        let is_check = flags & (FIB_SOURCE | FIB_INPUT | FIB_MARK) == FIB_SOURCE | FIB_INPUT;
        let loaded = (is_check && FIB_DEVICE.contains(&result)).then_some(Loaded::SourceDevice);
        self.load(require(data, 1)?, loaded)
    }

    /// A verdict, or a constant: `NFTA_IMMEDIATE_DREG` and `_DATA`.
    fn immediate(&mut self, data: &[u8]) -> Parsed<()> {
        if let Some(verdict) = parse_verdict(data)? {
            self.parsed.verdict = verdict;
            return Ok(());
        }
        let constant = number(value(data, 2)?).map(|number| Loaded::Mark(MarkChange::constant(number)));
        self.load(require(data, 1)?, constant)
    }

    fn extension(&mut self, data: &[u8]) -> Parsed<()> {
        match text(require(data, MATCH_NAME)?)? {
            "comment" => {}
            "rpfilter" => {
                let flags = require(data, MATCH_INFO)?.first().copied().unwrap_or_default();
                let known = RPFILTER_LOOSE | RPFILTER_VALID_MARK | RPFILTER_INVERT;
                self.checks_source |= flags & known == RPFILTER_INVERT;
                self.parsed.conditions.has_more |= flags & known != RPFILTER_INVERT;
            }
            _ => self.parsed.conditions.has_more = true,
        }
        Ok(())
    }

    /// `NFTA_META_DREG`, `_KEY` and `_SREG`: with the first it loads, with the last it sets.
    fn meta(&mut self, data: &[u8]) -> Parsed<()> {
        let key = be32(require(data, 2)?)?;
        if let Some(register) = find(data, 1)? {
            let loaded = match key {
                META_INPUT => Some(Loaded::Device { is_input: true }),
                META_MARK => Some(Loaded::Mark(MarkChange::NONE)),
                META_NETWORK_PROTOCOL => Some(Loaded::NetworkProtocol),
                META_OUTPUT => Some(Loaded::Device { is_input: false }),
                META_PROTOCOL => Some(Loaded::Protocol),
                _ => None,
            };
            return self.load(register, loaded);
        }
        if key == META_MARK {
            let change = match self.loaded(require(data, 3)?)? {
                Some(Loaded::Mark(change)) => change,
                _ => MarkChange::UNKNOWN,
            };
            self.has_effect(Effect::Mark(change));
        }
        Ok(())
    }

    /// `NFTA_PAYLOAD_DREG`, `_BASE`, `_OFFSET` and `_LEN`; without the first it changes the packet.
    fn payload(&mut self, data: &[u8]) -> Parsed<()> {
        self.registers.clear();
        self.parsed.conditions.has_more = true;
        let Some(register) = find(data, 1)? else {
            // The destination, it may be.
            self.parsed.conditions.destinations.clear();
            self.parsed.before.destinations.clear();
            return Ok(());
        };
        let place = (be32(require(data, 2)?)?, be32(require(data, 3)?)?, be32(require(data, 4)?)?);
        let loaded = match place {
            (NETWORK_HEADER, DESTINATION_IPV4, 4) => Some(Loaded::Destination(IpFamily::V4)),
            (NETWORK_HEADER, DESTINATION_IPV6, 16) => Some(Loaded::Destination(IpFamily::V6)),
            _ => None,
        };
        self.load(register, loaded)
    }

    /// `NFTA_TARGET_NAME`, `_REV` and `_INFO`
    fn target(&mut self, data: &[u8]) -> Parsed<()> {
        let info = require(data, 3)?;
        let change = extensions::target(text(require(data, 1)?)?, be32(require(data, 2)?)?, info);
        if let Some(change) = change {
            self.has_effect(Effect::Mark(change));
        }
        Ok(())
    }
}

/// `NFPROTO_IPV4`, `NFPROTO_IPV6` in one byte.
fn network_protocol(bytes: &[u8]) -> Option<IpFamily> {
    match bytes {
        [NFPROTO_IPV4] => Some(IpFamily::V4),
        [NFPROTO_IPV6] => Some(IpFamily::V6),
        _ => None,
    }
}

/// All bytes of an address.
fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from).ok();
    v4.or_else(|| <[u8; 16]>::try_from(bytes).map(IpAddr::from).ok())
}

/// Four bytes in host order.
fn number(bytes: &[u8]) -> Option<u32> {
    <[u8; 4]>::try_from(bytes).ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nftables::attributes::AttributeWriter;
    use crate::nftables::{AddressEnd, Comparison, Expression, Header, Meta};

    const STORE: Expression = Expression::StoreMeta(Meta::Mark);

    fn written(write: impl FnOnce(&mut AttributeWriter)) -> ParsedRule {
        let mut list = AttributeWriter::new(&[]);
        write(&mut list);
        parse_expressions(&list.finish("test").unwrap(), None).unwrap()
    }

    fn of(expressions: &[Expression]) -> ParsedRule {
        written(|list| expressions.iter().for_each(|expression| expression.write(list)))
    }

    fn expression(list: &mut AttributeWriter, name: &str, data: impl FnOnce(&mut AttributeWriter)) {
        list.nested(1, |element| {
            element.text(rule::EXPRESSION_NAME, name);
            element.nested(rule::EXPRESSION_DATA, data);
        });
    }

    /// An extension of iptables: name, revision and what it has.
    fn extension(list: &mut AttributeWriter, kind: &str, name: &str, revision: u32, info: &[u8]) {
        expression(list, kind, |data| {
            data.text(1, name);
            data.be32(2, revision);
            data.bytes(3, info);
        });
    }

    fn change(rule: &ParsedRule) -> MarkChange {
        match rule.effect {
            Some(Effect::Mark(change)) => change,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_mark_behind_a_rule_follows_from_the_one_before() {
        let constant = of(&[Expression::LoadConstant(0xc8_u32.to_ne_bytes().to_vec()), STORE]);
        assert_eq!(change(&constant), MarkChange::constant(0xc8));
        let added = change(&of(&Expression::replace_mark(u32::MAX, 0x40)));
        assert_eq!((added.of(0x20), added.of(0x40), added.unknown), (0x60, 0x40, 0));
        let kept = change(&of(&Expression::replace_mark(0x60, 1)));
        assert_eq!((kept.of(0x1_0023), kept.unknown), (0x21, 0));
        let restored = of(&[Expression::LoadConnectionMark, STORE]);
        assert_eq!(change(&restored), MarkChange::UNKNOWN);
        assert!(!restored.conditions.has_more);
        let bits = Expression::replace_bits(0xff00, 0);
        let part = change(&of(&[Expression::LoadConnectionMark, bits, STORE]));
        assert_eq!((part.kept, part.set, part.unknown), (0, 0, 0xff00));
        let map = of(&[Expression::LoadMeta(Meta::Mark), Expression::LookupMap("m".to_owned()), STORE]);
        assert_eq!(change(&map), MarkChange::UNKNOWN);
        let both = written(|list| {
            expression(list, "bitwise", |data| data.be32s(&[(1, 1), (2, 1), (6, 4), (8, 2)]));
            STORE.write(list);
        });
        assert!(both.conditions.has_more, "meta mark | ct mark");
        let saved = of(&[Expression::LoadMeta(Meta::Mark), Expression::StoreConnectionMark]);
        assert_eq!(saved.effect, None);
    }

    #[test]
    fn a_target_of_iptables_is_an_effect() {
        let info: Vec<u8> = [6, u32::MAX].iter().flat_map(|word: &u32| word.to_ne_bytes()).collect();
        let target = |name: &str| written(|list| extension(list, "target", name, 2, &info));
        assert_eq!(change(&target("MARK")), MarkChange::constant(6));
        assert_eq!(target("TCPMSS").effect, None);
    }

    #[test]
    fn the_destination_is_known_where_the_family_is() {
        let destinations = |expressions: &[Expression], family: Option<IpFamily>| {
            let mut list = AttributeWriter::new(&[]);
            expressions.iter().for_each(|expression| expression.write(&mut list));
            let rule = parse_expressions(&list.finish("test").unwrap(), family).unwrap();
            rule.before.destinations.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let mark = Expression::replace_mark(0, 0x40);
        for (address, family, other) in
            [("192.0.2.1", IpFamily::V4, IpFamily::V6), ("2001:db8::1", IpFamily::V6, IpFamily::V4)]
        {
            let to = Expression::address_is(AddressEnd::Destination, address.parse().unwrap());
            assert_eq!(destinations(&[&to[..], &mark].concat(), None), [address]);
            // As in a table of one family, without a comparison of the network protocol.
            let bytes = [to.get(2..).unwrap(), &mark].concat();
            assert_eq!(destinations(&bytes, Some(family)), [address]);
            assert!(destinations(&bytes, Some(other)).is_empty() && destinations(&bytes, None).is_empty());
            assert!(destinations(&[&mark[..], &to].concat(), None).is_empty(), "all packets get the mark");
            let from = Expression::address_is(AddressEnd::Source, address.parse().unwrap());
            assert!(destinations(&[&from[..], &mark].concat(), None).is_empty());
            let (header, offset, length) = (Header::Network, 16, 4);
            let write = Expression::StorePayload { header, offset, length, checksum: None };
            assert!(
                destinations(&[&to[..], &mark, &[write]].concat(), None).is_empty(),
                "it is another then"
            );
        }
    }

    #[test]
    fn conditions_behind_the_effect_are_none_of_it() {
        let to_eth0 = [Expression::LoadMeta(Meta::OutputInterface), Expression::is_interface("eth0")];
        let rule = of(&[&Expression::replace_mark(0, 1)[..], &to_eth0].concat());
        assert_eq!((rule.before.devices.len(), rule.conditions.devices.len()), (0, 1));
        let rule = of(&[&to_eth0[..], &Expression::replace_mark(0, 1)].concat());
        assert_eq!((rule.before.devices.len(), rule.conditions.devices.len()), (1, 1));
    }

    #[test]
    fn conditions_on_devices_and_udp_are_known() {
        let to =
            |device: &str| [Expression::LoadMeta(Meta::OutputInterface), Expression::is_interface(device)];
        let protocol = |number: u8| {
            let is_it = Expression::Compare(Comparison::Equal, vec![number]);
            [Expression::LoadMeta(Meta::TransportProtocol), is_it]
        };
        let udp = of(&[&to("eth0")[..], &protocol(PROTOCOL_UDP), &Expression::replace_mark(0, 1)].concat());
        assert!(udp.conditions.are_met("", "eth0"));
        assert!(!udp.conditions.are_met("", "eth01") && !udp.conditions.are_met("eth0", "eth1"));
        let tcp = of(&[&protocol(6)[..], &Expression::replace_mark(0, 1)].concat());
        assert!(tcp.conditions.has_more && !tcp.conditions.are_met("", "eth0"));
        let marked =
            of(&[Expression::mark_is(0, u32::MAX), Expression::replace_mark(0, 1).to_vec()].concat());
        assert!(marked.conditions.has_more);
        let but = [Expression::LoadMeta(Meta::OutputInterface), Expression::is_other_interface("lo")];
        assert!(of(&but).conditions.are_met("", "eth0") && !of(&but).conditions.are_met("", "lo"));
        let verdicts = written(|list| expression(list, "lookup", |data| data.be32(3, VERDICT_REGISTER)));
        assert_eq!((verdicts.verdict, verdicts.conditions.has_more), (Verdict::Accept, true));
        let all = udp.conditions.with(&of(&to("eth1")).conditions);
        assert!(!all.are_met("", "eth0") && !all.are_met("", "eth1"));
    }

    #[test]
    fn a_check_of_sources_without_the_mark_is_found() {
        let missing = Expression::Compare(Comparison::Equal, vec![0]);
        let check = |end| of(&[Expression::LoadSourceIsReachable, missing.clone(), Expression::Counter, end]);
        assert_eq!(check(Expression::Drop).effect, Some(Effect::SourceCheck));
        assert!(!check(Expression::Drop).conditions.has_more);
        assert_eq!(check(Expression::Accept).effect, None);
        assert!(check(Expression::Accept).conditions.has_more);
        let rpfilter = |flags: u8, end: Expression| {
            written(|list| {
                extension(list, "match", "rpfilter", 0, &[flags, 0, 0, 0]);
                end.write(list);
            })
        };
        assert_eq!(rpfilter(RPFILTER_INVERT, Expression::Drop).effect, Some(Effect::SourceCheck));
        for other in [RPFILTER_VALID_MARK, RPFILTER_LOOSE] {
            let rule = rpfilter(RPFILTER_INVERT | other, Expression::Drop);
            assert_eq!((rule.effect, rule.conditions.has_more), (None, true));
        }
        assert_eq!(rpfilter(0, Expression::Accept).effect, None);
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_expressions(&bytes, None);
        }

        #[test]
        fn hostile_extensions_are_an_error_or_nothing(
            name in "(MARK|CONNMARK|rpfilter|comment)",
            revision in 0_u32..4,
            info in proptest::collection::vec(any::<u8>(), 0..24),
        ) {
            for kind in ["match", "target"] {
                let mut list = AttributeWriter::new(&[]);
                extension(&mut list, kind, &name, revision, &info);
                let _ = parse_expressions(&list.finish("test").unwrap(), None);
            }
        }
    }
}
