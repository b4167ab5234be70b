//! Steps of a rule in a chain of type nat, from its expressions.

use super::extensions;
use crate::nftables::attributes::{Parsed, array, attributes, be32, find, require, text};
use crate::nftables::foreign::walk::{META_INPUT, Verdict, parse_verdict};
use crate::nftables::foreign::{MATCH_INFO, MATCH_NAME, MATCH_REVISION, value};
use crate::nftables::uapi::rule;
use crate::nftables::{Comparison, Meta};

/// `NFT_META_IIF`
const META_INPUT_INDEX: u32 = 4;
/// `NFT_FIB_RESULT_ADDRTYPE`, `NFTA_FIB_F_DADDR`
const FIB_ADDRESS_TYPE: u32 = 3;
const FIB_DESTINATION: u32 = 2;
/// `NFT_CT_STATE`, `NFT_CT_DIRECTION`
const CONNECTION_STATE: u32 = 0;
const CONNECTION_DIRECTION: u32 = 1;
/// `NFT_NAT_DNAT`
const NAT_DESTINATION: u32 = 1;
/// `NFT_LOOKUP_F_INV`
const LOOKUP_INVERTED: u32 = 1;

/// A rule as the kernel shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NatRule {
    pub(super) handle: u64,
    /// Packets that it has counted; `None` if it does not count.
    pub(super) packets: Option<u64>,
    pub(super) steps: Vec<Step>,
}

/// One step of a rule. A condition that is not met ends the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Keeps the bits of masks, one for each byte, and inverts others then.
    Bitwise {
        from: u32,
        to: u32,
        operands: Vec<(u8, u8)>,
    },
    /// Condition on a register; `None` for an operation that is not known.
    Compare {
        register: u32,
        operation: Option<Comparison>,
        with: Vec<u8>,
    },
    /// Puts a constant into a register.
    Constant {
        register: u32,
        bytes: Vec<u8>,
    },
    /// Puts a property of the packet into a register.
    Load {
        register: u32,
        field: Field,
    },
    /// Condition on an element of a set, or the value that a map has.
    Lookup {
        set: String,
        register: u32,
        result: Option<u32>,
        is_inverted: bool,
    },
    /// Condition that a packet for this host does not meet.
    Never,
    /// Condition on the port: in one of these ranges, or in none.
    Ports {
        ranges: Vec<(u16, u16)>,
        is_inverted: bool,
    },
    /// Condition on a register: in a range, or outside of it.
    Range {
        register: u32,
        is_inverted: bool,
        first: Vec<u8>,
        last: Vec<u8>,
    },
    /// Translates the destination.
    Translate(Translation),
    /// Step of another kind, which may be a condition that the packet does not meet. Registers are not known then.
    Unknown,
    Verdict(Verdict),
}

/// A property of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    ConnectionDirection,
    ConnectionState,
    DestinationType,
    Input,
    InputIndex,
    NetworkProtocol,
    Payload { header: u32, offset: u32, length: u32 },
    Protocol,
    Unknown,
}

/// A destination that a translation gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Translation {
    /// `NFPROTO_*` of packets that it is for; `None` for all.
    pub(super) family: Option<u32>,
    pub(super) address: Operand,
    pub(super) port: Operand,
}

/// An address or port that a translation gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Operand {
    /// Bytes of it, and more behind them that do not count.
    Bytes(Vec<u8>),
    /// Value among several, or one that is not known.
    Other,
    Register(u32),
    /// Value of the packet, or an address of this host in its place.
    Same,
}

/// Reads the expressions of a rule.
pub(super) fn parse(expressions: &[u8], handle: u64) -> Parsed<NatRule> {
    let mut rule = NatRule { handle, ..NatRule::default() };
    for element in attributes(expressions) {
        let (_, element) = element?;
        let data = find(element, rule::EXPRESSION_DATA)?.unwrap_or_default();
        match text(require(element, rule::EXPRESSION_NAME)?)? {
            "counter" => {
                let packets = find(data, rule::COUNTER_PACKETS)?.map(array).transpose()?;
                rule.packets = packets.map(u64::from_be_bytes);
            }
            "match" => {
                let (name, revision) =
                    (text(require(data, MATCH_NAME)?)?, be32(require(data, MATCH_REVISION)?)?);
                rule.steps.extend(extensions::conditions(name, revision, require(data, MATCH_INFO)?));
            }
            name => rule.steps.extend(step(name, data)?),
        }
    }
    // Tens of thousands of rules are kept.
    rule.steps.shrink_to_fit();
    Ok(rule)
}

