//! Problems that are told only once they have lasted: while firewalld is loaded anew, a table that it makes for that time drops everything.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::ForwardingProblem;

/// Least time between the first look that finds a chain to drop packets and one after which it is told.
const PATIENCE: Duration = Duration::from_secs(3);

/// Chains that dropped packets at the last look, each with the time of the first look that has found it so.
#[derive(Debug, Default)]
pub(super) struct Lasting(BTreeMap<String, Instant>);

impl Lasting {
    /// Problems to tell, of those that a look at this time has found.
    pub(super) fn told(&mut self, found: Vec<ForwardingProblem>, now: Instant) -> Vec<ForwardingProblem> {
        let since = |chain: &str| self.0.get(chain).copied().unwrap_or(now);
        let chains = found.iter().filter_map(ForwardingProblem::chain);
        self.0 = chains.map(|chain| (chain.to_owned(), since(chain))).collect();
        let has_lasted = |chain: &str| {
            self.0.get(chain).is_some_and(|since| now.saturating_duration_since(*since) >= PATIENCE)
        };
        found.into_iter().filter(|problem| problem.chain().is_none_or(has_lasted)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dropped(chain: &str) -> ForwardingProblem {
        ForwardingProblem::Dropped { chain: chain.to_owned(), command: String::new(), refusal: None }
    }

    fn rejected(chain: &str) -> ForwardingProblem {
        ForwardingProblem::Rejected { chain: chain.to_owned(), command: String::new() }
    }

    fn unreadable() -> ForwardingProblem {
        ForwardingProblem::Unreadable { reason: String::new() }
    }

    #[test]
    fn a_chain_is_told_once_two_looks_three_seconds_apart_have_found_it_to_drop() {
        let start = Instant::now();
        let mut lasting = Lasting::default();
        let mut look = |found: Vec<ForwardingProblem>, millis| {
            lasting.told(found, start + Duration::from_millis(millis))
        };
        assert_eq!(look(vec![dropped("a")], 0), []);
        assert_eq!(look(vec![dropped("a")], 2_999), []);
        // One that comes later waits for itself alone.
        assert_eq!(look(vec![dropped("a"), rejected("b")], 3_000), [dropped("a")]);
        assert_eq!(look(vec![dropped("a"), rejected("b")], 6_000), [dropped("a"), rejected("b")]);
        let refused = ForwardingProblem::Dropped {
            chain: "a".to_owned(),
            command: String::new(),
            refusal: Some("busy".to_owned()),
        };
        assert_eq!(look(vec![refused.clone()], 6_001), [refused], "it is the same chain");
    }

    #[test]
    fn a_table_that_is_there_for_each_reload_is_not_told() {
        let start = Instant::now();
        let mut lasting = Lasting::default();
        for reload in 0..3 {
            let at = start + Duration::from_secs(60 * reload);
            assert_eq!(lasting.told(vec![dropped("a")], at), []);
            assert_eq!(lasting.told(vec![dropped("a")], at + Duration::from_secs(2)), []);
            assert_eq!(lasting.told(Vec::new(), at + Duration::from_secs(4)), []);
        }
    }

    #[test]
    fn what_is_no_chain_that_drops_is_told_at_once() {
        let found = vec![dropped("a"), unreadable()];
        assert_eq!(Lasting::default().told(found, Instant::now()), [unreadable()]);
    }
}
