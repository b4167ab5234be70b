//! A cluster that grows: real node programs, real NATs, a real API server, and how long it takes until each pod reaches each other one.
//!
//! Nodes are added in steps, each time as many as there are (2, 4, 8 … ), all of a step at once and without any state. Time begins when the
//! programs of the step are started; a pair counts as soon as an answer has come, each way, between two pods of which at least one is on a
//! new node. What the API server has written meanwhile is counted by the resource version, which is etcd's revision.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fairlead_demo::World;
use fairlead_demo::topology::{SitePlan, Topology};
use ipnet::Ipv4Net;
use testbed_lab::{Ipv6, Nat, Progress};

use crate::joining::{Servers, forget};
use crate::report::{Measurement, milliseconds};
use crate::statistics::percentile;
use crate::{Effort, Options, progress};

pub(crate) const CASE: &str = "growth";
/// Port of each pod.
const PORT: u16 = 7009;
/// Between two questions to a pod that has not answered.
const INTERVAL: Duration = Duration::from_millis(100);
/// Bounds a step.
const LIMIT: Duration = Duration::from_secs(300);
const QUESTION: u8 = 0;
const ANSWER: u8 = 1;
/// Sites of the cluster, and where their networks begin. Nodes are added to one site after the other.
const SITES: [(&str, Nat, [u8; 4]); 5] = [
    ("cloud", Nat::None, [198, 51, 100, 0]),
    ("home", Nat::PortRestricted, [192, 168, 1, 0]),
    ("office", Nat::PortRestricted, [192, 168, 2, 0]),
    ("hotel", Nat::SymmetricRandom, [10, 0, 0, 0]),
    ("farm", Nat::AddressRestricted, [10, 0, 1, 0]),
];
/// The last byte of the address of the first node at each site.
const FIRST_HOST: u8 = 20;

/// When each of the other pods first answered a pod.
type Answers = BTreeMap<IpAddr, Instant>;

/// The program in a pod: it answers, and asks until it is answered.
struct Prober {
    address: IpAddr,
    socket: UdpSocket,
    answers: Mutex<Answers>,
}

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let size = match (options.effort, options.peers) {
        (_, Some(size)) => size.max(2),
        (Effort::Full, None) => 60,
        (Effort::Quick, None) => 10,
    };
    let mut world = World::start(&topology(size)?, &Progress::default())?;
    let _servers = Servers::prepare(&mut world)?;
    let names: Vec<&str> = world.nodes.iter().map(|node| node.name.as_str()).collect();
    forget(&world, &names)?;
    let probers = probers(&world, size)?;
    let (mut measurements, mut running) = (Vec::new(), 0);
    for step in steps(size) {
        measurements.extend(grow(&mut world, &probers, running, step)?);
        running = step;
    }
    Ok(measurements)
}

/// Number of nodes after each step: 2, then doubled up to `size`. Pure.
fn steps(size: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(2), move |step: &usize| {
        (*step < size).then(|| step.saturating_mul(2).min(size))
    })
}

/// Topology of so many nodes at the sites, in turns.
fn topology(size: usize) -> Result<Topology> {
    let site = |(index, (name, nat, network)): (usize, (&'static str, Nat, [u8; 4]))| {
        let count = size.saturating_sub(index).div_ceil(SITES.len());
        let [a, b, c, _] = network;
        let last = (FIRST_HOST..).take(count);
        Ok(SitePlan {
            name,
            nat,
            lan: Ipv4Net::new(Ipv4Addr::from(network), 24)?,
            nodes: last.map(|last| Ipv4Addr::new(a, b, c, last)).collect(),
            ipv6: Ipv6::Off,
            uplink_mtu: None,
            carrier: None,
        })
    };
    Ok(Topology {
        name: "growing",
        about: "five sites, one of them public, the others behind NATs of three kinds",
        sites: SITES.into_iter().enumerate().map(site).collect::<Result<_>>()?,
        node_arguments: &[],
    })
}

/// One in each pod, in the order in which nodes are added.
fn probers(world: &World, size: usize) -> Result<Vec<Prober>> {
    let prober = |number| {
        let node = name(number)?;
        let pod = world.pods.iter().find(|pod| pod.node == node);
        let pod = pod.with_context(|| format!("{node} has no pod"))?;
        let address = pod.addresses.iter().copied().find(IpAddr::is_ipv4).context("a pod without IPv4")?;
        let socket = pod.namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)))??;
        socket.set_read_timeout(Some(INTERVAL / 10))?;
        Ok(Prober { address, socket, answers: Mutex::default() })
    };
    (0..size).map(prober).collect()
}

/// The name of the `number`-th node that is added.
fn name(number: usize) -> Result<String> {
    let at = number.checked_rem(SITES.len()).and_then(|site| SITES.get(site));
    let (site, ..) = at.context("no sites")?;
    let place = number.checked_div(SITES.len()).context("no sites")?;
    Ok(format!("{site}-{}", place.saturating_add(1)))
}

