//! What a crate must not link, be it through others of the workspace.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::list::Violation;

/// Crates, and what must not be among what they link: commands of operators need neither the kernel nor a tunnel.
pub(super) const APART: &[(&str, &[&str])] =
    &[("crates/cli", &["aya", "crates/netlink", "crates/node", "crates/tunnel"])];

/// Violations by normal and build dependencies, by directory; crates of others are there by name.
pub(super) fn violations(
    apart: &[(&str, &[&str])],
    dependencies: &BTreeMap<String, BTreeSet<String>>,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for (user, forbidden) in apart {
        let ways = ways(user, dependencies);
        let linked = forbidden.iter().filter_map(|used| ways.get(*used));
        found.extend(linked.map(|way| Violation {
            law: "apart",
            subject: way.join(" -> "),
            figure: 1,
            advice: "the first must not link the last; move what both need down".to_owned(),
        }));
    }
    found
}

/// Shortest ways from a crate to all that it links, by the last of each.
fn ways<'a>(
    user: &'a str,
    dependencies: &'a BTreeMap<String, BTreeSet<String>>,
) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut ways = BTreeMap::from([(user, vec![user])]);
    let mut next = VecDeque::from([user]);
    while let Some(last) = next.pop_front() {
        let way = ways.get(last).cloned().unwrap_or_default();
        for used in dependencies.get(last).into_iter().flatten() {
            if !ways.contains_key(used.as_str()) {
                ways.insert(used, way.iter().copied().chain([used.as_str()]).collect());
                next.push_back(used);
            }
        }
    }
    ways
}
