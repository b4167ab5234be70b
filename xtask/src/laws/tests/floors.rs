//! No crate uses one beside or above it: the table of ARCHITECTURE.md is the data.

use std::collections::{BTreeMap, BTreeSet};

use super::list::Violation;

/// Width of the column with the names of floors.
const COLUMN: usize = 12;

/// Place of a crate in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// A floor of the house, counted from the top.
    Floor(usize),
    /// Beside the house: test beds and tools, which may use all of it and one another.
    Beside,
}

/// The first fenced block of ARCHITECTURE.md. Its first paragraph is the house: a line that begins with a word begins a floor. The rest
/// stands beside it. A crate is the directory at the beginning of the second column.
pub(super) fn parse(architecture: &str) -> BTreeMap<String, Place> {
    let block = architecture.lines().skip_while(|line| !line.starts_with("```")).skip(1);
    let mut places = BTreeMap::new();
    let (mut floor, mut is_house) = (0, true);
    for line in block.take_while(|line| !line.starts_with("```")) {
        is_house &= !line.is_empty();
        let Some((name, rest)) = line.split_at_checked(COLUMN) else { continue };
        floor += usize::from(!name.trim().is_empty());
        let directory = rest.split(' ').next().unwrap_or_default();
        let is_crate = directory.starts_with("crates/") || directory.starts_with("testbed/");
        if is_crate || matches!(directory, "fuzz" | "xtask") {
            places.insert(directory.to_owned(), if is_house { Place::Floor(floor) } else { Place::Beside });
        }
    }
    places
}

/// Violations by the table, and by normal and build dependencies of crates, by directory.
pub(super) fn violations(
    places: &BTreeMap<String, Place>,
    dependencies: &BTreeMap<String, BTreeSet<String>>,
) -> Vec<Violation> {
    let violation = |subject: String, advice: &str| Violation {
        law: "floors",
        subject,
        figure: 1,
        advice: format!("{advice} (the table of ARCHITECTURE.md)"),
    };
    let unplaced = dependencies.keys().filter(|name| !places.contains_key(*name));
    let unplaced = unplaced.map(|name| violation(name.clone(), "give the crate a floor"));
    let gone = places.keys().filter(|name| !dependencies.contains_key(*name));
    let gone = gone.map(|name| violation(name.clone(), "there is no such crate: take it out"));
    let arrows = dependencies.iter().flat_map(|(user, used)| used.iter().map(move |used| (user, used)));
    let upwards = arrows.filter(|(user, used)| match (places.get(*user), places.get(*used)) {
        (Some(Place::Floor(user)), Some(Place::Floor(used))) => used <= user,
        (Some(Place::Floor(_)), Some(Place::Beside)) => true,
        (Some(Place::Beside) | None, _) | (_, None) => false,
    });
    let upwards = upwards.map(|(user, used)| {
        violation(
            format!("{user} -> {used}"),
            "a crate uses only those below its floor; move what both need down",
        )
    });
    unplaced.chain(gone).chain(upwards).collect()
}
