//! The newest handshake initiation to each peer, as long as it may be what WireGuard waits for. WireGuard sends the next one after 5 s
//! (`REKEY_TIMEOUT`), so one that the relay cannot pass on yet, because there is no link or the peer has none, is sent again as soon as it can.
//!
//! A peer drops an initiation that it has handled before (its time stamp is not newer, WireGuard paper 5.1).
//!
//! Two initiations that cross each other end both handshakes of the kernel's WireGuard: it has one state per peer, that of the response
//! replaces that of the initiation, and the answer to it is dropped. Both sides then wait 5 s. So the node with the lower key does not pass
//! on the initiation of the peer while its own may be on the way, and sends its own once more; the other one drops its own.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;

/// Time for which the newest handshake initiation to a peer is held for a link to the relay, or for the peer.
pub const INITIATION_HELD: Duration = Duration::from_secs(1);
/// Time that the peer's own initiation has to arrive after the first datagram of the peer: for the node with the lower key, and for the
/// other one.
const PAUSE: Duration = Duration::from_millis(50);
const LONG_PAUSE: Duration = Duration::from_millis(300);
/// Type and length of handshake initiations, and the types of all messages: WireGuard paper, section 5.4.
const MESSAGE_INITIATION: u8 = 1;
const INITIATION_LENGTH: usize = 148;
const MESSAGES: RangeInclusive<u8> = 1..=4;

/// The initiations of one node. Time is an argument.
#[derive(Debug, Default)]
pub(super) struct HeldInitiations {
    held: HashMap<PublicKey, Held>,
    lost: u64,
}

#[derive(Debug)]
struct Held {
    message: Box<[u8]>,
    since: Instant,
    passed: Passed,
    /// Time at which the message is to be sent; `None` while it only waits.
    due: Option<Instant>,
    /// An initiation of the peer was dropped in favour of it. A second one is not.
    has_won: bool,
}

/// Progress of an initiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passed {
    /// A link has taken it. It is sent once more if the peer is heard before it answers: it may not have been there in time.
    Once,
    /// The initiation has been sent after the peer was heard.
    Repeated,
    /// No link has taken it, or the link has ended, or the peer had none.
    Unsent,
}

impl HeldInitiations {
    /// WireGuard sends a datagram to a peer, and a link takes it or there is none. Whether it is held.
    pub(super) fn sent(&mut self, now: Instant, peer: &PublicKey, payload: &[u8], is_taken: bool) -> bool {
        let is_initiation =
            payload.len() == INITIATION_LENGTH && message_type(payload) == Some(MESSAGE_INITIATION);
        if !is_initiation {
            return false;
        }
        self.expire(now);
        let passed = if is_taken { Passed::Once } else { Passed::Unsent };
        let held = Held { message: payload.into(), since: now, passed, due: None, has_won: false };
        let before = self.held.insert(*peer, held);
        self.count(before.as_ref());
        true
    }

    /// There is a link: it is to take what none has taken.
    pub(super) fn link_began(&mut self, now: Instant) {
        self.expire(now);
        for held in self.held.values_mut().filter(|held| held.passed == Passed::Unsent) {
            held.passed = Passed::Once;
            held.due = Some(now);
        }
    }

    /// The link has ended: what it has taken may not have arrived.
    pub(super) fn link_ended(&mut self) {
        for held in self.held.values_mut() {
            held.passed = Passed::Unsent;
            held.due = None;
        }
    }

    /// The relay says that a peer has no link.
    pub(super) fn peer_gone(&mut self, peer: &PublicKey) {
        if let Some(held) = self.held.get_mut(peer) {
            held.passed = Passed::Unsent;
            held.due = None;
        }
    }

    /// A datagram of a peer has come over the relay. A message of WireGuard answers the initiation, or is to be answered instead; any
    /// other one shows that the peer is there. `is_first` is whether this node has the lower key. Whether WireGuard is to get it.
    pub(super) fn received(
        &mut self,
        now: Instant,
        peer: &PublicKey,
        payload: &[u8],
        is_first: bool,
    ) -> bool {
        self.expire(now);
        let message = message_type(payload);
        let Some(held) = self.held.get_mut(peer) else { return true };
        if message == Some(MESSAGE_INITIATION) && is_first && !std::mem::replace(&mut held.has_won, true) {
            held.passed = Passed::Repeated;
            held.due = Some(now);
            return false;
        }
        if message.is_some() {
            self.held.remove(peer);
        } else if held.passed != Passed::Repeated {
            let pause = if is_first { PAUSE } else { LONG_PAUSE };
            held.passed = Passed::Repeated;
            held.due = now.checked_add(pause);
        }
        true
    }