/// `None` for what changes neither a register nor the packet's way.
fn step(name: &str, data: &[u8]) -> Parsed<Option<Step>> {
    Ok(Some(match name {
        "bitwise" => bitwise(data)?,
        // `NFTA_BYTEORDER_DREG`
        "byteorder" => Step::Load { register: be32(require(data, 2)?)?, field: Field::Unknown },
        // `NFTA_CMP_SREG`, `_OP` and `_DATA`
        "cmp" => Step::Compare {
            register: be32(require(data, 1)?)?,
            operation: Comparison::of(be32(require(data, 2)?)?),
            with: value(data, 3)?.to_vec(),
        },
        "ct" | "fib" | "meta" => return load(name, data),
        "immediate" => match parse_verdict(data)? {
            Some(verdict) => Step::Verdict(verdict),
            None => Step::Constant { register: be32(require(data, 1)?)?, bytes: value(data, 2)?.to_vec() },
        },
        "last" | "log" | "objref" => return Ok(None),
        "lookup" => lookup(data)?,
        "nat" => return nat(data),
        "payload" => payload(data)?,
        // `NFTA_RANGE_SREG`, `_OP`, `_FROM_DATA` and `_TO_DATA`
        "range" => Step::Range {
            register: be32(require(data, 1)?)?,
            is_inverted: be32(require(data, 2)?)? != 0,
            first: value(data, 3)?.to_vec(),
            last: value(data, 4)?.to_vec(),
        },
        // `NFTA_REDIR_REG_PROTO_MIN` and `_MAX`
        "redir" => {
            let port = operand(data, 1, 2)?;
            Step::Translate(Translation { family: None, address: Operand::Same, port })
        }
        "reject" => Step::Verdict(Verdict::Refuse),
        // `NFTA_TARGET_NAME` and `_INFO`
        "target" => {
            let translation = extensions::translation(text(require(data, 1)?)?, require(data, 3)?);
            return Ok(translation.map(Step::Translate));
        }
        _ => Step::Unknown,
    }))
}

/// `NFTA_BITWISE_SREG`, `_DREG`, `_MASK`, `_XOR`, `_OP` and `_SREG2`: what has no mask is not followed.
fn bitwise(data: &[u8]) -> Parsed<Step> {
    let to = be32(require(data, 2)?)?;
    let is_mask = find(data, 6)?.map_or(Ok(0), be32)? == 0 && find(data, 8)?.is_none();
    if !is_mask {
        return Ok(Step::Load { register: to, field: Field::Unknown });
    }
    let operands = value(data, 4)?.iter().copied().zip(value(data, 5)?.iter().copied()).collect();
    Ok(Step::Bitwise { from: be32(require(data, 1)?)?, to, operands })
}

/// `NFTA_CT_DREG` and `_KEY`, `NFTA_META_DREG` and `_KEY`, `NFTA_FIB_DREG`, `_RESULT` and `_FLAGS`. Without a register something is set.
fn load(name: &str, data: &[u8]) -> Parsed<Option<Step>> {
    let Some(register) = find(data, 1)? else { return Ok(None) };
    let key = be32(require(data, 2)?)?;
    let field = match name {
        "ct" => match key {
            CONNECTION_DIRECTION => Field::ConnectionDirection,
            CONNECTION_STATE => Field::ConnectionState,
            _ => Field::Unknown,
        },
        "fib" => {
            let flags = be32(require(data, 3)?)?;
            let is_type = key == FIB_ADDRESS_TYPE && flags & FIB_DESTINATION != 0;
            if is_type { Field::DestinationType } else { Field::Unknown }
        }
        _ if key == Meta::NetworkProtocol.number() => Field::NetworkProtocol,
        _ if key == Meta::TransportProtocol.number() => Field::Protocol,
        _ => match key {
            META_INPUT => Field::Input,
            META_INPUT_INDEX => Field::InputIndex,
            _ => Field::Unknown,
        },
    };
    Ok(Some(Step::Load { register: be32(register)?, field }))
}

/// `NFTA_LOOKUP_SET`, `_SREG`, `_DREG` and `_FLAGS`
fn lookup(data: &[u8]) -> Parsed<Step> {
    Ok(Step::Lookup {
        set: text(require(data, 1)?)?.to_owned(),
        register: be32(require(data, 2)?)?,
        result: find(data, 3)?.map(be32).transpose()?,
        is_inverted: find(data, 5)?.map_or(Ok(0), be32)? & LOOKUP_INVERTED != 0,
    })
}

/// `NFTA_NAT_TYPE`, `_FAMILY`, `_REG_ADDR_MIN` and `_MAX`, `_REG_PROTO_MIN` and `_MAX`
fn nat(data: &[u8]) -> Parsed<Option<Step>> {
    let is_ours = be32(require(data, 1)?)? == NAT_DESTINATION;
    let family = Some(be32(require(data, 2)?)?);
    let translation = Translation { family, address: operand(data, 3, 4)?, port: operand(data, 5, 6)? };
    Ok(is_ours.then_some(Step::Translate(translation)))
}

/// The registers of the first and the last of what a translation may give. The kernel shows the last one also where there is one alone, or none.
fn operand(data: &[u8], first: u16, last: u16) -> Parsed<Operand> {
    let Some(first) = find(data, first)?.map(be32).transpose()? else { return Ok(Operand::Same) };
    let last = find(data, last)?.map_or(Ok(first), be32)?;
    Ok(if first == last { Operand::Register(first) } else { Operand::Other })
}

/// `NFTA_PAYLOAD_DREG`, `_BASE`, `_OFFSET` and `_LEN`; without the first it changes the packet.
fn payload(data: &[u8]) -> Parsed<Step> {
    let Some(register) = find(data, 1)? else { return Ok(Step::Unknown) };
    let (header, offset, length) =
        (be32(require(data, 2)?)?, be32(require(data, 3)?)?, be32(require(data, 4)?)?);
    Ok(Step::Load { register: be32(register)?, field: Field::Payload { header, offset, length } })
}
