//! Reads a table from the kernel.

use std::collections::BTreeMap;

use fairlead_address::IpFamily;
use nix::libc;

use super::attributes::{Parsed, array, attributes, be32, explain, find, require, text};
use super::elements::{self, Elements};
use super::endpoints;
use super::request::{body, request};
use super::table::{BaseShape, ChainShape, EndpointMap, SetShape, TableShape, TableState};
use super::uapi::{
    ELEMENT_INTERVAL_END, SET_DYNAMIC, SET_INTERVAL, SET_MAP, SET_TIMEOUT, chain, element, rule, set, table,
};
use crate::{Error, Reply, Result, Socket};

/// `NFTA_GEN_ID` (`linux/netfilter/nf_tables.h`)
const GENERATION_ID: u16 = 1;

/// Reads a table of family `inet`; `None` when there is none of this name.
///
/// # Errors
/// The kernel refuses (no nftables, no right), or its answer cannot be decoded.
pub fn read(socket: &mut Socket, name: &str) -> Result<Option<TableState>> {
    let Some(flags) = flags(socket, name)? else { return Ok(None) };
    let sets = read_sets(socket, name)?;
    let chains = read_chains(socket, name)?;
    let mut elements = BTreeMap::new();
    let mut maps = BTreeMap::new();
    for (set, shape) in &sets {
        match shape {
            SetShape::Endpoints => drop(maps.insert(set.clone(), read_map(socket, name, set)?)),
            SetShape::Connections(_) | SetShape::Foreign | SetShape::Timed(_) => {}
            SetShape::Intervals(family) => {
                elements.insert(set.clone(), read_elements(socket, name, set, *family)?);
            }
        }
    }
    Ok(Some(TableState { shape: TableShape { flags, sets, chains }, sets: elements, maps }))
}

/// Whether there is a table of family `inet` of this name: one short request, however much is in the kernel's tables.
///
/// # Errors
/// As [`read`].
pub fn exists(socket: &mut Socket, name: &str) -> Result<bool> {
    flags(socket, name).map(|flags| flags.is_some())
}

