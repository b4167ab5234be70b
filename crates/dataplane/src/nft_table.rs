//! A whole nftables table of ours: what differs between the desired and the present one, applied in one transaction.

use std::collections::BTreeMap;

use fairlead_netlink::nftables::{self, Elements, Table, TableState, TimedSet};
use fairlead_netlink::{Error, Family, Message, Result, Socket};
use nix::libc;

/// Changes that were made to a table.
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
    /// The table was missing, damaged or made by another version, and was replaced in one step.
    Rebuilt,
}

/// Keeps a table that can be large: it is read only after other programs have changed any table of the kernel.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    /// State that is known to be in place, and the generation of nftables then.
    done: Option<(TableState, u32)>,
    /// Generations of nftables before and after the last change, if no other program made one meanwhile.
    step: Option<(u32, u32)>,
    /// Kept open: closing it waits for the kernel to free what the last transaction deleted, some 10 ms (`nft_rcv_nl_event`).
    socket: Option<Socket>,
    reads: usize,
}

impl Keeper {
    /// As [`apply`].
    ///
    /// # Errors
    /// The kernel refuses a message; then nothing was changed.
    pub(crate) fn apply(&mut self, wanted: &Table) -> Result<Applied> {
        self.step = None;
        let mut socket = self.take_socket()?;
        let generation = nftables::generation(&mut socket)?;
        let present = match self.done.take().filter(|(_, at)| *at == generation) {
            Some((done, _)) => Some(done),
            None => {
                self.reads = self.reads.saturating_add(1);
                nftables::read(&mut socket, &wanted.name)?
            }
        };
        let (applied, state) = commit(&mut socket, wanted, present)?;
        // Each transaction makes one generation. More of them are changes of other programs.
        let made = u32::from(applied != Applied::Unchanged);
        let expected = generation.wrapping_add(made);
        if nftables::generation(&mut socket)? == expected {
            self.done = Some((state, expected));
            self.step = Some((generation, expected));
        }
        self.socket = Some(socket);
        Ok(applied)
    }

    /// The last change of another table of this program is none of another program.
    pub(crate) fn follow(&mut self, other: &Self) {
        if let (Some((_, at)), Some((before, after))) = (&mut self.done, other.step)
            && *at == before
        {
            *at = after;
        }
    }

    /// Makes these the elements of sets of addresses with times; `false` if the table is not in place, so that [`Self::apply`] has to make it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn replace_timed(&mut self, table: &str, sets: &BTreeMap<String, TimedSet>) -> Result<bool> {
        let mut socket = self.take_socket()?;
        let generation = nftables::generation(&mut socket)?;
        let mut messages = Vec::new();
        for (name, set) in sets {
            messages.extend(nftables::replace_timed(table, name, set)?);
        }
        match nftables::commit(&mut socket, &messages) {
            Ok(()) => {}
            Err(Error::Refused { errno: libc::ENOENT, .. }) => {
                self.done = None;
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        let expected = generation.wrapping_add(1);
        let is_alone = nftables::generation(&mut socket)? == expected;
        // What was known is still there if this was the only change since.
        self.done = self
            .done
            .take()
            .filter(|(_, at)| *at == generation && is_alone)
            .map(|(state, _)| (state, expected));
        self.socket = Some(socket);
        Ok(true)
    }

    /// Whether no program has changed nftables since the last [`Self::apply`].
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub(crate) fn is_in_place(&mut self) -> Result<bool> {
        let Some((_, at)) = self.done else { return Ok(false) };
        let mut socket = self.take_socket()?;
        let generation = nftables::generation(&mut socket)?;
        self.socket = Some(socket);
        Ok(generation == at)
    }

    /// The caller puts the socket back after a success only: after an error, answers to the failed request may still be in it.
    fn take_socket(&mut self) -> Result<Socket> {
        self.socket.take().map_or_else(|| Socket::open(Family::Netfilter), Ok)
    }

    /// Number of times that the table was read.
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

/// Whether a table of ours is as it should be.
///
/// # Errors
/// The kernel cannot be asked.
pub(crate) fn is_current(wanted: &Table) -> Result<bool> {
    let present = nftables::read(&mut Socket::open(Family::Netfilter)?, &wanted.name)?;
    Ok(plan(wanted, present)?.applied == Applied::Unchanged)
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
    commit(socket, wanted, present).map(|(applied, _)| applied)
}

/// Returns what was done, and what is there then.
fn commit(socket: &mut Socket, wanted: &Table, present: Option<TableState>) -> Result<(Applied, TableState)> {
    let Planned { applied, messages, state } = plan(wanted, present)?;
    match nftables::commit(socket, &messages) {
        // Another process has changed the table meanwhile; the transaction was rolled back, so start over.
        Err(error @ Error::Refused { .. }) if applied != Applied::Rebuilt => {
            tracing::warn!(table = wanted.name, %error, "cannot update an nftables table, replacing it");
            nftables::commit(socket, &nftables::create(wanted)?)?;
            Ok((Applied::Rebuilt, wanted.clone().into()))
        }
        outcome => outcome.map(|()| (applied, state)),
    }
}

/// Messages that turn the present table into the desired one.
struct Planned {
    applied: Applied,
    messages: Vec<Message>,
    /// State of the table after the messages.
    state: TableState,
}

/// # Errors
/// Names too long for a message.
fn plan(wanted: &Table, present: Option<TableState>) -> Result<Planned> {
    let Some(mut state) = present.filter(|present| present.shape == wanted.shape()) else {
        let messages = nftables::create(wanted)?;
        return Ok(Planned { applied: Applied::Rebuilt, messages, state: wanted.clone().into() });
    };
    let mut messages = Vec::new();
    let mut deleted = 0usize;
    let mut added = 0usize;
    for (name, addresses) in &wanted.sets {
        let held = state.sets.remove(name).unwrap_or_else(|| Elements::empty(addresses.family()));
        let difference = held.difference(addresses);
        deleted = deleted.saturating_add(difference.deleted.intervals().len());
        added = added.saturating_add(difference.added.intervals().len());
        messages.extend(nftables::change_elements(&wanted.name, name, &difference)?);
        state.sets.insert(name.clone(), held.after(&difference));
    }
    for (name, elements) in &wanted.maps {
        let held = state.maps.insert(name.clone(), elements.clone()).unwrap_or_default();
        messages.extend(nftables::change_map(&wanted.name, name, &held, elements)?);
    }
    let applied = if messages.is_empty() { Applied::Unchanged } else { Applied::Elements { deleted, added } };
    Ok(Planned { applied, messages, state })
}
