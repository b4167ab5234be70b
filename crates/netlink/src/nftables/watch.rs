//! Notifications of changes of nftables (`NFNLGRP_NFTABLES`), and what shows afterwards that some were lost.

use std::collections::BTreeMap;

use nix::libc;

use super::attributes::{Parsed, array, explain, find, require, text};
use super::request::{body, kind, request};
use super::uapi::{NFPROTO_INET, table};
use crate::{Reply, Result, Socket};

/// `struct nfgenmsg` in bytes.
const FAMILY_HEADER: usize = 4;
/// Notifications of changes that a node program does not make while it changes elements of its tables. Each begins with the name of the
/// table (`NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE`, `NFTA_SET_TABLE`, `NFTA_SET_ELEM_LIST_TABLE`: all are 1).
const WATCHED: [i32; 8] = [
    libc::NFT_MSG_NEWTABLE,
    libc::NFT_MSG_DELTABLE,
    libc::NFT_MSG_NEWCHAIN,
    libc::NFT_MSG_DELCHAIN,
    libc::NFT_MSG_NEWRULE,
    libc::NFT_MSG_DELRULE,
    libc::NFT_MSG_DELSET,
    libc::NFT_MSG_DELSETELEM,
];

/// Name of the table of family `inet` that a notification is about; `None` if it is of another family, or of no interest.
pub(crate) fn changed_table(message: u16, payload: &[u8]) -> Parsed<Option<&str>> {
    let is_inet = payload.first() == Some(&NFPROTO_INET);
    if !is_inet || !WATCHED.iter().any(|watched| kind(*watched) == message) {
        return Ok(None);
    }
    let attributes = payload.get(FAMILY_HEADER..).ok_or("a truncated message")?;
    text(require(attributes, table::NAME)?).map(Some)
}

/// Numbers of all tables of family `inet` by name. The kernel gives no number twice, so a table that was deleted and made anew has another
/// one.
///
/// # Errors
/// The kernel refuses, or its answer cannot be decoded.
pub fn handles(socket: &mut Socket) -> Result<BTreeMap<String, u64>> {
    let what = "list the tables of nftables";
    let replies = socket.dump(&request(libc::NFT_MSG_GETTABLE, what, |_| {})?)?;
    explain(what, replies.iter().map(parse_handle).collect())
}

fn parse_handle(reply: &Reply) -> Parsed<(String, u64)> {
    let body = body(reply)?;
    let handle = find(body, table::HANDLE)?.map_or(Ok([0; 8]), array)?;
    Ok((text(require(body, table::NAME)?)?.to_owned(), u64::from_be_bytes(handle)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_table_is_named_by_what_happens_to_it_and_not_by_elements_that_are_added() {
        let payload = [&[NFPROTO_INET, 0, 0, 0][..], &[6, 0, 1, 0, b'a', 0, 0, 0]].concat();
        for message in WATCHED {
            assert_eq!(changed_table(kind(message), &payload), Ok(Some("a")));
        }
        assert_eq!(changed_table(kind(libc::NFT_MSG_NEWSETELEM), &payload), Ok(None));
        let ipv4 = [&[2][..], &payload[1..]].concat();
        assert_eq!(changed_table(kind(libc::NFT_MSG_DELTABLE), &ipv4), Ok(None), "ours are of family inet");
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = changed_table(kind(libc::NFT_MSG_DELTABLE), &bytes);
            let _ = parse_handle(&Reply { kind: 0, payload: bytes });
        }
    }
}
