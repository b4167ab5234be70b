//! Ours: two node programs of the world, started without state.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fairlead_demo::World;
use fairlead_demo::nat_matrix::Place;
use fairlead_demo::times::{PairTimes, courses};
use jiff::Timestamp;
use serde_json::Value;
use testbed_lab::Process;

use super::{LIMIT, Outcome};
use crate::joining::{Servers, forget};
use crate::progress;

/// Bounds every wait.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for an answer where the nodes have settled on a path.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two pings.
const INTERVAL: &str = "0.02";

/// Node programs, with what they need.
pub(super) struct Nodes {
    _servers: Servers,
}

impl Nodes {
    /// Makes mesh and pods, and ends all node programs.
    pub(super) fn prepare(world: &mut World) -> Result<Self> {
        Ok(Self { _servers: Servers::prepare(world)? })
    }

    /// Starts two of them, and ends them when it is known what becomes of them.
    pub(super) fn measure(&self, world: &mut World, one: &Place, other: &Place) -> Result<Outcome> {
        forget(world, &[one.node, other.node])?;
        let pings = start_pings(world, one, other)?;
        for name in [one.node, other.node] {
            world.node(name)?.start()?;
        }
        for name in [one.node, other.node] {
            world.node(name)?.wait_ready(TIMEOUT)?;
        }
        let times = follow(world, one, other)?;
        let answer = first_answer(pings.output_path())?;
        drop(pings);
        for name in [one.node, other.node] {
            world.node(name)?.stop()?;
        }
        let Some(times) = times else { return Ok(Outcome::default()) };
        let since = |at: Timestamp| Duration::try_from(at.duration_since(times.known)).unwrap_or_default();
        Ok(Outcome { answer: answer.map(since), direct: times.direct })
    }
}

/// Pings from the pod of one node to that of the other, which begin before there is a way.
fn start_pings(world: &World, one: &Place, other: &Place) -> Result<Process> {
    let pod = |place: &Place| {
        let found = world.pods.iter().find(|pod| pod.node == place.node);
        found.with_context(|| format!("{} has no pod", place.node))
    };
    let to: IpAddr = *pod(other)?.addresses.first().context("the pod has no address")?;
    let from = pod(one)?;
    let mut command = from.namespace.command("ping")?;
    command.args(["-D", "-n", "-i", INTERVAL, &to.to_string()]);
    from.namespace.spawn(&mut command, world.directory().join(format!("ping-{}-{}", one.node, other.node)))
}

/// When the first answer came, for which a path may be there before: `ping -D` puts the Unix time before each line.
fn first_answer(output: &Path) -> Result<Option<Timestamp>> {
    let deadline = Instant::now() + ANSWER;
    loop {
        let text = fs::read_to_string(output).with_context(|| format!("cannot read {}", output.display()))?;
        if let Some(line) = text.lines().find(|line| line.contains(" bytes from ")) {
            return time_of(line).map(Some);
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn time_of(line: &str) -> Result<Timestamp> {
    let seconds = line.trim_start_matches('[').split(']').next().unwrap_or_default();
    let seconds: f64 = seconds.parse().with_context(|| format!("ping printed no time: {line}"))?;
    Ok(Timestamp::from_microsecond((seconds * 1e6) as i64)?)
}

/// Waits until both ends use a direct path, or have had time for it, and reports their times. `None` if they had no session in time: that
/// pair has failed, and the others are measured.
fn follow(world: &World, one: &Place, other: &Place) -> Result<Option<PairTimes>> {
    let ends = [one, other].map(|place| world.nodes.iter().find(|node| node.name == place.node));
    let [Some(here), Some(there)] = ends else { anyhow::bail!("the world has no such nodes") };
    let mut up_since: Option<Instant> = None;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let paths = [is_direct(&here.status()?, other), is_direct(&there.status()?, one)];
        if paths.iter().all(Option::is_some) {
            up_since.get_or_insert_with(Instant::now);
        }
        let is_over = up_since.is_some_and(|since| since.elapsed() > LIMIT);
        if paths == [Some(true), Some(true)] || is_over {
            let course = courses(here)?.remove(other.node).zip(courses(there)?.remove(one.node));
            let (from, back) = course.context("they logged nothing of each other")?;
            let times = PairTimes::of(from, back);
            // A session that begins on a direct path moves to none.
            let direct = times.direct.or(times.session).filter(|_| !is_over);
            return Ok(Some(PairTimes { direct, ..times }));
        }
        if Instant::now() >= deadline {
            progress(&format!(
                "    {} and {}: no session within {} s",
                one.node,
                other.node,
                TIMEOUT.as_secs()
            ));
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Whether a node sends to a peer directly; `None` without a session.
fn is_direct(status: &Value, peer: &Place) -> Option<bool> {
    let is_peer = |seen: &&Value| seen.get("name").is_some_and(|name| name == peer.node);
    let peer = status.get("peers")?.as_array()?.iter().find(is_peer)?;
    let word = |field| peer.get(field).and_then(Value::as_str).unwrap_or_default();
    (word("state") == "up").then(|| !word("endpoint").is_empty() && !word("endpoint").contains("://"))
}
