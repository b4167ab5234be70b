//! A change of the secret that members share, make before break.
//!
//! A node that sees another secret uses both: it is published under both and reads both. To be told of under the new one is how a member
//! says that it has that. When all have it, the old one is left, and after [`LONGEST`] in any case: one that was stolen must not
//! stay valid. All of it is without I/O.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fairlead_cluster::naming::some_of;
use fairlead_keys::PresharedKey;
use fairlead_topology::Member;
use jiff::Timestamp;

use crate::SourceProblem;
use crate::saved::discovery::{Credentials, Previous, Secrets};
use crate::state_file::{StateFile, age};

/// Longest time for which the old secret is used: an hour after the change.
const LONGEST: Duration = Duration::from_secs(3600);
/// Time after which members that have not changed are named: each reads its Secret once a minute.
const PATIENCE: Duration = Duration::from_secs(150);
/// Most members that are named.
pub(super) const MAX_NAMED: usize = 5;

/// Secrets that nodes share, as tunnels need them.
#[derive(Clone, PartialEq, Eq)]
pub struct Shared {
    /// The present identifier and secret.
    pub current: Credentials,
    /// The secret of before, while not all have changed, and the nodes of KubeSpan that have.
    pub previous: Option<([u8; 32], BTreeSet<String>)>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("current", &self.current).finish_non_exhaustive()
    }
}

impl Shared {
    /// Secrets as the file has them, until the Secret is read.
    pub fn saved(file: &StateFile) -> Option<Self> {
        let InUse { secrets, until } =
            InUse::resumed(file.saved_secrets()?, Timestamp::now(), Instant::now());
        let is_used = until.is_some_and(|until| until > Instant::now());
        let previous = secrets.previous.filter(|_| is_used);
        let previous = previous.map(|previous| (previous.credentials.secret, BTreeSet::new()));
        Some(Self { current: secrets.current, previous })
    }

    /// The preshared key of a tunnel to nodes of KubeSpan that have one key.
    pub fn preshared_key(&self, members: &[&Member]) -> PresharedKey {
        let secret = match &self.previous {
            Some((previous, changed)) if !members.iter().any(|member| changed.contains(&member.name)) => {
                *previous
            }
            _ => self.current.secret,
        };
        PresharedKey(secret)
    }
}

/// The secrets that this node uses.
#[derive(Debug, Clone)]
pub(super) struct InUse {
    pub(super) secrets: Secrets,
    /// Time until which the secret of before is used; `None` while there is none.
    until: Option<Instant>,
}

impl InUse {
    /// Secrets that an earlier run used, or that were read first. By a clock that was set back the old one counts as just changed.
    pub(super) fn resumed(secrets: Secrets, now: Timestamp, at: Instant) -> Self {
        let left = secrets.previous.as_ref().map(|it| LONGEST.saturating_sub(age(it.changed, now)));
        Self { until: left.and_then(|left| at.checked_add(left)), secrets }
    }

    /// Secrets in use after the Secret was read, and the credentials that are to be left at once: those of before the ones before.
    pub(super) fn changed(
        self,
        read: Credentials,
        now: Timestamp,
        at: Instant,
    ) -> (Self, Option<Credentials>) {
        let Secrets { current, previous } = self.secrets;
        if current == read {
            return (Self { secrets: Secrets { current, previous }, until: self.until }, None);
        }
        let left = previous.map(|previous| previous.credentials).filter(|older| *older != read);
        let previous = Some(Previous { credentials: current, changed: now });
        (Self::resumed(Secrets { current: read, previous }, now, at), left)
    }

    /// Whether the secret of before has been used as long as it may be.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now >= until)
    }

    /// Problem that names members that have not changed; `None` unless it takes long.
    pub(super) fn problem(&self, unchanged: &[&str], now: Instant) -> Option<SourceProblem> {
        let left = self.until?.saturating_duration_since(now);
        let is_late = LONGEST.saturating_sub(left) >= PATIENCE && !unchanged.is_empty();
        is_late.then(|| SourceProblem::ClusterSecretChanging { members: some_of(unchanged, MAX_NAMED) })
    }

    /// Ends the use of the secret of before, and returns it.
    pub(super) fn leave_previous(&mut self) -> Option<Credentials> {
        self.until = None;
        self.secrets.previous.take().map(|previous| previous.credentials)
    }
}

