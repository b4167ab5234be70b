//! Sets of addresses that the kernel removes after a time, each after its own.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::{IpFamily, octets};
use nix::libc;

use super::attributes::{Parsed, array, attributes, explain, find, require};
use super::dump::dump_elements;
use super::elements;
use super::request::{body, message};
use super::table::{SetShape, TableShape, TimedSet};
use super::uapi::element;
use crate::{Message, Result, Socket};

/// Longest time of an element: a bound for what another program may have set.
const LONGEST: Duration = Duration::from_secs(3600);

/// Makes these the only elements of a set that is there, in one step when the messages are one transaction. The kernel removes each after
/// its time.
///
/// # Errors
/// None in practice: a name would have to be longer than an attribute can be.
pub fn replace_timed(table: &str, name: &str, set: &TimedSet) -> Result<Vec<Message>> {
    // Without elements, it removes all. An element is not added anew while it is there: older kernels would keep its time.
    let what = format!("empty set inet {table} {name}");
    let mut messages = vec![message(libc::NFT_MSG_DELSETELEM, 0, what, |m| {
        m.text(element::LIST_TABLE, table);
        m.text(element::LIST_SET, name);
    })?];
    messages.extend(add_elements(table, name, set)?);
    Ok(messages)
}

/// Adds the elements of a set. A time of less than a millisecond is none.
pub(super) fn add_elements(table: &str, name: &str, set: &TimedSet) -> Result<Option<Message>> {
    let milliseconds = |time: &Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let elements = set.addresses.iter().filter(|(address, _)| IpFamily::of(**address) == set.family);
    let elements: Vec<(Vec<u8>, u64)> = elements
        .map(|(address, time)| (octets(*address), milliseconds(time)))
        .filter(|(_, time)| *time > 0)
        .collect();
    if elements.is_empty() {
        return Ok(None);
    }
    let what = format!("add {} addresses to set inet {table} {name}", elements.len());
    let added = message(libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, what, |m| {
        m.text(element::LIST_TABLE, table);
        m.text(element::LIST_SET, name);
        m.nested(element::LIST_ELEMENTS, |list| {
            for (key, time) in &elements {
                list.nested(element::LIST_ELEMENT, |e| {
                    e.nested(element::KEY, |value| value.bytes(element::DATA_VALUE, key));
                    e.bytes(element::TIMEOUT, &time.to_be_bytes());
                });
            }
        });
    })?;
    Ok(Some(added))
}

/// Reads the sets of this kind in a table, by name: their addresses, and the time from now for which each stays.
///
/// # Errors
/// The kernel refuses, or its answer cannot be decoded.
pub fn read_timed(
    socket: &mut Socket,
    table: &str,
    shape: &TableShape,
) -> Result<BTreeMap<String, TimedSet>> {
    let mut found = BTreeMap::new();
    for (name, set) in &shape.sets {
        let SetShape::Timed(family) = *set else { continue };
        let what = format!("list elements of set inet {table} {name}");
        let mut addresses = BTreeMap::new();
        for reply in &dump_elements(socket, table, name, &what)? {
            addresses.extend(explain(&what, body(reply).and_then(|body| parse(body, family)))?);
        }
        found.insert(name.clone(), TimedSet { family, addresses });
    }
    Ok(found)
}

pub(crate) fn parse(body: &[u8], family: IpFamily) -> Parsed<BTreeMap<IpAddr, Duration>> {
    let Some(list) = find(body, element::LIST_ELEMENTS)? else { return Ok(BTreeMap::new()) };
    let mut found = BTreeMap::new();
    for entry in attributes(list) {
        let (_, entry) = entry?;
        let key = require(require(entry, element::KEY)?, element::DATA_VALUE)?;
        let number = elements::number(family, key).ok_or("an element has the wrong length")?;
        // One that has expired is not gone yet, and has none.
        let Some(left) = find(entry, element::EXPIRATION)? else { continue };
        let left = Duration::from_millis(u64::from_be_bytes(array(left)?));
        found.insert(family.address(number), left.min(LONGEST));
    }
    Ok(found)
}
