//! No ring of more than three files in a crate: of files that use one another, none can be understood or moved alone.

use std::collections::{BTreeMap, BTreeSet};

use super::list::Violation;
use super::modules::Modules;
use super::sources::Sources;

const LIMIT: usize = 3;

/// Rings of more than three files of one crate.
pub(super) fn rings(sources: &Sources) -> Vec<BTreeSet<String>> {
    let modules = Modules::of(sources);
    let arrows = modules.arrows();
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        arrows.keys().map(|file| (*file, reach(&arrows, file))).collect();
    let mut rings = Vec::new();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for (file, reaches) in &reached {
        let is_back = |other: &&str| reached.get(*other).is_some_and(|reaches| reaches.contains(file));
        let ring: BTreeSet<&str> = reaches.iter().copied().filter(is_back).collect();
        if ring.len() > LIMIT && seen.insert(*file) {
            seen.extend(&ring);
            rings.push(ring.into_iter().map(str::to_owned).collect());
        }
    }
    rings
}

/// The files that arrows lead to from a file; itself only if it is in a ring.
fn reach<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from];
    while let Some(file) = next.pop() {
        for target in arrows.get(file).into_iter().flatten() {
            if reached.insert(*target) {
                next.push(target);
            }
        }
    }
    reached
}

/// One violation per crate, with the number of files in its rings: a ring that is split makes it smaller.
pub(super) fn violations(crates: &BTreeMap<String, Sources>) -> Vec<Violation> {
    let violation = |(directory, sources): (&String, &Sources)| {
        let rings = rings(sources);
        let list =
            |ring: &BTreeSet<String>| ring.iter().map(String::as_str).collect::<Vec<_>>().join("\n    ");
        let lists: Vec<String> = rings.iter().map(list).collect();
        (!rings.is_empty()).then(|| Violation {
            law: "rings",
            subject: directory.clone(),
            figure: rings.iter().map(BTreeSet::len).sum(),
            advice: format!(
                "files that use one another, at most {LIMIT} in a ring: move what several need down\n    {}",
                lists.join("\n  and\n    ")
            ),
        })
    };
    crates.iter().filter_map(violation).collect()
}
