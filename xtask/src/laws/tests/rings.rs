//! No ring of more than three files in a crate: of files that use one another, none can be understood or moved alone.

use std::collections::{BTreeMap, BTreeSet};

use super::list::Violation;
use super::modules::{Arrows, Modules};
use super::sources::Sources;

const LIMIT: usize = 3;

/// Rings of more than three files of one crate.
pub(super) fn rings(sources: &Sources) -> Vec<BTreeSet<String>> {
    let modules = Modules::of(sources);
    find(&modules.arrows())
}

fn find(arrows: &Arrows<'_>) -> Vec<BTreeSet<String>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        arrows.keys().map(|file| (*file, reach(arrows, file))).collect();
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
fn reach<'a>(arrows: &Arrows<'a>, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from];
    while let Some(file) = next.pop() {
        for target in arrows.get(file).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(*target) {
                next.push(target);
            }
        }
    }
    reached
}

/// The arrows of a ring, one a line, with what is used.
fn list(ring: &BTreeSet<String>, arrows: &Arrows<'_>) -> String {
    let mut lines = String::new();
    for file in ring {
        let targets = arrows.get(file.as_str()).into_iter().flatten();
        for (target, names) in targets.filter(|(target, _)| ring.contains(**target)) {
            let names: Vec<&str> = names.iter().copied().collect();
            lines.push_str(&format!("\n    {file} -> {target}: {}", names.join(", ")));
        }
    }
    lines
}

/// One violation per crate, with the number of files in its rings: a ring that is split makes it smaller.
pub(super) fn violations(crates: &BTreeMap<String, Sources>) -> Vec<Violation> {
    let violation = |(directory, sources): (&String, &Sources)| {
        let modules = Modules::of(sources);
        let arrows = modules.arrows();
        let rings = find(&arrows);
        let lists: Vec<String> = rings.iter().map(|ring| list(ring, &arrows)).collect();
        (!rings.is_empty()).then(|| Violation {
            law: "rings",
            subject: directory.clone(),
            figure: rings.iter().map(BTreeSet::len).sum(),
            advice: format!(
                "files that use one another, at most {LIMIT} in a ring: move what several need down{}",
                lists.join("\n  and")
            ),
        })
    };
    crates.iter().filter_map(violation).collect()
}
