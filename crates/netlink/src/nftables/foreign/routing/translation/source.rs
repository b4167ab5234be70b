//! Reads rules and sets of the tables of other programs, each chain once.

use std::collections::BTreeMap;
use std::rc::Rc;

use nix::libc;

use super::packet::Sets;
use super::steps::{self, NatRule};
use crate::nftables::attributes::{AttributeWriter, Parsed, attributes, be32, explain, find, require};
use crate::nftables::foreign::routing::{RoutingChain, read_chain};
use crate::nftables::foreign::walk::{Verdict, parse_verdict};
use crate::nftables::foreign::{TableFamily, request};
use crate::nftables::request::body;
use crate::nftables::uapi::{element, set};
use crate::{Error, Reply, Result, Socket};

/// Most verdicts of a map that are looked at where the packet's key is not known.
const MAX_VERDICTS: usize = 256;

/// Rules and sets of tables.
pub(super) trait Source: Sets {
    /// Turns to the table of this chain.
    fn enter(&mut self, base: &RoutingChain);

    /// Rules of a chain of that table, in order.
    fn rules(&mut self, chain: &str) -> Result<Rc<[NatRule]>>;
}

/// The kernel's tables.
pub(super) struct Kernel<'a> {
    socket: &'a mut Socket,
    base: RoutingChain,
    /// By family and name of the table, and name of the chain.
    chains: BTreeMap<(TableFamily, String, String), Rc<[NatRule]>>,
}

impl<'a> Kernel<'a> {
    pub(super) const fn new(socket: &'a mut Socket, base: RoutingChain) -> Self {
        Self { socket, base, chains: BTreeMap::new() }
    }

    /// Number of rules that were read.
    pub(super) fn read(&self) -> usize {
        self.chains.values().map(|rules| rules.len()).fold(0, usize::saturating_add)
    }

    fn name(&self, set: &str) -> String {
        format!("set {} {} {set}", self.base.family, self.base.table)
    }

    /// Asks about a set; empty if it, or the element, is not there.
    fn ask(
        &mut self,
        number: i32,
        what: &str,
        write: impl FnOnce(&mut AttributeWriter),
    ) -> Result<Vec<Reply>> {
        let request = request(number, self.base.family.number(), what, write)?;
        match self.socket.ask(&request) {
            Err(Error::Refused { errno: libc::ENOENT, .. }) => Ok(Vec::new()),
            replies => replies,
        }
    }
}

impl Source for Kernel<'_> {
    fn enter(&mut self, base: &RoutingChain) {
        self.base = base.clone();
    }

    fn rules(&mut self, chain: &str) -> Result<Rc<[NatRule]>> {
        let key = (self.base.family, self.base.table.clone(), chain.to_owned());
        if let Some(rules) = self.chains.get(&key) {
            return Ok(Rc::clone(rules));
        }
        let rules: Rc<[NatRule]> = read_chain(self.socket, &self.base, chain, steps::parse)?.into();
        self.chains.insert(key, Rc::clone(&rules));
        Ok(rules)
    }
}

impl Sets for Kernel<'_> {
    fn key_length(&mut self, set: &str) -> Result<Option<usize>> {
        let what = format!("read {}", self.name(set));
        let table = self.base.table.clone();
        let replies = self.ask(libc::NFT_MSG_GETSET, &what, |m| {
            m.text(set::TABLE, &table);
            m.text(set::NAME, set);
        })?;
        let length = |reply: &Reply| be32(require(body(reply)?, set::KEY_LENGTH)?);
        let length = explain(&what, replies.first().map(length).transpose())?;
        Ok(length.and_then(|length| usize::try_from(length).ok()))
    }

    fn element(&mut self, set: &str, key: &[u8]) -> Result<Option<Verdict>> {
        let what = format!("read an element of {}", self.name(set));
        let table = self.base.table.clone();
        let replies = self.ask(libc::NFT_MSG_GETSETELEM, &what, |m| {
            m.text(element::LIST_TABLE, &table);
            m.text(element::LIST_SET, set);
            m.nested(element::LIST_ELEMENTS, |list| {
                list.nested(element::LIST_ELEMENT, |entry| {
                    entry.nested(element::KEY, |value| value.bytes(element::DATA_VALUE, key));
                });
            });
        })?;
        let found = replies.first().map(|reply| verdicts_in(body(reply)?)).transpose();
        Ok(explain(&what, found)?.and_then(|verdicts| verdicts.into_iter().next()))
    }

    fn verdicts(&mut self, set: &str) -> Result<Vec<Verdict>> {
        let what = format!("list elements of {}", self.name(set));
        let request = request(libc::NFT_MSG_GETSETELEM, self.base.family.number(), &what, |m| {
            m.text(element::LIST_TABLE, &self.base.table);
            m.text(element::LIST_SET, set);
        })?;
        let mut found = Vec::new();
        for reply in &self.socket.dump(&request)? {
            found.extend(explain(&what, body(reply).and_then(verdicts_in))?);
        }
        found.truncate(MAX_VERDICTS);
        Ok(found)
    }
}

/// Verdicts of elements, which have them where an `immediate` expression has its one; [`Verdict::None`] for elements without.
fn verdicts_in(body: &[u8]) -> Parsed<Vec<Verdict>> {
    let Some(list) = find(body, element::LIST_ELEMENTS)? else { return Ok(Vec::new()) };
    let verdicts = attributes(list).map(|entry| -> Parsed<Verdict> {
        let (_, entry) = entry?;
        let has_value = find(entry, element::DATA)?.is_some();
        Ok(if has_value { parse_verdict(entry)?.unwrap_or_default() } else { Verdict::None })
    });
    verdicts.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_verdict_of_an_element_is_found() {
        // `nft get element inet t np { udp . 51820 }`, whose verdict is `goto x`.
        let reply = "0600010074000000070002006e700000300003002c000100100001000c00010011000000ca6c0000180002001400020008000100fffffffc\
                     0600020078000000";
        let hex = |at: usize| u8::from_str_radix(&reply[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..reply.len()).step_by(2).map(hex).collect();
        assert_eq!(verdicts_in(&bytes).unwrap(), [Verdict::Goto("x".to_owned())]);
        // `nft get element inet t ports { 51820 }`
        let bytes = [20, 0, 3, 0x80, 16, 0, 1, 0x80, 12, 0, 1, 0x80, 6, 0, 1, 0, 0xca, 0x6c, 0, 0];
        assert_eq!(verdicts_in(&bytes).unwrap(), [Verdict::None]);
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = verdicts_in(&bytes);
        }
    }
}
