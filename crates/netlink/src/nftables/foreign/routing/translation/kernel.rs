//! Requests to the kernel about the tables of other programs.

use nix::libc;

use super::source::Requests;
use super::steps::{self, NatRule};
use crate::nftables::attributes::{AttributeWriter, Parsed, attributes, be32, explain, find, require};
use crate::nftables::foreign::request;
use crate::nftables::foreign::routing::{Bounded, RoutingChain, read_chain};
use crate::nftables::foreign::walk::{Verdict, parse_verdict};
use crate::nftables::request::body;
use crate::nftables::uapi::{element, set};
use crate::{Error, Reply, Result, Socket};

/// The kernel's tables.
pub(super) struct Kernel<'a>(pub(super) &'a mut Socket);

impl Kernel<'_> {
    /// Asks about a set; empty if it, or the element, is not there.
    fn ask(
        &mut self,
        number: i32,
        of: &RoutingChain,
        what: &str,
        write: impl FnOnce(&mut AttributeWriter),
    ) -> Result<Vec<Reply>> {
        let request = request(number, of.family.number(), what, write)?;
        match self.0.ask(&request) {
            Err(Error::Refused { errno: libc::ENOENT, .. }) => Ok(Vec::new()),
            replies => replies,
        }
    }
}

impl Requests for Kernel<'_> {
    fn rules(&mut self, of: &RoutingChain, chain: &str, most: usize) -> Result<Bounded<NatRule>> {
        read_chain(self.0, of, chain, most, steps::parse)
    }

    fn key_length(&mut self, of: &RoutingChain, set: &str) -> Result<Option<usize>> {
        let what = format!("read {}", name(of, set));
        let replies = self.ask(libc::NFT_MSG_GETSET, of, &what, |m| {
            m.text(set::TABLE, &of.table);
            m.text(set::NAME, set);
        })?;
        let length = |reply: &Reply| be32(require(body(reply)?, set::KEY_LENGTH)?);
        let length = explain(&what, replies.first().map(length).transpose())?;
        Ok(length.and_then(|length| usize::try_from(length).ok()))
    }

    fn element(&mut self, of: &RoutingChain, set: &str, key: &[u8]) -> Result<Option<Verdict>> {
        let what = format!("read an element of {}", name(of, set));
        let replies = self.ask(libc::NFT_MSG_GETSETELEM, of, &what, |m| {
            m.text(element::LIST_TABLE, &of.table);
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

    fn verdicts(&mut self, of: &RoutingChain, set: &str, most: usize) -> Result<Bounded<Verdict>> {
        let what = format!("list elements of {}", name(of, set));
        let request = request(libc::NFT_MSG_GETSETELEM, of.family.number(), &what, |m| {
            m.text(element::LIST_TABLE, &of.table);
            m.text(element::LIST_SET, set);
        })?;
        let start = || Bounded::new(most);
        self.0.dump_each(&request, start, |found: &mut Bounded<Verdict>, reply| {
            let mut verdicts = verdicts_in(body(&reply)?)?.into_iter();
            verdicts.try_for_each(|verdict| found.add(|| Ok(Some(verdict))))
        })
    }
}

fn name(of: &RoutingChain, set: &str) -> String {
    format!("set {} {} {set}", of.family, of.table)
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
