//! Changes of the kernel's table of connections by what other gateways say.

use fairlead_netlink::Result;
use fairlead_netlink::conntrack::{ConnectionTable, TableChange};
use fairlead_source_addresses::copies::copied::{self, Copied, Key};
use fairlead_source_addresses::copies::incoming::Change;
use fairlead_source_addresses::copies::{Slot, Slots};
use nix::libc;

/// Result of applying changes.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// Connections that were added or updated.
    pub(super) set: usize,
    /// Connections that were deleted.
    pub(super) deleted: usize,
    /// Changes that the kernel has refused, with its words: slot, connection and reason.
    pub(super) failed: Vec<(u32, Key, String)>,
}

/// Makes the changes, in their order.
///
/// # Errors
/// The socket failed.
pub(super) fn apply(table: &mut ConnectionTable, changes: &[Change], slots: &Slots) -> Result<Applied> {
    let messages: Vec<TableChange> = changes.iter().map(message).collect();
    let mut applied = Applied::default();
    for (change, outcome) in changes.iter().zip(table.apply(&messages)?) {
        match (change, outcome) {
            (Change::Delete(..), Ok(())) => applied.deleted = applied.deleted.saturating_add(1),
            (Change::Add(..) | Change::Update(..), Ok(())) => applied.set = applied.set.saturating_add(1),
            (Change::Delete(key, _), Err(error)) if !error.is_missing() => {
                tracing::debug!(?key, %error, "cannot delete the copy of a connection");
            }
            (Change::Delete(..), Err(_)) => {}
            (Change::Add(slot, key, copied), Err(error)) if error.errno() == Some(libc::EEXIST) => {
                let replaced = replace(table, key, copied, slots)?;
                note(&mut applied, *slot, *key, replaced);
            }
            (Change::Update(slot, key, copied), Err(error)) if error.is_missing() => {
                let added = one(table, TableChange::Add(copied::flow(key, copied)))?;
                let added = match added {
                    Err(error) if error.errno() == Some(libc::EEXIST) => replace(table, key, copied, slots)?,
                    added => added.map_err(|error| error.to_string()),
                };
                note(&mut applied, *slot, *key, added);
            }
            (Change::Add(slot, key, _) | Change::Update(slot, key, _), Err(error)) => {
                applied.failed.push((*slot, *key, error.to_string()));
            }
        }
    }
    Ok(applied)
}

fn note(applied: &mut Applied, slot: u32, key: Key, outcome: std::result::Result<(), String>) {
    match outcome {
        Ok(()) => applied.set = applied.set.saturating_add(1),
        Err(reason) => applied.failed.push((slot, key, reason)),
    }
}

fn message(change: &Change) -> TableChange {
    match change {
        Change::Add(_, key, copied) => TableChange::Add(copied::flow(key, copied)),
        // By its replies, which are addressed to the slot: one of this gateway's own has others.
        Change::Delete(key, copied) => TableChange::DeleteReply(copied::flow(key, copied).reply),
        Change::Update(_, key, copied) => TableChange::Update(copied::flow(key, copied)),
    }
}

/// The kernel has a connection with one of the tuples. A copy is replaced; one that this gateway translates itself stays.
fn replace(
    table: &mut ConnectionTable,
    key: &Key,
    copied: &Copied,
    slots: &Slots,
) -> Result<std::result::Result<(), String>> {
    let flow = copied::flow(key, copied);
    if let Some(present) = table.get(&flow.original)? {
        if present.reply == flow.reply {
            return Ok(one(table, TableChange::Update(flow))?.map_err(|error| error.to_string()));
        }
        let is_copy = |slot: &Slot| !slot.is_held && slot.addresses.contains(&present.reply.destination);
        if !slots.values().any(is_copy) {
            return Ok(Err("this gateway has a connection of its own in its place".to_owned()));
        }
        let _gone = one(table, TableChange::DeleteReply(present.reply))?;
    }
    // Another connection of the slot had the same port: it is no more.
    let _gone = one(table, TableChange::DeleteReply(flow.reply))?;
    Ok(one(table, TableChange::Add(flow))?.map_err(|error| error.to_string()))
}

fn one(table: &mut ConnectionTable, change: TableChange) -> Result<Result<()>> {
    Ok(table.apply(&[change])?.pop().unwrap_or(Ok(())))
}