    /// Initiations that a link is to send now.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<(PublicKey, Box<[u8]>)> {
        self.expire(now);
        let due = self.held.iter_mut().filter(|(_, held)| held.due.is_some_and(|due| due <= now));
        due.map(|(peer, held)| {
            held.due = None;
            (*peer, held.message.clone())
        })
        .collect()
    }

    /// Time at which [`Self::take_due`] has something.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.held.values().filter_map(|held| held.due).min()
    }

    /// WireGuard sends another one, by another path.
    pub(super) fn forget(&mut self, peer: &PublicKey) {
        self.held.remove(peer);
    }

    /// Whether none is held.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Number of initiations that were dropped without having been sent.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    fn expire(&mut self, now: Instant) {
        let is_old = |held: &Held| now.saturating_duration_since(held.since) > INITIATION_HELD;
        let old =
            self.held.extract_if(|_, held| is_old(held)).filter(|(_, held)| held.passed == Passed::Unsent);
        let lost = u64::try_from(old.count()).unwrap_or(u64::MAX);
        self.lost = self.lost.saturating_add(lost);
    }

    fn count(&mut self, replaced: Option<&Held>) {
        if replaced.is_some_and(|held| held.passed == Passed::Unsent) {
            self.lost = self.lost.saturating_add(1);
        }
    }
}

