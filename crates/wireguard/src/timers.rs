//! Timers of a peer, for messages that no packet asks for (WireGuard paper 6; `drivers/net/wireguard/timers.c`).
//!
//! Deadlines only: every one is an instant, nothing ticks. Two rules differ from the kernel's. It counts 20 initiations where the
//! paper has `REKEY_ATTEMPT_TIME`; here it is the time. And it sends a second keepalive if more data came while the first was
//! waited for (`timer_need_another_keepalive`), which tells the peer nothing that the first has not told.

use std::time::{Duration, Instant};

use crate::random::Random;
use crate::session::REJECT_AFTER_TIME;

/// Age of a session after which its initiator, when it sends, begins a new handshake (WireGuard paper 6.1 and 6.2).
pub(crate) const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
/// Number of messages of a session after which either side, when it sends, begins a new handshake.
pub(crate) const REKEY_AFTER_MESSAGES: u64 = 1 << 60;
/// Age of a session after which its initiator, when it receives, begins a new handshake: a peer that only receives gets
/// its keepalive in time (`REJECT_AFTER_TIME - KEEPALIVE_TIMEOUT - REKEY_TIMEOUT`, WireGuard paper 6.2).
pub(crate) const REKEY_ON_RECEIVE: Duration = Duration::from_secs(165);
/// Time without an answer after which an initiation is repeated, without jitter.
pub(crate) const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which initiations are repeated before this node gives up.
pub(crate) const REKEY_ATTEMPT_TIME: Duration = Duration::from_secs(90);
/// Time after received data in which something has to be sent, if only a keepalive.
pub(crate) const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which keys are erased (`REJECT_AFTER_TIME * 3`, WireGuard paper 6.3).
const ERASE_AFTER_TIME: Duration = REJECT_AFTER_TIME.saturating_mul(3);
/// Time after data was sent, and nothing came back, until a new handshake begins (WireGuard paper 6.5), without jitter.
const NEW_HANDSHAKE_TIMEOUT: Duration = KEEPALIVE_TIMEOUT.saturating_add(REKEY_TIMEOUT);
/// The longest random delay of a handshake: without one, two peers could begin at the same moment again and again.
const MAX_JITTER: Duration = Duration::from_millis(333);

/// Action that is due for a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// The keys of all sessions were erased: they are 540 s old (WireGuard paper 6.3).
    Expired,
    /// The peer has not answered for 90 s: packets that wait for a session are to be dropped (WireGuard paper 6.4).
    GaveUp,
    /// [`Tunnel::initiate`](crate::Tunnel::initiate) is to be called with `again`, and the message sent.
    Handshake,
    /// A keepalive is to be sent: an empty packet (WireGuard paper 6.5).
    Keepalive,
}

/// The deadlines of one peer.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    /// Time since which initiations are sent that no session has come from.
    attempt: Option<Instant>,
    /// Time at which the last initiation is repeated. None without [`Self::attempt`].
    retransmit: Option<Instant>,
    /// Time at which data that was sent has not been answered for too long.
    new_handshake: Option<Instant>,
    /// Time since which a handshake is due for another reason.
    rekey: Option<Instant>,
    keepalive: Option<Instant>,
    erase: Option<Instant>,
    /// Time at which the last initiation or response was sent.
    handshake_sent: Option<Instant>,
    /// The old session has already asked for a new one because something was received.
    sent_last_minute: bool,
    /// Jitter of the next [`Self::new_handshake`]. It is drawn before, so that sending a packet needs no randomness.
    jitter: Duration,
}

impl Timers {
    /// A data message or a keepalive was sent.
    #[inline]
    pub(crate) fn message_sent(&mut self, is_data: bool, now: Instant) {
        self.keepalive = None;
        if is_data && self.new_handshake.is_none() {
            self.new_handshake = after(now, NEW_HANDSHAKE_TIMEOUT.saturating_add(self.jitter));
        }
    }

