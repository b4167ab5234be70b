//! The routes of a client pod: which Egress has which prefix.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_address::IpFamily;
use fairlead_api::client_routing::{ClientRoute, Target};
use fairlead_api::names::TABLE_EGRESS_NARROW;
use ipnet::IpNet;

use super::problem::Problem;
use super::rules::table_of;
use crate::EgressName;
use crate::destinations::Destinations;

/// Claim of one Egress to routes of the pod.
#[derive(Debug, Clone)]
pub(super) struct Claim<'a> {
    /// The Egress; `None` if its gateways cannot be used.
    pub(super) egress: Option<&'a EgressName>,
    pub(super) target: Target,
    pub(super) destinations: &'a Destinations,
    pub(super) originating_only: bool,
}

/// The destinations of all Egresses, of one family.
#[derive(Debug, Default)]
pub(super) struct Claims<'a> {
    claims: Vec<Claim<'a>>,
    /// By table and destination: the claims, those of Egresses that can be used first.
    tables: BTreeMap<u32, BTreeMap<IpNet, Vec<usize>>>,
    excluded: BTreeSet<IpNet>,
}

impl<'a> Claims<'a> {
    /// Adds the destinations of an Egress; those whose gateways cannot be used come last.
    pub(super) fn add(&mut self, family: IpFamily, claim: Claim<'a>) {
        let is_of_family = |prefix: &IpNet| IpFamily::of(prefix.addr()) == family;
        let index = self.claims.len();
        for prefix in claim.destinations.used().filter(is_of_family) {
            let table = self.tables.entry(table_of(prefix)).or_default();
            table.entry(prefix).or_default().push(index);
        }
        self.excluded.extend(claim.destinations.excluded.iter().copied().filter(is_of_family));
        self.claims.push(claim);
    }

    /// Prefixes that are destinations of several Egresses which can be used.
    pub(super) fn same_prefix(&self) -> Vec<Problem> {
        let mut found = Vec::new();
        for (prefix, indexes) in self.tables.values().flatten() {
            let names: Vec<&EgressName> =
                indexes.iter().filter_map(|index| self.claims.get(*index)?.egress).collect();
            for pair in names.windows(2) {
                if let [first, second] = pair {
                    let egresses = [(*first).clone(), (*second).clone()];
                    found.push(Problem::SamePrefix { prefix: *prefix, egresses });
                }
            }
        }
        found
    }

    /// The destinations with an address that their Egress does not exclude, with their tables and Egresses.
    pub(super) fn with(&self, address: IpAddr) -> impl Iterator<Item = (u32, IpNet, &'a EgressName)> {
        let host = IpNet::from(address);
        let all = self.tables.iter().flat_map(move |(table, prefixes)| {
            let matching = prefixes.iter().filter(move |(prefix, _)| prefix.contains(&address));
            matching
                .flat_map(move |(prefix, indexes)| indexes.iter().map(move |index| (*table, *prefix, *index)))
        });
        all.filter_map(move |(table, prefix, index)| {
            let claim = self.claims.get(index).filter(|claim| !claim.destinations.excludes(&host))?;
            Some((table, prefix, claim.egress?))
        })
    }

    /// One route for each destination, and for each excluded prefix inside of one: to what has the longest destination around it
    /// and does not exclude it. Of all prefixes here that have an address, the longest is inside of the others, so what is true of
    /// it is true of the address. Ranges of the cluster, which do not overlap each other, are left to the rules, with all that is inside of them;
    /// of the second table the rules before it keep them.
    pub(super) fn routes(&self, in_cluster: &BTreeSet<IpNet>) -> Vec<ClientRoute> {
        let of_rules = BTreeSet::new();
        let mut routes = Vec::new();
        for (table, prefixes) in &self.tables {
            let lengths: BTreeSet<u8> = prefixes.keys().map(IpNet::prefix_len).collect();
            let ranges = if *table == TABLE_EGRESS_NARROW { in_cluster } else { &of_rules };
            let lengths_of_ranges: BTreeSet<u8> = ranges.iter().map(IpNet::prefix_len).collect();
            let points: BTreeSet<IpNet> =
                prefixes.keys().chain(&self.excluded).chain(ranges).copied().collect();
            for destination in points {
                let indexes: Vec<&Vec<usize>> =
                    around(destination, &lengths).filter_map(|prefix| prefixes.get(&prefix)).collect();
                let range = around(destination, &lengths_of_ranges).find(|prefix| ranges.contains(prefix));
                if indexes.is_empty() || range.is_some_and(|range| range != destination) {
                    continue;
                }
                let (target, originating_only) = match range {
                    Some(_) => (Target::InCluster, false),
                    None => self.target(destination, &indexes),
                };
                routes.push(ClientRoute { table: *table, destination, target, originating_only });
            }
        }
        routes.sort();
        routes
    }

    /// Target of packets to a prefix, by the claims on what is around it, the longest first, and whether it is only for connections of the pod.
    fn target(&self, prefix: IpNet, around: &[&Vec<usize>]) -> (Target, bool) {
        for indexes in around {
            let claims = indexes.iter().filter_map(|index| self.claims.get(*index));
            let mut claims = claims.filter(|claim| !claim.destinations.excludes(&prefix));
            let Some(first) = claims.next() else { continue };
            // Of several that are refused, one without the option is enough for replies to be refused, too.
            let is_refused = first.target == Target::Refused;
            let originating_only =
                first.originating_only && (!is_refused || claims.all(|claim| claim.originating_only));
            return (first.target.clone(), originating_only);
        }
        (Target::Excluded, false)
    }
}

/// Prefixes of these lengths that have all of a prefix, the longest first.
pub(super) fn around(prefix: IpNet, lengths: &BTreeSet<u8>) -> impl Iterator<Item = IpNet> {
    let lengths = lengths.range(..=prefix.prefix_len()).rev();
    lengths.filter_map(move |length| Some(IpNet::new(prefix.addr(), *length).ok()?.trunc()))
}
