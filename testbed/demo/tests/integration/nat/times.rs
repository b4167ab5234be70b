//! Times of pairs of nodes until they reached each other.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use fairlead_demo::World;
use fairlead_demo::nat_matrix::{Place, way};
use fairlead_demo::times::{Course, PairTimes, courses};

/// The times of all pairs.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// Time of each pair until both ends had a session.
    session: Vec<Duration>,
    /// Time until both ends used the direct path, of pairs that have one.
    direct: Vec<Duration>,
}

impl Times {
    /// Reads the logs of all nodes.
    pub(crate) fn read(world: &World, places: &[Place]) -> Result<Self> {
        let mut all: BTreeMap<&str, BTreeMap<String, Course>> = BTreeMap::new();
        for node in &world.nodes {
            all.insert(&node.name, courses(node)?);
        }
        let course = |from: &Place, to: &Place| all.get(from.node)?.get(to.node).copied();
        let mut times = Self::default();
        for (index, one) in places.iter().enumerate() {
            for other in places.get(index + 1..).unwrap_or_default() {
                let both = course(one, other).zip(course(other, one));
                let (here, there) = both.with_context(|| format!("{} {}", one.node, other.node))?;
                let pair = PairTimes::of(here, there);
                times.session.extend(pair.session);
                times.direct.extend(pair.direct.filter(|_| way(one, other).is_direct()));
            }
        }
        Ok(times)
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, times) in [("session", &self.session), ("direct path", &self.direct)] {
            let mut sorted = times.clone();
            sorted.sort_unstable();
            let share = |percent: usize| {
                let rank = (sorted.len() * percent).div_ceil(100).max(1) - 1;
                sorted.get(rank).copied().unwrap_or_default()
            };
            let (half, most, all) = (share(50), share(99), share(100));
            writeln!(
                f,
                "{what}: p50 {half:.2?}, p99 {most:.2?}, longest {all:.2?} of {} pairs",
                sorted.len()
            )?;
        }
        Ok(())
    }
}