/// `None` when there is no table of this name.
fn flags(socket: &mut Socket, name: &str) -> Result<Option<u32>> {
    let what = format!("read table inet {name}");
    let request = request(libc::NFT_MSG_GETTABLE, &what, |m| m.text(table::NAME, name))?;
    match socket.ask(&request) {
        Ok(replies) => explain(&what, replies.first().map_or(Ok(0), table_flags)).map(Some),
        Err(Error::Refused { errno: libc::ENOENT, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The generation of all nftables tables of this network namespace: a number that every change of any of them increments
/// (`NFT_MSG_GETGEN`). While it is unchanged, a table need not be read again.
///
/// # Errors
/// The kernel refuses, or its answer cannot be decoded.
pub fn generation(socket: &mut Socket) -> Result<u32> {
    let what = "read the generation of nftables";
    let request = request(libc::NFT_MSG_GETGEN, what, |_| {})?;
    let replies = socket.ask(&request)?;
    let id = |reply: &Reply| find(body(reply)?, GENERATION_ID)?.map_or(Ok(0), be32);
    explain(what, replies.first().map_or(Ok(0), id))
}

/// Counters of a rule with [`Expression::Counter`](super::Expression::Counter).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RuleTraffic {
    /// Packets.
    pub packets: u64,
    /// Bytes of these packets, from the IP header on.
    pub bytes: u64,
}

/// Counters of the rules of a table, by [`Rule::fingerprint`](super::Rule::fingerprint); empty when there is no such table.
///
/// # Errors
/// As [`read`].
pub fn counters(socket: &mut Socket, name: &str) -> Result<BTreeMap<u64, RuleTraffic>> {
    let what = format!("list rules of table inet {name}");
    let replies = socket.dump(&request(libc::NFT_MSG_GETRULE, &what, |m| m.text(rule::TABLE, name))?)?;
    let parsed: Parsed<Vec<_>> =
        replies.iter().map(|reply| body(reply).and_then(|body| parse_counter(body, name))).collect();
    Ok(explain(&what, parsed)?.into_iter().flatten().collect())
}

/// The fingerprint of a rule of ours, and its first counter.
fn parse_counter(body: &[u8], table_name: &str) -> Parsed<Option<(u64, RuleTraffic)>> {
    let Some((_, Some(fingerprint))) = parse_rule(body, table_name)? else { return Ok(None) };
    for expression in find(body, rule::EXPRESSIONS)?.into_iter().flat_map(attributes) {
        let (_, expression) = expression?;
        if text(require(expression, rule::EXPRESSION_NAME)?)? == "counter" {
            let data = require(expression, rule::EXPRESSION_DATA)?;
            let number = |attribute| array(require(data, attribute)?).map(u64::from_be_bytes);
            let traffic =
                RuleTraffic { packets: number(rule::COUNTER_PACKETS)?, bytes: number(rule::COUNTER_BYTES)? };
            return Ok(Some((fingerprint, traffic)));
        }
    }
    Ok(None)
}

fn table_flags(reply: &Reply) -> Parsed<u32> {
    find(body(reply)?, table::FLAGS)?.map_or(Ok(0), be32)
}

fn read_sets(socket: &mut Socket, name: &str) -> Result<BTreeMap<String, SetShape>> {
    let what = format!("list sets of table inet {name}");
    let replies = socket.dump(&request(libc::NFT_MSG_GETSET, &what, |m| m.text(set::TABLE, name))?)?;
    let parsed: Parsed<Vec<_>> = replies.iter().map(|reply| parse_set(body(reply)?, name)).collect();
    Ok(explain(&what, parsed)?.into_iter().flatten().collect())
}

/// `None` for a set of another table.
pub(crate) fn parse_set(body: &[u8], table_name: &str) -> Parsed<Option<(String, SetShape)>> {
    if text(require(body, set::TABLE)?)? != table_name {
        return Ok(None);
    }
    let flags = find(body, set::FLAGS)?.map_or(Ok(0), be32)?;
    let key_type = be32(require(body, set::KEY_TYPE)?)?;
    let key_length = be32(require(body, set::KEY_LENGTH)?)?;
    let name = text(require(body, set::NAME)?)?.to_owned();
    if is_endpoint_map(body, (key_type, key_length, flags))? {
        return Ok(Some((name, SetShape::Endpoints)));
    }
    let family = [IpFamily::V4, IpFamily::V6].into_iter().find(|family| {
        (elements::nft_type(*family), elements::key_length(*family)) == (key_type, key_length)
    });
    let shape = match (family, flags) {
        (Some(family), SET_DYNAMIC) => SetShape::Connections(family),
        (Some(family), SET_INTERVAL) => SetShape::Intervals(family),
        (Some(family), SET_TIMEOUT) => SetShape::Timed(family),
        _ => SetShape::Foreign,
    };
    Ok(Some((name, shape)))
}

fn is_endpoint_map(body: &[u8], key: (u32, u32, u32)) -> Parsed<bool> {
    let number = |attribute| find(body, attribute)?.map(be32).transpose();
    let data = (number(set::DATA_TYPE)?, number(set::DATA_LENGTH)?);
    Ok(key == (endpoints::KEY_TYPE, endpoints::KEY_LENGTH, SET_MAP)
        && data == (Some(endpoints::DATA_TYPE), Some(endpoints::DATA_LENGTH)))
}

fn read_chains(socket: &mut Socket, name: &str) -> Result<BTreeMap<String, ChainShape>> {
    let what = format!("list chains of table inet {name}");
    let replies = socket.dump(&request(libc::NFT_MSG_GETCHAIN, &what, |m| m.text(chain::TABLE, name))?)?;
    let parsed: Parsed<Vec<_>> = replies.iter().map(|reply| parse_chain(body(reply)?, name)).collect();
    let mut chains: BTreeMap<String, ChainShape> = explain(&what, parsed)?.into_iter().flatten().collect();
    let what = format!("list rules of table inet {name}");
    let replies = socket.dump(&request(libc::NFT_MSG_GETRULE, &what, |m| m.text(rule::TABLE, name))?)?;
    for reply in &replies {
        let (chain_name, fingerprint) =
            match explain(&what, body(reply).and_then(|body| parse_rule(body, name)))? {
                Some(parsed) => parsed,
                None => continue,
            };
        if let Some(shape) = chains.get_mut(&chain_name) {
            shape.rules.push(fingerprint);
        }
    }
    Ok(chains)
}

/// `None` for a chain of another table: the kernel does not filter this dump.
pub(crate) fn parse_chain(body: &[u8], table_name: &str) -> Parsed<Option<(String, ChainShape)>> {
    if text(require(body, chain::TABLE)?)? != table_name {
        return Ok(None);
    }
    let base = match find(body, chain::HOOK)? {
        None => None,
        Some(hook) => Some(BaseShape {
            kind: text(require(body, chain::TYPE)?)?.to_owned(),
            hook: be32(require(hook, chain::HOOK_NUMBER)?)?,
            priority: i32::from_be_bytes(array(require(hook, chain::HOOK_PRIORITY)?)?),
            policy: be32(require(body, chain::POLICY)?)?,
        }),
    };
    Ok(Some((text(require(body, chain::NAME)?)?.to_owned(), ChainShape { base, rules: Vec::new() })))
}

/// The rule's chain and our fingerprint.
pub(crate) fn parse_rule(body: &[u8], table_name: &str) -> Parsed<Option<(String, Option<u64>)>> {
    if text(require(body, rule::TABLE)?)? != table_name {
        return Ok(None);
    }
    let chain = text(require(body, rule::CHAIN)?)?.to_owned();
    Ok(Some((chain, find(body, rule::USERDATA)?.and_then(fingerprint))))
}

fn fingerprint(mut userdata: &[u8]) -> Option<u64> {
    loop {
        let ([kind, length], rest) = userdata.split_first_chunk()?;
        let (value, behind) = rest.split_at_checked(usize::from(*length))?;
        if *kind == rule::USERDATA_FINGERPRINT {
            return value.try_into().ok().map(u64::from_be_bytes);
        }
        userdata = behind;
    }
}

fn read_map(socket: &mut Socket, table_name: &str, map_name: &str) -> Result<EndpointMap> {
    let what = format!("list elements of map inet {table_name} {map_name}");
    let mut found = EndpointMap::new();
    for reply in &dump_elements(socket, table_name, map_name, &what)? {
        found.extend(explain(&what, body(reply).and_then(parse_endpoints))?);
    }
    Ok(found)
}

fn parse_endpoints(body: &[u8]) -> Parsed<EndpointMap> {
    let Some(list) = find(body, element::LIST_ELEMENTS)? else { return Ok(EndpointMap::new()) };
    let entries = attributes(list).map(|entry| {
        let (_, entry) = entry?;
        let value = |attribute| require(require(entry, attribute)?, element::DATA_VALUE);
        let endpoint = endpoints::endpoint(value(element::KEY)?);
        endpoint.zip(endpoints::port(value(element::DATA)?)).ok_or("an element has the wrong length")
    });
    entries.collect()
}

pub(super) fn dump_elements(
    socket: &mut Socket,
    table_name: &str,
    set_name: &str,
    what: &str,
) -> Result<Vec<Reply>> {
    socket.dump(&request(libc::NFT_MSG_GETSETELEM, what, |m| {
        m.text(element::LIST_TABLE, table_name);
        m.text(element::LIST_SET, set_name);
    })?)
}

fn read_elements(
    socket: &mut Socket,
    table_name: &str,
    set_name: &str,
    family: IpFamily,
) -> Result<Elements> {
    let what = format!("list elements of set inet {table_name} {set_name}");
    let replies = dump_elements(socket, table_name, set_name, &what)?;
    let mut found = Vec::new();
    for reply in &replies {
        explain(&what, body(reply).and_then(|body| parse_elements(body, family, &mut found)))?;
    }
    Ok(elements::parse(family, found))
}

pub(crate) fn parse_elements(body: &[u8], family: IpFamily, into: &mut Vec<(u128, bool)>) -> Parsed<()> {
    let Some(list) = find(body, element::LIST_ELEMENTS)? else { return Ok(()) };
    for entry in attributes(list) {
        let (_, entry) = entry?;
        let flags = find(entry, element::FLAGS)?.map_or(Ok(0), be32)?;
        let key = require(require(entry, element::KEY)?, element::DATA_VALUE)?;
        let address = elements::number(family, key).ok_or("an element has the wrong length")?;
        into.push((address, flags & ELEMENT_INTERVAL_END != 0));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn our_fingerprint_is_found_among_other_entries() {
        let userdata = [0, 2, b'h', 0, 0xfa, 8, 0, 0, 0, 0, 0, 0, 1, 2];
        assert_eq!(fingerprint(&userdata), Some(0x102));
        assert_eq!(fingerprint(&userdata[..4]), None);
        assert_eq!(fingerprint(&userdata[..10]), None);
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_set(&bytes, "t");
            let _ = parse_chain(&bytes, "t");
            let _ = parse_rule(&bytes, "t");
            let _ = parse_counter(&bytes, "t");
            let _ = parse_elements(&bytes, IpFamily::V6, &mut Vec::new());
            let _ = parse_endpoints(&bytes);
            let _ = super::super::timed::parse(&bytes, IpFamily::V4);
            let _ = fingerprint(&bytes);
        }
    }
}
