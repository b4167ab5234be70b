//! Rules and sets of the tables of other programs, each chain read once in a look, and each map of verdicts.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::MAX_RULES;
use super::packet::Sets;
use super::steps::NatRule;
use crate::Result;
use crate::nftables::foreign::TableFamily;
use crate::nftables::foreign::routing::{Bounded, RoutingChain};
use crate::nftables::foreign::walk::Verdict;

/// Most verdicts of a map that are looked at where the packet's key is not known.
const MAX_VERDICTS: usize = 256;

/// Rules and sets of tables.
pub(super) trait Source: Sets {
    /// Turns to the table of this chain.
    fn enter(&mut self, base: &RoutingChain);

    /// Rules of a chain of that table, in order.
    fn rules(&mut self, chain: &str) -> Result<Rc<Bounded<NatRule>>>;
}

/// Requests about the table of a base chain. Items beyond `most` are counted, and not kept.
pub(super) trait Requests {
    /// Rules of a chain, in order.
    fn rules(&mut self, of: &RoutingChain, chain: &str, most: usize) -> Result<Bounded<NatRule>>;

    /// As [`Sets::key_length`].
    fn key_length(&mut self, of: &RoutingChain, set: &str) -> Result<Option<usize>>;

    /// As [`Sets::element`].
    fn element(&mut self, of: &RoutingChain, set: &str, key: &[u8]) -> Result<Option<Verdict>>;

    /// Verdicts of all elements of a map.
    fn verdicts(&mut self, of: &RoutingChain, set: &str, most: usize) -> Result<Bounded<Verdict>>;
}

/// Family and name of a table, and name of a chain or set in it.
type Name = (TableFamily, String, String);

/// Answers of one look, which are kept within bounds, and their cost.
pub(super) struct Look<R> {
    requests: R,
    base: RoutingChain,
    chains: BTreeMap<Name, Rc<Bounded<NatRule>>>,
    key_lengths: BTreeMap<Name, Option<usize>>,
    verdicts: BTreeMap<Name, Vec<Verdict>>,
    /// Number of rules and verdicts that may yet be kept.
    left: usize,
    /// Number of rules and elements that were read, and of requests about sets.
    pub(super) read: usize,
    /// Number of rules that were read and not kept.
    pub(super) left_out: usize,
}

impl<R> Look<R> {
    pub(super) const fn new(requests: R, base: RoutingChain) -> Self {
        Self {
            requests,
            base,
            chains: BTreeMap::new(),
            key_lengths: BTreeMap::new(),
            verdicts: BTreeMap::new(),
            left: MAX_RULES,
            read: 0,
            left_out: 0,
        }
    }

    fn name(&self, of: &str) -> Name {
        (self.base.family, self.base.table.clone(), of.to_owned())
    }

    fn count<T>(&mut self, items: &Bounded<T>) {
        self.left = self.left.saturating_sub(items.kept.len());
        self.read = self.read.saturating_add(items.read());
    }

    fn count_request(&mut self) {
        self.read = self.read.saturating_add(1);
    }
}

impl<R: Requests> Source for Look<R> {
    fn enter(&mut self, base: &RoutingChain) {
        self.base = base.clone();
    }

    fn rules(&mut self, chain: &str) -> Result<Rc<Bounded<NatRule>>> {
        let name = self.name(chain);
        if let Some(rules) = self.chains.get(&name) {
            return Ok(Rc::clone(rules));
        }
        let rules = Rc::new(self.requests.rules(&self.base, chain, self.left)?);
        self.count(&rules);
        self.left_out = self.left_out.saturating_add(rules.left_out);
        self.chains.insert(name, Rc::clone(&rules));
        Ok(rules)
    }
}

impl<R: Requests> Sets for Look<R> {
    fn key_length(&mut self, set: &str) -> Result<Option<usize>> {
        let name = self.name(set);
        if let Some(length) = self.key_lengths.get(&name) {
            return Ok(*length);
        }
        let length = self.requests.key_length(&self.base, set)?;
        self.count_request();
        self.key_lengths.insert(name, length);
        Ok(length)
    }

    fn element(&mut self, set: &str, key: &[u8]) -> Result<Option<Verdict>> {
        self.count_request();
        self.requests.element(&self.base, set, key)
    }

