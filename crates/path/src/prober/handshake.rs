//! Handshakes that only the peer can start. A peer refuses handshake initiations whose time stamp is older than one it has seen
//! (TAI64N, WireGuard paper 5.1), and says nothing: a node that was rebooted with its clock set back gets no session. So a
//! peer that answers requests but no handshakes is asked to start one. Its own initiation is not refused: this node has seen none of its
//! time stamps, or older ones.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;
use super::path::LAST_REQUEST;

/// How long handshakes are unanswered, over a path that answers requests, before the peer is asked to start one. The embedded
/// WireGuard repeats an initiation after 0.3, 1 and 2 s.
const UNANSWERED: Duration = Duration::from_secs(2);
/// Time between requests to start a handshake: the first ones, and those to a peer that did not do it.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
const SLOW_ASK_INTERVAL: Duration = Duration::from_secs(60);
/// How many are the first ones. While a path answers, no other is tried: where only handshakes are lost, that has to end.
const FIRST_ASKS: u32 = 5;
/// Least time between handshakes that a peer asks for.
const MIN_HANDSHAKE_INTERVAL: Duration = Duration::from_secs(5);
/// Least time between requests to find out whether the peer that asks is there.
const MIN_TRY_INTERVAL: Duration = Duration::from_millis(500);

/// What each of the two has asked of the other.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// Bytes sent to the peer while there was a session. What was sent since are initiations.
    sent: u64,
    /// Since when they have been unanswered while the path in use answers requests.
    unanswered_since: Option<Duration>,
    /// How often the peer was asked since there was a session.
    asked: u32,
    /// Not before this time is it asked again.
    next_ask: Duration,
    /// When the request is to be sent.
    pub(super) due: Option<Duration>,
    /// When this node last started a handshake because the peer asked, and when it last tried the paths for that.
    started: Option<Duration>,
    tried: Option<Duration>,
}

impl Prober {
    /// Takes what the device says of handshakes: whether it has a session, whatever has come through it, and how many bytes it
    /// has sent to the peer.
    pub(crate) fn observe_handshake(&mut self, now: Duration, has_session: bool, tx_bytes: u64) {
        let works = self.works(now);
        let handshakes = &mut self.handshakes;
        if has_session {
            let Handshakes { started, tried, .. } = *handshakes;
            *handshakes = Handshakes { sent: tx_bytes, started, tried, ..Handshakes::default() };
            return;
        }
        // A device that was made anew counts from zero.
        handshakes.sent = handshakes.sent.min(tx_bytes);
        if !works || tx_bytes == handshakes.sent {
            handshakes.unanswered_since = None;
            return;
        }
        let since = *handshakes.unanswered_since.get_or_insert(now);
        if now.saturating_sub(since) < UNANSWERED || now < handshakes.next_ask {
            return;
        }
        handshakes.asked = handshakes.asked.saturating_add(1);
        let interval = if handshakes.asked < FIRST_ASKS { ASK_INTERVAL } else { SLOW_ASK_INTERVAL };
        handshakes.next_ask = now.saturating_add(interval);
        handshakes.due = Some(now);
    }

    /// Where to send a request to start a handshake, if one is due.
    pub(super) fn take_handshake_request(&mut self, now: Duration) -> Option<SocketAddr> {
        self.handshakes.due.take_if(|due| *due <= now)?;
        self.current
    }

    /// The peer has asked for a handshake, in an authenticated request. Whether this node is to start one: the request `is_new`, no
    /// recording, the path in use works, and the last such handshake is long enough ago. Otherwise the peer is asked whether it
    /// is there; it asks again.
    pub(crate) fn handle_handshake_request(&mut self, now: Duration, from: SocketAddr, is_new: bool) -> bool {
        let is_recent =
            |at: Option<Duration>, interval| at.is_some_and(|at| now.saturating_sub(at) < interval);
        let Handshakes { started, tried, .. } = self.handshakes;
        if is_recent(started, MIN_HANDSHAKE_INTERVAL) {
            return false;
        }
        if is_new && self.works(now) {
            self.handshakes.started = Some(now);
            return true;
        }
        if is_recent(tried, MIN_TRY_INTERVAL) {
            return false;
        }
        self.handshakes.tried = Some(now);
        if is_new && tried.is_some() && self.path(from).is_some_and(|path| path.is_fresh(now)) {
            // The peer has moved: the path in use was asked as well.
            self.fail_current(now);
        } else {
            self.ask_once(now, [Some(from), self.current]);
        }
        false
    }

    fn ask_once(&mut self, now: Duration, addresses: [Option<SocketAddr>; 2]) {
        let (after, before) = LAST_REQUEST;
        let is_asked = |address| addresses.contains(&Some(address));
        for path in self.paths.iter_mut().filter(|path| path.attempt.is_none()) {
            if is_asked(path.candidate.address) {
                path.attempt = Some((now.saturating_sub(after), before));
            }
        }
    }
}
