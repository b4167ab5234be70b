//! A whole nftables table of ours: what differs between the desired and the present one, applied in one transaction.

use fairlead_address::IntervalSet;
use fairlead_netlink::nftables::{self, Table, TableState};
use fairlead_netlink::{Error, Family, Message, Result, Socket};

/// What had to be done to a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// Unchanged; nothing was sent.
    Unchanged,
    /// Only elements of sets and maps differed.
    Elements {
        /// Intervals deleted.
        deleted: usize,
        /// Intervals added.
        added: usize,
    },
    /// It was missing, damaged or made by another version, and was replaced in one step.
    Rebuilt,
}

/// Keeps a table that can be large: it is read only after other programs have changed any table of the kernel.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    /// What is known to be in place, and the generation of nftables then.
    done: Option<(Table, u32)>,
    reads: usize,
}

impl Keeper {
    /// As [`apply`].
    ///
    /// # Errors
    /// The kernel refuses a message; then nothing was changed.
    pub(crate) fn apply(&mut self, wanted: &Table) -> Result<Applied> {
        let mut socket = Socket::open(Family::Netfilter)?;
        let generation = nftables::generation(&mut socket)?;
        let known = self.done.take().filter(|(_, at)| *at == generation);
        let present = match &known {
            Some((done, _)) if done == wanted => {
                self.done = known;
                return Ok(Applied::Unchanged);
            }
            Some((done, _)) => Some(done.clone().into()),
            None => {
                self.reads = self.reads.saturating_add(1);
                nftables::read(&mut socket, &wanted.name)?
            }
        };
        let applied = commit(&mut socket, wanted, present.as_ref())?;
        // Each transaction makes one generation. More of them are changes of other programs.
        let made = u32::from(applied != Applied::Unchanged);
        let expected = generation.wrapping_add(made);
        if nftables::generation(&mut socket)? == expected {
            self.done = Some((wanted.clone(), expected));
        }
        Ok(applied)
    }

    /// How often the table was read.
    pub(crate) fn reads(&self) -> usize {
        self.reads
    }
}

/// Deletes a table of ours; nothing is sent if there is none.
pub(crate) fn remove(name: &str) -> Result<()> {
    remove_on(&mut Socket::open(Family::Netfilter)?, name)
}

/// As [`remove`], in the namespace of the socket.
pub(crate) fn remove_on(socket: &mut Socket, name: &str) -> Result<()> {
    match nftables::read(socket, name)? {
        Some(_) => nftables::commit(socket, &nftables::delete(name)?),
        None => Ok(()),
    }
}

/// Reconciles a table: only elements that differ if its chains are unchanged, else all of it at once.
///
/// # Errors
/// The kernel refuses a message; then nothing was changed.
pub(crate) fn apply(wanted: &Table) -> Result<Applied> {
    apply_on(&mut Socket::open(Family::Netfilter)?, wanted)
}

/// As [`apply`], in the namespace of the socket.
///
/// # Errors
/// The kernel refuses a message; then nothing was changed.
pub(crate) fn apply_on(socket: &mut Socket, wanted: &Table) -> Result<Applied> {
    let present = nftables::read(socket, &wanted.name)?;
    commit(socket, wanted, present.as_ref())
}

/// As [`apply`], to a table that is known to be so.
///
/// # Errors
/// The kernel refuses a message; then nothing was changed.
pub(crate) fn apply_to(wanted: &Table, present: &TableState) -> Result<Applied> {
    commit(&mut Socket::open(Family::Netfilter)?, wanted, Some(present))
}

fn commit(socket: &mut Socket, wanted: &Table, present: Option<&TableState>) -> Result<Applied> {
    let (applied, messages) = plan(wanted, present)?;
    match nftables::commit(socket, &messages) {
        // Another process has changed the table meanwhile; the transaction was rolled back, so start over.
        Err(error @ Error::Refused { .. }) if applied != Applied::Rebuilt => {
            tracing::warn!(table = wanted.name, %error, "cannot update an nftables table, replacing it");
            nftables::commit(socket, &nftables::create(wanted)?)?;
            Ok(Applied::Rebuilt)
        }
        outcome => outcome.map(|()| applied),
    }
}

/// The messages that turn the present table into the desired one.
///
/// # Errors
/// Names too long for a message.
fn plan(wanted: &Table, present: Option<&TableState>) -> Result<(Applied, Vec<Message>)> {
    let Some(present) = present.filter(|present| present.shape == wanted.shape()) else {
        return Ok((Applied::Rebuilt, nftables::create(wanted)?));
    };
    let (mut messages, mut deleted, mut added) = (Vec::new(), 0usize, 0usize);
    for (name, elements) in &wanted.sets {
        let held = present.sets.get(name).cloned().unwrap_or_else(|| IntervalSet::empty(elements.family()));
        deleted = deleted.saturating_add(held.not_in(elements).len());
        added = added.saturating_add(elements.not_in(&held).len());
        messages.extend(nftables::change_elements(&wanted.name, name, &held, elements)?);
    }
    for (name, elements) in &wanted.maps {
        let held = present.maps.get(name).cloned().unwrap_or_default();
        messages.extend(nftables::change_map(&wanted.name, name, &held, elements)?);
    }
    let applied = if messages.is_empty() { Applied::Unchanged } else { Applied::Elements { deleted, added } };
    Ok((applied, messages))
}