/// Members of which services tell during a change of the secret.
pub(super) struct Change<'a> {
    /// The members that services tell of under the old secret.
    pub(super) previous: BTreeSet<&'a str>,
    /// The members that they tell of under the new one.
    pub(super) current: BTreeSet<&'a str>,
    /// Whether the services have told what they know under either, and have this node under the new one.
    pub(super) has_answered: bool,
    /// Whether the old one has been used as long as it may be.
    pub(super) is_over: bool,
}

impl<'a> Change<'a> {
    /// Members that have only the old secret.
    pub(super) fn unchanged(&self) -> Vec<&'a str> {
        self.previous.difference(&self.current).copied().collect()
    }

    /// Whether the old secret is to be left.
    pub(super) fn is_done(&self) -> bool {
        self.is_over || (self.has_answered && self.previous.is_subset(&self.current))
    }
}
#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    fn credentials(byte: u8) -> Credentials {
        Credentials { cluster_id: "c".to_owned(), secret: [byte; 32] }
    }

    fn alone(byte: u8, now: Timestamp, at: Instant) -> InUse {
        InUse::resumed(Secrets { current: credentials(byte), previous: None }, now, at)
    }

    fn bytes(in_use: &InUse) -> (u8, Option<u8>) {
        let previous = in_use.secrets.previous.as_ref();
        (in_use.secrets.current.secret[0], previous.map(|it| it.credentials.secret[0]))
    }

    #[test]
    fn the_old_secret_is_left_when_all_that_have_it_have_the_new_one() {
        let done = |previous: &[&'static str], current: &[&'static str], has_answered, is_over| {
            let (previous, current) = (previous.iter().copied().collect(), current.iter().copied().collect());
            Change { previous, current, has_answered, is_over }.is_done()
        };
        assert!(done(&["a", "b"], &["a", "b", "c"], true, false));
        assert!(!done(&["a", "b"], &["a"], true, false), "b has only the old one");
        assert!(!done(&["a"], &["a"], false, false), "a service may know of more");
        assert!(!done(&[], &[], false, false), "nothing is known after a start");
        assert!(done(&[], &[], true, false), "it is alone");
        assert!(done(&["a"], &[], false, true), "one that was stolen must not stay valid");
    }

    #[test]
    fn of_three_secrets_the_oldest_is_left_at_once() {
        let (now, at) = (Timestamp::now(), Instant::now());
        let (same, left) = alone(1, now, at).changed(credentials(1), now, at);
        assert_eq!((bytes(&same), left, same.is_over(at + 2 * LONGEST)), ((1, None), None, false));
        let (second, left) = same.changed(credentials(2), now, at);
        assert_eq!((bytes(&second), left), ((2, Some(1)), None));
        let (third, left) = second.clone().changed(credentials(3), now, at);
        assert_eq!((bytes(&third), left), ((3, Some(2)), Some(credentials(1))));
        let (back, left) = second.changed(credentials(1), now, at);
        assert_eq!((bytes(&back), left), ((1, Some(2)), None), "both are still in use");
    }

    #[test]
    fn the_old_secret_is_used_for_an_hour_also_over_restarts_and_whatever_the_clock_says() {
        let (now, at) = (Timestamp::now(), Instant::now());
        let (in_use, _) = alone(1, now, at).changed(credentials(2), now, at);
        assert!(!in_use.is_over(at + LONGEST - Duration::from_secs(1)) && in_use.is_over(at + LONGEST));
        let restarted = |later: SignedDuration| InUse::resumed(in_use.secrets.clone(), now + later, at);
        let after_half = restarted(SignedDuration::from_mins(30));
        assert!(!after_half.is_over(at) && after_half.is_over(at + LONGEST / 2));
        assert!(restarted(SignedDuration::from_hours(2)).is_over(at));
        let set_back = restarted(-SignedDuration::from_hours(24));
        assert!(!set_back.is_over(at) && set_back.is_over(at + LONGEST));
    }

    #[test]
    fn members_that_take_long_are_named() {
        let (now, at) = (Timestamp::now(), Instant::now());
        let (mut in_use, _) = alone(1, now, at).changed(credentials(2), now, at);
        let names = ["a", "b", "c", "d", "e", "f", "g"];
        assert_eq!(in_use.problem(&names, at), None, "nodes read their Secret once a minute");
        let problem = in_use.problem(&names, at + PATIENCE).unwrap();
        assert_eq!(problem.reason(), "ClusterSecretChanging");
        assert!(problem.to_string().contains("a, b, c, d, e and 2 more;"), "{problem}");
        assert_eq!(in_use.problem(&[], at + PATIENCE), None);
        assert_eq!(in_use.leave_previous(), Some(credentials(1)));
        assert_eq!(in_use.problem(&names, at + PATIENCE), None);
    }
}
