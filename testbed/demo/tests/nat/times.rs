//! How long pairs of nodes took, from what the nodes log: since both knew each other, until there was a session, and until it
//! used the path it stays on.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use fairlead_demo::World;
use fairlead_demo::nat_matrix::{Place, way};
use jiff::Timestamp;
use serde_json::Value;

/// The times of all pairs.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// Until both ends had a session.
    session: Vec<Duration>,
    /// Until both ends used the direct path, of pairs that have one.
    direct: Vec<Duration>,
}

/// What one node logged of one peer.
#[derive(Debug, Clone, Copy)]
struct Course {
    known: Timestamp,
    up: Option<Timestamp>,
    /// When it last chose a direct path.
    direct: Option<Timestamp>,
}

impl Times {
    /// Reads the logs of all nodes.
    pub(crate) fn read(world: &World, places: &[Place]) -> Result<Self> {
        let mut courses = BTreeMap::new();
        for node in &world.nodes {
            let status = node.status()?;
            let peers = status["peers"].as_array().context("no peers")?;
            let names: BTreeMap<&str, &str> = peers
                .iter()
                .filter_map(|peer| Some((peer["publicKey"].as_str()?, peer["name"].as_str()?)))
                .collect();
            for line in std::fs::read_to_string(node.log())?.lines() {
                let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
                let Some(peer) = event["peer"].as_str().and_then(|key| names.get(key)) else { continue };
                let at: Timestamp = event["timestamp"].as_str().context("no time")?.parse()?;
                let new = || Course { known: at, up: None, direct: None };
                let course = courses.entry((node.name.clone(), (*peer).to_owned())).or_insert_with(new);
                course.add(&event, at);
            }
        }
        let course =
            |from: &Place, to: &Place| courses.get(&(from.node.to_owned(), to.node.to_owned())).copied();
        let mut times = Self::default();
        for (index, one) in places.iter().enumerate() {
            for other in places.get(index + 1..).unwrap_or_default() {
                let both = course(one, other).zip(course(other, one));
                let (here, there) = both.with_context(|| format!("{} {}", one.node, other.node))?;
                times.add(here, there, way(one, other).is_direct());
            }
        }
        Ok(times)
    }

    fn add(&mut self, here: Course, there: Course, is_direct: bool) {
        let known = here.known.max(there.known);
        let since = |at: Timestamp| Duration::try_from(at.duration_since(known)).unwrap_or_default();
        self.session.extend(here.up.zip(there.up).map(|(here, there)| since(here.max(there))));
        // The end that does not choose follows the first packet of the other one.
        let direct = here.direct.max(there.direct).filter(|_| is_direct);
        self.direct.extend(direct.map(since));
    }
}

impl Course {
    fn add(&mut self, event: &Value, at: Timestamp) {
        if event["to"] == "up" {
            self.up.get_or_insert(at);
        }
        let has_answered =
            ["BetterPath", "PathFailed", "ProbeAnswered"].map(Value::from).contains(&event["reason"]);
        if has_answered && event["source"] != "relay" {
            self.direct = Some(at);
        }
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
