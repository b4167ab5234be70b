//! Confirmations of a claim: writes of the Lease, and promises of members.

use std::collections::BTreeMap;
use std::time::Duration;

/// Confirmations that the claim of this gateway has.
#[derive(Debug, Default)]
pub(super) struct Confirmations {
    /// When the last successful write began.
    renewed: Option<Duration>,
    /// By member: when the last heartbeat was sent that it has answered with a promise for this claim.
    acked: BTreeMap<String, Duration>,
}

impl Confirmations {
    /// A write that began then has succeeded.
    pub(super) fn renew(&mut self, began: Duration) {
        self.renewed = self.renewed.max(Some(began));
    }

    /// A member has answered a heartbeat that was sent then with a promise.
    pub(super) fn acknowledge(&mut self, member: &str, sent: Duration) {
        let acked = self.acked.entry(member.to_owned()).or_default();
        *acked = sent.max(*acked);
    }

    /// A member's promise is missed only from then on.
    pub(super) fn join(&mut self, member: &str, since: Duration) {
        self.acked.insert(member.to_owned(), since);
    }

    /// Forgets members that are gone.
    pub(super) fn retain(&mut self, is_member: impl Fn(&String) -> bool) {
        self.acked.retain(|name, _| is_member(name));
    }

    /// Writes do not count any more.
    pub(super) fn forget_writes(&mut self) {
        self.renewed = None;
    }

    /// Promises do not count any more.
    pub(super) fn forget_promises(&mut self) {
        self.acked.clear();
    }

    /// When the heartbeat was sent since which all members have promised; `None` if one has promised nothing.
    pub(super) fn oldest<'a>(
        &self,
        members: impl Iterator<Item = &'a String>,
        now: Duration,
    ) -> Option<Duration> {
        let promised = members.map(|name| self.acked.get(name).copied());
        promised.min().unwrap_or(Some(now))
    }

    /// When what confirms the claim last began: a write, or the heartbeat that all members have answered.
    pub(super) fn last<'a>(
        &self,
        members: impl Iterator<Item = &'a String>,
        now: Duration,
    ) -> Option<Duration> {
        self.oldest(members, now).max(self.renewed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_members_confirm_or_a_write_does() {
        let members = ["a".to_owned(), "b".to_owned()];
        let [first, second, third, now] = [1, 2, 3, 4].map(Duration::from_secs);
        let mut confirmations = Confirmations::default();
        assert_eq!(confirmations.last(std::iter::empty(), now), Some(now), "it is alone");
        confirmations.acknowledge("a", second);
        assert_eq!(confirmations.last(members.iter(), now), None);
        confirmations.renew(first);
        assert_eq!(confirmations.last(members.iter(), now), Some(first));
        confirmations.acknowledge("b", third);
        confirmations.acknowledge("b", first);
        assert_eq!(confirmations.last(members.iter(), now), Some(second));
        confirmations.retain(|name| name == "b");
        assert_eq!(confirmations.oldest(members.iter(), now), None);
        confirmations.join("a", third);
        assert_eq!(confirmations.oldest(members.iter(), now), Some(third));
        confirmations.forget_promises();
        assert_eq!(confirmations.last(members.iter(), now), Some(first));
        confirmations.forget_writes();
        assert_eq!(confirmations.last(members.iter(), now), None);
    }
}