/// The type of a message of WireGuard; behind it are three zeros.
fn message_type(payload: &[u8]) -> Option<u8> {
    match payload {
        [message_type, 0, 0, 0, ..] if MESSAGES.contains(message_type) => Some(*message_type),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PublicKey = PublicKey([2; 32]);
    const OTHER: PublicKey = PublicKey([3; 32]);
    const MILLISECOND: Duration = Duration::from_millis(1);
    const PROBE: &[u8] = b"a probe";

    fn initiation(number: u8) -> Vec<u8> {
        let mut message = vec![number; INITIATION_LENGTH];
        message[..4].copy_from_slice(&[MESSAGE_INITIATION, 0, 0, 0]);
        message
    }

    fn due(held: &mut HeldInitiations, now: Instant) -> Vec<(PublicKey, Vec<u8>)> {
        held.take_due(now).into_iter().map(|(peer, message)| (peer, message.into())).collect()
    }

    #[test]
    fn a_link_takes_the_newest_initiation_to_each_peer_once() {
        let (mut held, start) = (HeldInitiations::default(), Instant::now());
        assert!(held.sent(start, &PEER, &initiation(1), false));
        assert!(held.sent(start + 300 * MILLISECOND, &PEER, &initiation(2), false));
        assert!(held.sent(start + 300 * MILLISECOND, &OTHER, &initiation(3), false));
        assert_eq!((held.next_due(), held.lost()), (None, 1), "there is no link");
        let now = start + 900 * MILLISECOND;
        held.link_began(now);
        let mut sent = due(&mut held, now);
        sent.sort();
        assert_eq!(sent, [(PEER, initiation(2)), (OTHER, initiation(3))]);
        assert_eq!((due(&mut held, now), held.next_due()), (vec![], None));
    }

    #[test]
    fn an_initiation_is_held_for_a_second_and_nothing_else_is() {
        let (mut held, start) = (HeldInitiations::default(), Instant::now());
        let long = [initiation(1), vec![0]].concat();
        let data = [&[4, 0, 0, 0][..], &[0; INITIATION_LENGTH - 4]].concat();
        let reserved = [&[1, 0, 1, 0][..], &[0; INITIATION_LENGTH - 4]].concat();
        for payload in [&long[..], &data, &reserved, PROBE, &[]] {
            assert!(!held.sent(start, &PEER, payload, false), "{payload:?}");
        }
        assert!(held.is_empty());
        held.sent(start, &PEER, &initiation(1), false);
        held.sent(start, &OTHER, &initiation(1), true);
        let now = start + INITIATION_HELD + MILLISECOND;
        held.link_began(now);
        assert_eq!(due(&mut held, now), []);
        assert!(held.is_empty());
        assert_eq!(held.lost(), 1, "a link has taken the other one");
    }

    #[test]
    fn what_a_link_had_taken_is_taken_again_by_the_next_one() {
        let (mut held, now) = (HeldInitiations::default(), Instant::now());
        held.sent(now, &PEER, &initiation(1), true);
        held.link_began(now);
        assert_eq!(due(&mut held, now), [], "it is on its way");
        held.link_ended();
        assert_eq!(due(&mut held, now), []);
        held.link_began(now);
        assert_eq!(due(&mut held, now), [(PEER, initiation(1))]);
    }

    #[test]
    fn a_peer_that_comes_to_the_relay_gets_it_after_it_could_have_sent_its_own() {
        for (is_first, pause) in [(true, PAUSE), (false, LONG_PAUSE)] {
            let (mut held, now) = (HeldInitiations::default(), Instant::now());
            held.sent(now, &PEER, &initiation(1), true);
            held.peer_gone(&PEER);
            held.received(now, &OTHER, PROBE, is_first);
            assert_eq!(held.next_due(), None);
            held.received(now, &PEER, PROBE, is_first);
            let at = now + pause;
            assert_eq!((held.next_due(), due(&mut held, at - MILLISECOND)), (Some(at), vec![]));
            assert_eq!(due(&mut held, at), [(PEER, initiation(1))]);
            held.received(at, &PEER, PROBE, is_first);
            assert_eq!(held.next_due(), None, "it is not sent with each datagram of the peer");
            held.peer_gone(&PEER);
            held.received(at, &PEER, PROBE, is_first);
            assert_eq!(held.next_due(), Some(at + pause));
        }
    }

    #[test]
    fn messages_of_the_peer_s_wireguard_end_it() {
        for (message_type, is_first) in [(1, false), (2, false), (2, true), (3, true), (4, true)] {
            let (mut held, now) = (HeldInitiations::default(), Instant::now());
            held.sent(now, &PEER, &initiation(1), true);
            assert!(held.received(now, &PEER, PROBE, is_first));
            assert!(held.received(now, &PEER, &[message_type, 0, 0, 0, 9], is_first));
            assert_eq!(due(&mut held, now + LONG_PAUSE), []);
            assert!(held.is_empty());
        }
    }

    #[test]
    fn of_two_initiations_that_cross_each_other_only_one_arrives() {
        for is_taken in [true, false] {
            let (mut held, now) = (HeldInitiations::default(), Instant::now());
            assert!(held.received(now, &PEER, &initiation(7), true), "nothing crosses it");
            held.sent(now, &PEER, &initiation(1), is_taken);
            assert!(held.received(now, &OTHER, &initiation(7), true), "of another peer");
            assert!(!held.received(now, &PEER, &initiation(8), true));
            assert_eq!(due(&mut held, now), [(PEER, initiation(1))], "the peer may not have got it");
            assert!(held.received(now, &PEER, &initiation(9), true), "it has not arrived");
            assert!(held.is_empty());
            held.sent(now, &PEER, &initiation(2), is_taken);
            let late = now + INITIATION_HELD + MILLISECOND;
            assert!(held.received(late, &PEER, &initiation(10), true), "it did not cross ours");
        }
    }

    #[test]
    fn what_another_path_is_used_for_is_forgotten_and_what_is_old_when_a_peer_is_heard() {
        let (mut held, now) = (HeldInitiations::default(), Instant::now());
        held.sent(now, &PEER, &initiation(1), false);
        held.forget(&OTHER);
        held.forget(&PEER);
        held.link_began(now);
        assert_eq!((due(&mut held, now), held.lost()), (vec![], 0));
        held.sent(now, &PEER, &initiation(1), true);
        held.received(now + INITIATION_HELD + MILLISECOND, &OTHER, PROBE, true);
        assert!(held.is_empty());
    }
}