    fn verdicts(&mut self, set: &str) -> Result<Vec<Verdict>> {
        let name = self.name(set);
        if let Some(verdicts) = self.verdicts.get(&name) {
            return Ok(verdicts.clone());
        }
        let found = self.requests.verdicts(&self.base, set, self.left.min(MAX_VERDICTS))?;
        self.count_request();
        self.count(&found);
        self.verdicts.insert(name, found.kept.clone());
        Ok(found.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nftables::foreign::routing::RoutingHook;

    /// Items of each chain and map.
    const MANY: usize = 100_000;

    /// Tables with as many rules in each chain, and elements in each map, as no memory should hold.
    #[derive(Default)]
    struct Large {
        /// Number of rules that were parsed.
        parsed: usize,
        /// Requests about sets, in order.
        asked: Vec<String>,
    }

    impl Requests for Large {
        fn rules(&mut self, _: &RoutingChain, _: &str, most: usize) -> Result<Bounded<NatRule>> {
            let mut rules = Bounded::new(most);
            for _ in 0..MANY {
                let parse = || {
                    self.parsed += 1;
                    Ok(Some(NatRule::default()))
                };
                rules.add(parse).unwrap();
            }
            Ok(rules)
        }

        fn key_length(&mut self, of: &RoutingChain, set: &str) -> Result<Option<usize>> {
            self.asked.push(format!("length of {} {set}", of.table));
            Ok(Some(2))
        }

        fn element(&mut self, of: &RoutingChain, set: &str, _: &[u8]) -> Result<Option<Verdict>> {
            self.asked.push(format!("element of {} {set}", of.table));
            Ok(None)
        }

        fn verdicts(&mut self, of: &RoutingChain, set: &str, most: usize) -> Result<Bounded<Verdict>> {
            self.asked.push(format!("verdicts of {} {set}", of.table));
            let mut verdicts = Bounded::new(most);
            (0..MANY).try_for_each(|_| verdicts.add(|| Ok(Some(Verdict::Accept)))).unwrap();
            Ok(verdicts)
        }
    }

    fn base(table: &str) -> RoutingChain {
        let (family, hook) = (TableFamily::Ipv4, RoutingHook::Prerouting);
        let (table, name) = (table.to_owned(), "PREROUTING".to_owned());
        RoutingChain { family, table, name, hook, priority: -100, reroutes: false }
    }

    #[test]
    fn of_a_hundred_thousand_rules_the_first_are_kept_and_all_are_counted() {
        let mut look = Look::new(Large::default(), base("nat"));
        let first = look.rules("first").unwrap();
        assert_eq!((first.kept.len(), first.left_out), (MAX_RULES, MANY - MAX_RULES));
        assert_eq!(look.rules("second").unwrap().kept.len(), 0, "the bound is one for all chains");
        assert_eq!(look.rules("first").unwrap(), first);
        assert_eq!((look.read, look.left_out), (2 * MANY, 2 * MANY - MAX_RULES), "each is read once");
        assert_eq!(look.requests.parsed, MAX_RULES);
    }

    #[test]
    fn sets_are_asked_for_what_is_not_known_and_all_that_is_read_counts() {
        let mut look = Look::new(Large::default(), base("nat"));
        for _ in 0..3 {
            assert_eq!(look.key_length("ports").unwrap(), Some(2));
            assert_eq!(look.verdicts("random").unwrap(), vec![Verdict::Accept; MAX_VERDICTS]);
        }
        assert_eq!(look.requests.asked, ["length of nat ports", "verdicts of nat random"]);
        assert_eq!((look.read, look.left), (1 + 1 + MANY, MAX_RULES - MAX_VERDICTS));
        look.element("ports", &[0, 53]).unwrap();
        look.element("ports", &[0, 54]).unwrap();
        assert_eq!((look.read, look.left_out), (4 + MANY, 0));
        look.enter(&base("other"));
        look.key_length("ports").unwrap();
        assert_eq!(look.requests.asked.last().unwrap(), "length of other ports");
    }

    #[test]
    fn verdicts_of_many_maps_are_kept_within_the_same_bound() {
        let mut look = Look::new(Large::default(), base("nat"));
        let kept = (0..200).map(|map| look.verdicts(&format!("map{map}")).unwrap().len()).sum::<usize>();
        assert_eq!((kept, look.left), (MAX_RULES, 0));
    }
}
