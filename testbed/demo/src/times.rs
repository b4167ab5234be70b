//! Times that two nodes took to reach each other, from the logs of both: since both knew each other, until there was a session, and until
//! it used the path it stays on.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::node::Node;

/// Log entries of one node about one peer, as times.
#[derive(Debug, Clone, Copy)]
pub struct Course {
    /// When it first knew the peer.
    pub known: Timestamp,
    /// When it first had a session.
    pub up: Option<Timestamp>,
    /// When it last chose a direct path.
    pub direct: Option<Timestamp>,
}

/// The times of two nodes.
#[derive(Debug, Clone, Copy)]
pub struct PairTimes {
    /// When both knew each other.
    pub known: Timestamp,
    /// Time until both had a session.
    pub session: Option<Duration>,
    /// Time until both used the direct path.
    pub direct: Option<Duration>,
}

/// Courses of all peers that the current program of a node has logged, by the peer's name.
///
/// # Errors
/// The node program does not run, or its log cannot be read.
pub fn courses(node: &Node) -> Result<BTreeMap<String, Course>> {
    read(&node.status()?, &std::fs::read_to_string(node.log())?)
}

/// The same from the status and the log of a node program, wherever it runs.
///
/// # Errors
/// The status names no peers, or a line of the log has no time.
pub fn read(status: &Value, log: &str) -> Result<BTreeMap<String, Course>> {
    let peers = status.get("peers").and_then(Value::as_array).context("no peers")?;
    let names: BTreeMap<&str, &str> = peers
        .iter()
        .filter_map(|peer| Some((peer.get("publicKey")?.as_str()?, peer.get("name")?.as_str()?)))
        .collect();
    let mut courses = BTreeMap::new();
    for line in log.lines() {
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        let Some(peer) = event.get("peer").and_then(Value::as_str).and_then(|key| names.get(key)) else {
            continue;
        };
        let at: Timestamp = event.get("timestamp").and_then(Value::as_str).context("no time")?.parse()?;
        let new = || Course { known: at, up: None, direct: None };
        courses.entry((*peer).to_owned()).or_insert_with(new).add(&event, at);
    }
    Ok(courses)
}

impl PairTimes {
    /// Times from what each logged of the other one.
    pub fn of(here: Course, there: Course) -> Self {
        let known = here.known.max(there.known);
        let since = |at: Timestamp| Duration::try_from(at.duration_since(known)).unwrap_or_default();
        let session = here.up.zip(there.up).map(|(here, there)| since(here.max(there)));
        // The end that does not choose follows the first packet of the other one.
        Self { known, session, direct: here.direct.max(there.direct).map(since) }
    }
}

impl Course {
    /// The same in the time of a clock that is so much ahead of the one it was logged with.
    ///
    /// # Errors
    /// There is no such time.
    pub fn by_clock_ahead(self, ahead: SignedDuration) -> Result<Self> {
        let moved = |at: Timestamp| at.checked_add(ahead);
        let (up, direct) = (self.up.map(moved).transpose()?, self.direct.map(moved).transpose()?);
        Ok(Self { known: moved(self.known)?, up, direct })
    }

    fn add(&mut self, event: &Value, at: Timestamp) {
        if event.get("to").is_some_and(|to| to == "up") {
            self.up.get_or_insert(at);
        }
        let word = |field| event.get(field).and_then(Value::as_str).unwrap_or_default();
        let has_answered = ["BetterPath", "BirthdayAttack", "PathFailed", "ProbeAnswered"];
        if has_answered.contains(&word("reason")) && word("source") != "relay" {
            self.direct = Some(at);
        }
    }
}
