//! nftables: one table of family `inet` with interval sets, sets of addresses that vanish after a time, maps of endpoints, base chains and rules (`linux/netfilter/nf_tables.h`).
//!
//! A [`Table`] is the desired state, [`read`] returns a [`TableState`], the actual one; both have a [`TableShape`]
//! (everything but the sets' elements), so that comparing is `==`. [`create`], [`delete`] and [`change_elements`] make
//! the messages and [`commit`] sends them as one transaction: all or nothing, and packets never see an intermediate state.
//!
//! The kernel does not dump a rule in the form in which it was added, so each rule carries a fingerprint of its expressions
//! as user data. `nft` ignores it when it prints a rule and drops it when it replaces one.

use nix::libc;

use crate::{Message, Result, Socket};

pub(crate) mod attributes;
pub(crate) mod dump;
pub(crate) mod elements;
mod endpoints;
mod expression;
pub mod foreign;
mod messages;
mod operands;
mod request;
mod table;
pub(crate) mod timed;
mod uapi;
pub(crate) mod watch;

pub use dump::{RuleTraffic, counters, exists, generation, read};
pub use elements::{Difference, Elements};
pub use expression::Expression;
pub use messages::{change_elements, change_map, create, delete};
pub use operands::{
    AddressEnd, CONNECTION_ORIGINAL, CONNECTION_REPLY, COUNTED_ADDRESSES, Comparison, DestinationType,
    Header, Meta, STATE_INVALID, STATE_NEW, TCP_MAXIMUM_SEGMENT, TcpOption,
};
pub use table::{
    BaseShape, Chain, ChainShape, EndpointMap, Hook, Rule, SetShape, Table, TableShape, TableState, TimedSet,
};
pub use timed::{read_timed, replace_timed};
pub use watch::handles;

/// Sends the messages as one transaction; nothing at all if there are none.
///
/// # Errors
/// The kernel's first refusal, with the message and its object; then nothing was changed.
pub fn commit(socket: &mut Socket, messages: &[Message]) -> Result<()> {
    let limit = |kind: i32, what: &str| Message {
        kind: kind as u16,
        flags: 0,
        payload: request::family_header(libc::AF_UNSPEC as u8, libc::NFNL_SUBSYS_NFTABLES as u16),
        what: what.to_owned(),
    };
    let begin = limit(libc::NFNL_MSG_BATCH_BEGIN, "begin the nftables transaction");
    let end = limit(libc::NFNL_MSG_BATCH_END, "commit the nftables transaction");
    socket.transaction(&begin, messages, &end)
}