    /// A data message or a keepalive was received.
    #[inline]
    pub(crate) fn message_received(&mut self, is_data: bool, now: Instant) {
        self.new_handshake = None;
        if is_data && self.keepalive.is_none() {
            self.keepalive = after(now, KEEPALIVE_TIMEOUT);
        }
    }

    /// An initiation was sent. Unless it repeats another one, the time until this node gives up begins.
    pub(crate) fn initiation_sent(&mut self, now: Instant, random: &mut dyn Random) {
        self.attempt.get_or_insert(now);
        self.retransmit = after(now, REKEY_TIMEOUT.saturating_add(jitter(random)));
        self.rekey = None;
        self.any_handshake_sent(now, random);
    }

    /// An initiation was received and answered. That makes a session, if the peer confirms it.
    pub(crate) fn response_sent(&mut self, now: Instant, random: &mut dyn Random) {
        if self.retransmit.is_some() {
            // The peer is as quick as this node: its handshake comes first.
            self.retransmit = after(now, REKEY_TIMEOUT.saturating_add(jitter(random)));
        }
        self.new_handshake = None;
        self.erase = after(now, ERASE_AFTER_TIME);
        self.any_handshake_sent(now, random);
    }

    fn any_handshake_sent(&mut self, now: Instant, random: &mut dyn Random) {
        self.handshake_sent = Some(now);
        self.keepalive = None;
        self.jitter = jitter(random);
    }

    /// A response was received. Unless something else is sent now, a keepalive confirms the session (WireGuard paper 6.5).
    pub(crate) fn response_received(&mut self, now: Instant) {
        self.new_handshake = None;
        self.erase = after(now, ERASE_AFTER_TIME);
        self.handshake_completed();
        self.keepalive = Some(now);
    }

    /// There is a session that both have confirmed.
    pub(crate) fn handshake_completed(&mut self) {
        self.attempt = None;
        self.retransmit = None;
        self.rekey = None;
        self.sent_last_minute = false;
    }

    /// A packet asks for a handshake, for example because it was sent in an old session. The time until this node gives up begins
    /// anew (WireGuard paper 6.4).
    #[inline]
    pub(crate) fn want_handshake(&mut self, now: Instant) {
        self.restart_attempt(now);
        if self.may_send_handshake(now) && self.rekey.is_none() {
            self.rekey = Some(now);
        }
    }

    /// The same, because of a packet that was received: once per session.
    #[inline]
    pub(crate) fn want_last_minute_handshake(&mut self, now: Instant) {
        if !self.sent_last_minute {
            self.sent_last_minute = true;
            self.want_handshake(now);
        }
    }

    /// The time until this node gives up begins anew, if it tries.
    #[inline]
    pub(crate) fn restart_attempt(&mut self, now: Instant) {
        if let Some(started) = &mut self.attempt {
            *started = now;
        }
    }

    /// Whether initiations are being sent that no session has come from.
    #[inline]
    pub(crate) fn is_attempting(&self) -> bool {
        self.attempt.is_some()
    }

    /// No more often than every [`REKEY_TIMEOUT`], and not while the peer can be expected to confirm a response.
    fn may_send_handshake(&self, now: Instant) -> bool {
        self.handshake_sent.is_none_or(|sent| now.saturating_duration_since(sent) >= REKEY_TIMEOUT)
    }