fn grow(world: &mut World, probers: &[Prober], before: usize, after: usize) -> Result<Vec<Measurement>> {
    let nodes = probers.get(..after).context("more nodes than pods")?;
    let revision = revision(world)?;
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let outcome = thread::scope(|scope| {
        for prober in nodes {
            scope.spawn(|| prober.run(nodes, &stop));
        }
        let outcome = start_nodes(world, before, after).and_then(|()| wait(nodes, start));
        stop.store(true, Ordering::Relaxed);
        outcome
    });
    outcome.with_context(|| format!("from {before} to {after} nodes"))?;
    let times = times(nodes, before, start);
    let writes = self::revision(world)?.saturating_sub(revision);
    let of = format!("growth from {before} to {after} nodes");
    let most = percentile(&times, 1.0).context("no pair")?;
    let added = after.saturating_sub(before).max(1);
    Ok(vec![
        ours(format!("{of}: a new pair of pods"), "ms", times)?,
        ours(format!("{of}: all pairs"), "ms", vec![most])?,
        ours(format!("{of}: writes of a new node"), "", vec![writes as f64 / added as f64])?,
    ])
}

fn start_nodes(world: &mut World, before: usize, after: usize) -> Result<()> {
    for number in before..after {
        world.node(&name(number)?)?.start()?;
    }
    Ok(())
}

/// Waits until each has been answered by all others.
fn wait(nodes: &[Prober], start: Instant) -> Result<()> {
    let wanted = nodes.len().saturating_sub(1);
    loop {
        let missing = nodes.iter().filter(|prober| prober.answers().len() < wanted).count();
        if missing == 0 {
            return Ok(());
        }
        if start.elapsed() > LIMIT {
            bail!("{missing} of {} pods do not reach all others within {} s", nodes.len(), LIMIT.as_secs());
        }
        thread::sleep(INTERVAL / 5);
    }
}

/// Milliseconds until the answer, for each ordered pair with a node that was added.
fn times(nodes: &[Prober], before: usize, start: Instant) -> Vec<f64> {
    let old: Vec<IpAddr> = nodes.iter().take(before).map(|prober| prober.address).collect();
    let mut times = Vec::new();
    for prober in nodes {
        let is_old = old.contains(&prober.address);
        for (peer, at) in prober.answers().iter() {
            if !(is_old && old.contains(peer)) {
                times.push(milliseconds(at.saturating_duration_since(start)));
            }
        }
    }
    times
}

/// A figure, which is shown at once.
fn ours(metric: String, unit: &'static str, samples: Vec<f64>) -> Result<Measurement> {
    let measurement = Measurement::new(CASE, "fairlead", metric, unit, samples)?;
    progress(&format!("    {}: {:.1} {unit}", measurement.metric, measurement.value));
    Ok(measurement)
}

/// Revision of etcd, as the resource version of a list: it grows with each write.
fn revision(world: &World) -> Result<u64> {
    let list = world.plane.kubectl(&["get", "--raw", "/api/v1/namespaces?limit=1"])?;
    let list: serde_json::Value = serde_json::from_str(&list)?;
    let version = list.pointer("/metadata/resourceVersion").and_then(|version| version.as_str());
    version
        .context("a list without resource version")?
        .parse()
        .context("a resource version that is no number")
}

impl Prober {
    fn answers(&self) -> std::sync::MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers others, and asks those that have not answered, until `stop` is set.
    fn run(&self, all: &[Self], stop: &AtomicBool) {
        let mut asked: Option<Instant> = None;
        while !stop.load(Ordering::Relaxed) {
            if asked.is_none_or(|at| at.elapsed() >= INTERVAL) {
                asked = Some(Instant::now());
                let answered = self.answers().clone();
                let others = all.iter().map(|other| other.address);
                for other in others.filter(|other| *other != self.address && !answered.contains_key(other)) {
                    // Until there is a route it fails; it is tried again.
                    let _ = self.socket.send_to(&[QUESTION], (other, PORT));
                }
            }
            self.receive();
        }
    }

    fn receive(&self) {
        let mut datagram = [0; 8];
        let Ok((1, from)) = self.socket.recv_from(&mut datagram) else { return };
        match datagram.first() {
            Some(&QUESTION) => drop(self.socket.send_to(&[ANSWER], from)),
            Some(&ANSWER) => self.note(from),
            _ => {}
        }
    }

    fn note(&self, from: SocketAddr) {
        self.answers().entry(from.ip()).or_insert_with(Instant::now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_doubles_until_it_has_all_nodes_and_each_is_at_a_site() {
        assert_eq!(steps(60).collect::<Vec<_>>(), [2, 4, 8, 16, 32, 60]);
        assert_eq!(steps(2).collect::<Vec<_>>(), [2]);
        let planned = topology(12).unwrap();
        let mut names: Vec<String> = planned
            .sites
            .iter()
            .flat_map(|site| (1..=site.nodes.len()).map(|number| format!("{}-{number}", site.name)))
            .collect();
        let mut added: Vec<String> = (0..12).map(|number| name(number).unwrap()).collect();
        names.sort();
        added.sort();
        assert_eq!(names, added);
    }

    #[test]
    fn only_pairs_with_a_new_node_count() {
        let prober = |last: u8| Prober {
            address: IpAddr::from([10, 0, 0, last]),
            socket: UdpSocket::bind("127.0.0.1:0").unwrap(),
            answers: Mutex::default(),
        };
        let (start, nodes) = (Instant::now(), [prober(1), prober(2), prober(3)]);
        let at = |seconds| start + Duration::from_secs(seconds);
        for (from, to, seconds) in [(0_usize, 2_u8, 1), (0, 3, 5), (1, 1, 2), (2, 1, 7), (2, 2, 8)] {
            nodes[from].answers().insert(IpAddr::from([10, 0, 0, to]), at(seconds));
        }
        assert_eq!(times(&nodes, 2, start), [5000.0, 7000.0, 8000.0]);
        assert_eq!(times(&nodes, 0, start).len(), 5);
    }
}
