//! From the table to raw sockets and back.

use std::time::{Duration, Instant};

use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_netlink::nftables;
use fairlead_tunnel::{RawPort, Word};
use fairlead_wire::{probe, stun};

use super::super::path_table::{Joined, Ports, STUN_RESPONSE, STUN_RESPONSE_MASK};
use super::super::retests;
use super::super::self_test::{Outcome, Sender, test, works};
use super::{PathPort, State, readable_event};

/// Time between attempts with raw sockets where neither way works in all families: each interrupts the other way.
pub(super) const FALL_BACK_INTERVAL: Duration = Duration::from_secs(600);

/// Patterns of the datagrams that raw sockets receive: probes and STUN responses, as the table's rules.
const PROBE: &[Word] = &[Word { offset: 0, mask: u32::MAX, value: u32::from_be_bytes(probe::MAGIC) }];
const STUN: &[Word] = &[
    Word { offset: 0, mask: upper(STUN_RESPONSE_MASK), value: upper(STUN_RESPONSE) },
    Word { offset: 4, mask: u32::MAX, value: u32::from_be_bytes(stun::MAGIC_COOKIE) },
];

const fn upper([first, second]: [u8; 2]) -> u32 {
    u32::from_be_bytes([first, second, 0, 0])
}

impl PathPort {
    /// Raw sockets instead of the table, if they work in more families. They are opened in the namespace of the calling thread.
    pub(super) fn fall_back(&self, state: &mut State, ports: Ports) {
        state.fell_back = Some(Instant::now());
        let raw = match RawPort::open(ports.wireguard, MARK_FROM_WIREGUARD, &[PROBE, STUN]) {
            Ok(raw) => raw,
            Err(error) => return tracing::warn!(%error, "cannot open raw sockets for path probes"),
        };
        // Its rules come before raw sockets; those of peers at other ports stay. Where it cannot be changed, the test says whether it is there.
        if let Err(error) = state.apply_as(ports, Joined::None) {
            tracing::debug!(%error, "cannot take the table of the path socket back");
        }
        let mut others = Vec::new();
        let outcomes = test(Sender::Raw(&raw), ports.wireguard, &mut others);
        let generation = nftables::generation(&mut state.netlink).ok();
        if works(&outcomes) > state.works() && self.readable.add(&raw, readable_event()).is_ok() {
            let reason = state.failure().unwrap_or_default();
            tracing::warn!(reason, "raw sockets take the place of nftables for path probes");
            state.refusal = None;
            state.generation = None;
            state.raw = Some(raw);
            state.conclude_test(outcomes, generation, others);
            state.apply_pins(ports);
        } else if state.refusal.is_none() {
            state.generation = None;
            let outcome = state.apply(ports);
            state.refusal = outcome.err().map(|error| error.to_string());
            state.backlog.extend(others);
        }
    }

    /// Tests now and then whether the table works by now, and lets it take the place of raw sockets. Meanwhile these are in use, and
    /// the table joins only what this host sends to itself.
    pub(super) fn return_to_table(&self) {
        let Some(ports) = self.begin_trial() else { return };
        // Not locked: probes are received and answered meanwhile.
        let outcomes = test(Sender::Table(&self.socket), ports.wireguard, &mut Vec::new());
        let mut state = self.lock();
        state.is_in_trial = false;
        let is_chosen =
            works(&outcomes) >= state.works() && self.ports(&state) == ports && state.raw.is_some();
        if !(is_chosen && self.take_table(&mut state, ports, outcomes)) {
            self.end_trial(&mut state, ports);
        }
    }

    fn begin_trial(&self) -> Option<Ports> {
        let mut state = self.lock();
        state.raw.as_ref()?;
        let generation = nftables::generation(&mut state.netlink).ok();
        if !state.retests.is_due(Instant::now(), generation) {
            return None;
        }
        while self.socket.try_receive().is_some() {}
        let ports = self.ports(&state);
        match state.apply_as(ports, Joined::Loopback) {
            Ok(_) => {
                state.is_in_trial = true;
                Some(ports)
            }
            Err(error) => {
                tracing::debug!(%error, "the table of the path socket cannot be made yet");
                self.end_trial(&mut state, ports);
                None
            }
        }
    }

    /// Raw sockets stay in use.
    fn end_trial(&self, state: &mut State, ports: Ports) {
        if let Err(error) = state.apply(ports) {
            tracing::debug!(%error, "cannot take the table of the path socket back after its test");
        }
        let generation = nftables::generation(&mut state.netlink).ok();
        state.retests.record(Instant::now(), generation, retests::random());
    }

    /// Puts the table in the place of raw sockets; datagrams that they have received are kept. Whether the table is in place.
    fn take_table(&self, state: &mut State, ports: Ports, outcomes: [Outcome; 2]) -> bool {
        if let Err(error) = state.apply_as(ports, Joined::All) {
            tracing::debug!(%error, "the table of the path socket cannot be made yet");
            return false;
        }
        tracing::info!("nftables takes the place of raw sockets for path probes");
        let raw = state.raw.take();
        let others = raw.iter().flat_map(|raw| std::iter::from_fn(|| raw.try_receive())).collect();
        // Closing them ends their place in the epoll.
        drop(raw);
        state.refusal = None;
        state.fell_back = None;
        let generation = nftables::generation(&mut state.netlink).ok();
        state.conclude_test(outcomes, generation, others);
        true
    }
}