    /// Takes the next action that is due at `now`; `can_send` says whether there is a session for a keepalive.
    pub(crate) fn take_due(&mut self, can_send: bool, now: Instant, random: &mut dyn Random) -> Option<Due> {
        if take(&mut self.erase, now) {
            return Some(Due::Expired);
        }
        if take(&mut self.give_up_at(), now) {
            self.give_up(now);
            return Some(Due::GaveUp);
        }
        if take(&mut self.new_handshake, now) {
            self.want_handshake(now);
        }
        if take(&mut self.keepalive, now) {
            if can_send {
                return Some(Due::Keepalive);
            }
            // The kernel, too, starts a handshake for a keepalive that it has no session for.
            self.want_handshake(now);
        }
        let is_repeated = take(&mut self.retransmit, now);
        if is_repeated {
            // Should the caller have no way to send it, there is another chance.
            self.retransmit = after(now, REKEY_TIMEOUT.saturating_add(jitter(random)));
        }
        // One message is enough for both.
        (take(&mut self.rekey, now) || is_repeated).then_some(Due::Handshake)
    }

    /// Time at which [`Self::take_due`] has an action.
    pub(crate) fn next(&self) -> Option<Instant> {
        let deadlines =
            [self.give_up_at(), self.retransmit, self.new_handshake, self.rekey, self.keepalive, self.erase];
        deadlines.into_iter().flatten().min()
    }

    fn give_up_at(&self) -> Option<Instant> {
        after(self.attempt?, REKEY_ATTEMPT_TIME)
    }

    /// Ends the attempt. Its remains are erased later, as by the kernel: an answer may still come.
    fn give_up(&mut self, now: Instant) {
        self.attempt = None;
        self.retransmit = None;
        self.rekey = None;
        self.keepalive = None;
        self.erase = self.erase.or(after(now, ERASE_AFTER_TIME));
    }
}

/// None, which is never, if the clock cannot hold it.
#[inline]
fn after(now: Instant, duration: Duration) -> Option<Instant> {
    now.checked_add(duration)
}

fn take(deadline: &mut Option<Instant>, now: Instant) -> bool {
    deadline.take_if(|deadline| *deadline <= now).is_some()
}

/// Random delay from 0 to [`MAX_JITTER`], evenly distributed.
fn jitter(random: &mut dyn Random) -> Duration {
    let mut bytes = [0; 4];
    random.fill(&mut bytes);
    let fraction = u64::from(u32::from_le_bytes(bytes));
    let nanoseconds = u64::from(MAX_JITTER.subsec_nanos()).saturating_mul(fraction) >> u32::BITS;
    Duration::from_nanos(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least or the greatest random number.
    struct Constant(u8);

    impl Random for Constant {
        fn fill(&mut self, bytes: &mut [u8]) {
            bytes.fill(self.0);
        }
    }

    #[test]
    fn jitter_is_less_than_a_third_of_a_second() {
        assert_eq!(jitter(&mut Constant(0)), Duration::ZERO);
        let greatest = jitter(&mut Constant(0xff));
        assert!(greatest < MAX_JITTER && greatest > MAX_JITTER - Duration::from_micros(1), "{greatest:?}");
    }

    #[test]
    fn the_numbers_are_those_of_the_paper() {
        assert_eq!(ERASE_AFTER_TIME, Duration::from_secs(540));
        assert_eq!(NEW_HANDSHAKE_TIMEOUT, Duration::from_secs(15));
        assert_eq!(REKEY_ON_RECEIVE, REJECT_AFTER_TIME - KEEPALIVE_TIMEOUT - REKEY_TIMEOUT);
        assert_eq!(REKEY_AFTER_MESSAGES, 1_152_921_504_606_846_976);
    }

    /// Deadlines that the clock cannot hold are none.
    #[test]
    fn the_end_of_time_is_no_panic() {
        let mut end = Instant::now();
        let mut step = Duration::from_secs(u64::MAX);
        while !step.is_zero() {
            match end.checked_add(step) {
                Some(later) => end = later,
                None => step /= 2,
            }
        }
        let mut timers = Timers::default();
        timers.message_sent(true, end);
        timers.message_received(true, end);
        timers.initiation_sent(end, &mut Constant(0));
        assert_eq!(timers.next(), None);
        timers.response_received(end);
        assert_eq!(timers.take_due(true, end, &mut Constant(0)), Some(Due::Keepalive));
    }
}
