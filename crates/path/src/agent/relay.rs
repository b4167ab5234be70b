//! What the agent asks of a relay.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::PathAgent;
use crate::filtering::{Filtering, RelayStun};
use crate::stun::StunAnswer;

impl PathAgent {
    /// Sets where the relay answers STUN requests; `None` where it answers none.
    pub fn set_relay_stun(&mut self, now: Duration, relay: Option<RelayStun>) {
        self.filtering.set_relay(now, relay);
        self.report_stun();
    }

    /// What each STUN server said last, and the relay if it says something of use.
    pub fn stun_answers(&self) -> BTreeMap<SocketAddr, StunAnswer> {
        let mut answers = self.stun.answers();
        if let Some((relay, mapped)) = self.filtering.mapped() {
            answers.entry(relay).or_insert(StunAnswer::Mapped(mapped));
        }
        answers
    }

    /// How the NAT in front of this node filters; `None` until that is known.
    pub fn filtering(&self) -> Option<Filtering> {
        self.filtering.filtering()
    }
}
