//! Costs from a changed member to the plan, and of what that sends to the kernel.
//!
//! The plan is applied in a network namespace. Its kernel may have no WireGuard: whether the peers of a plan differ is one message to the
//! device, as `fairlead_netlink::wireguard` makes it of less than a hundred peers; what leads packets into the device is sent and
//! counted. A veth pair stands for the device.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_dataplane::mesh::{Applier, Bypass, MeshState};
use fairlead_netlink::changes_sent;
use fairlead_topology::{
    Granularity, InternalAddress, Member, OwnAddress, Plan, Planner, Policy, Site, plan,
};
use ipnet::IpNet;
use testbed_lab::Lab;

use super::ours;
use crate::plan::{member, name};
use crate::report::{Measurement, milliseconds};

const SAMPLES: u32 = 20;
const INTERFACE: &str = "mesh0";
/// Nodes of a location.
const LOCATION: u32 = 20;
/// Connections to it go past the mesh, so the addresses of nodes are a set of their own.
const API_SERVER: ([u8; 4], u16) = ([192, 0, 2, 10], 6443);
/// The kernel frees elements in the background; that must not fall into the next sample.
const REST: Duration = Duration::from_millis(20);

/// Change of one member.
#[derive(Debug, Clone, Copy)]
enum Change {
    Added,
    Block,
    Endpoint,
    Location,
    Removed,
}

/// One mesh, as it is planned and as the kernel has it.
struct Bed {
    members: BTreeMap<String, Arc<Member>>,
    policy: Policy,
    planner: Planner,
    applier: Applier,
}

/// Costs of one kind of change.
#[derive(Default)]
struct Samples {
    full: Vec<f64>,
    incremental: Vec<f64>,
    kernel: Vec<f64>,
    messages: Vec<f64>,
}

pub(super) fn measure(size: u32) -> Result<Vec<Measurement>> {
    let lab = Lab::new()?;
    let namespace = lab.bare_namespace("node")?;
    namespace.shell(&format!(
        "ip link add {INTERFACE} type veth peer name far0\nip link set far0 up\nip link set {INTERFACE} up"
    ))?;
    namespace.run(|| {
        let mut measurements = Vec::new();
        for (title, granularity) in [("full", Granularity::Full), ("location", location())] {
            let mut bed = Bed::new(size, granularity)?;
            measurements.extend(bed.full_plan(&format!("{size} members, {title}"))?);
            for change in [Change::Endpoint, Change::Block, Change::Added, Change::Removed, Change::Location]
            {
                measurements.extend(bed.changes(&format!("{size} members, {title}"), size, change)?);
            }
            // Of few members two locations are a large part, and all are planned.
            let planned = bed.planner.full_plans();
            ensure!(size < 1_000 || planned == 1, "all members were planned {planned} times");
        }
        Ok(measurements)
    })?
}

/// Gateways, on a host with the internal address of the first member.
fn location() -> Granularity {
    let own = OwnAddress { link: 1, prefix: IpNet::from(IpAddr::from(internal(0))) };
    Granularity::Location { addresses: vec![own], down: Default::default() }
}

fn internal(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(192, 168, 0, 0).to_bits().saturating_add(number))
}

/// Every twentieth node begins a location, and is its gateway with the second.
fn placed(number: u32) -> Result<Member> {
    let internal = vec![InternalAddress { address: internal(number).into(), length: Some(16) }];
    let site = Site {
        location: format!("location-{}", number / LOCATION),
        internal,
        is_leader: number % LOCATION < 2,
        is_public: true,
        networks: Vec::new(),
    };
    let mut member = member(number)?;
    member.endpoints.host = vec![SocketAddr::from(([172, 16, 0, 1], 51820))];
    Ok(Member { site: Some(site), ..member })
}

impl Bed {
    fn new(size: u32, granularity: Granularity) -> Result<Self> {
        let members = (0..size).map(|number| Ok((name(number), Arc::new(placed(number)?))));
        let members = members.collect::<Result<_>>()?;
        let policy = Policy { granularity, ..Policy::new(name(0)) };
        let (planner, applier) = (Planner::default(), Applier::default());
        let mut bed = Self { members, policy, planner, applier };
        let planned = bed.planner.plan(&bed.list(), bed.policy.clone()).clone();
        bed.applier.apply(&state(&planned))?;
        Ok(bed)
    }

    fn list(&self) -> Vec<Arc<Member>> {
        self.members.values().cloned().collect()
    }

    fn full_plan(&self, of: &str) -> Result<Vec<Measurement>> {
        let members = self.list();
        let mut samples = Vec::new();
        for _ in 0..SAMPLES {
            let start = Instant::now();
            let planned = black_box(plan(black_box(&members), &self.policy));
            samples.push(milliseconds(start.elapsed()));
            ensure!(planned.problems.is_empty(), "{:?}", planned.problems.first());
        }
        Ok(vec![ours(format!("{of}: full plan"), "ms", samples)?])
    }

    fn changes(&mut self, of: &str, size: u32, change: Change) -> Result<Vec<Measurement>> {
        let mut samples = Samples::default();
        // The first one is not counted: it finds caches and allocator cold.
        for number in 0..=SAMPLES {
            let before = self.planner.plan(&self.list(), self.policy.clone()).clone();
            self.make(change, number, size)?;
            let members = self.list();
            let policy = self.policy.clone();
            let start = Instant::now();
            let planned = black_box(self.planner.plan(black_box(&members), policy));
            let incremental = milliseconds(start.elapsed());
            let start = Instant::now();
            let full = black_box(plan(black_box(&members), &self.policy));
            let anew = milliseconds(start.elapsed());
            ensure!(*planned == full, "{change:?}: the plan is another one than that of all members");
            let messages = u64::from(before.peers != full.peers);
            let (sent, start) = (changes_sent(), Instant::now());
            self.applier.apply(&state(&full))?;
            let kernel = milliseconds(start.elapsed());
            if number > 0 {
                samples.full.push(anew);
                samples.incremental.push(incremental);
                samples.kernel.push(kernel);
                samples.messages.push((messages + changes_sent() - sent) as f64);
            }
            std::thread::sleep(REST);
        }
        let words = change.words();
        Ok(vec![
            ours(format!("{of}: {words}, planned anew"), "ms", samples.full)?,
            ours(format!("{of}: {words}, from change to plan"), "ms", samples.incremental)?,
            ours(format!("{of}: {words}, from plan to kernel"), "ms", samples.kernel)?,
            ours(format!("{of}: {words}, netlink messages"), "messages", samples.messages)?,
        ])
    }

    /// Changes another member each time: of those that there are from the start one of the second half.
    fn make(&mut self, change: Change, round: u32, size: u32) -> Result<()> {
        let distance = round.saturating_mul(LOCATION / 4) % (size / 2).max(1);
        let old = size.checked_sub(distance.saturating_add(1)).context("a mesh without members")?;
        let new = size.saturating_add(round);
        let mut changed = |number: u32, change: &dyn Fn(&mut Member)| {
            let member = self.members.get_mut(&name(number)).context("no such member")?;
            change(Arc::make_mut(member));
            anyhow::Ok(())
        };
        match change {
            Change::Added => {
                self.members.insert(name(new), Arc::new(placed(new)?));
            }
            Change::Block => {
                let block = format!("10.200.{}.{}/27", round / 4, round % 4 * 64).parse::<IpNet>()?;
                changed(old, &|member| member.blocks.push(block))?;
            }
            Change::Endpoint => changed(old, &|it| it.endpoints.host.push(([192, 0, 2, 1], 51820).into()))?,
            Change::Location => changed(old, &|member| {
                if let Some(site) = &mut member.site {
                    site.location = "location-1".to_owned();
                }
            })?,
            Change::Removed => drop(self.members.remove(&name(new)).context("no such member")?),
        }
        Ok(())
    }
}

impl Change {
    fn words(self) -> &'static str {
        match self {
            Self::Added => "member added",
            Self::Block => "block granted",
            Self::Endpoint => "endpoint changed",
            Self::Location => "location changed",
            Self::Removed => "member removed",
        }
    }
}

/// Part of a plan that leads packets into the device.
fn state(planned: &Plan) -> MeshState {
    MeshState {
        interface: INTERFACE.to_owned(),
        mtu: 1420,
        addresses: Vec::new(),
        targets_v4: planned.targets_ipv4.iter().copied().map(IpNet::from).collect(),
        targets_v6: planned.targets_ipv6.iter().copied().map(IpNet::from).collect(),
        bypass: Bypass {
            servers: vec![SocketAddr::from(API_SERVER)],
            nodes: planned.nodes.iter().copied().collect(),
            ..Bypass::default()
        },
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: planned.masqueraded.clone(),
        without_default: Vec::new(),
        listen_port: 51820,
        sources: Vec::new(),
        uplinks: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_is_followed_without_planning_all_members() {
        for granularity in [Granularity::Full, location()] {
            let mut planner = Planner::default();
            let mut bed = bed(400, granularity);
            planner.plan(&bed.list(), bed.policy.clone());
            for change in [Change::Endpoint, Change::Block, Change::Added, Change::Removed, Change::Location]
            {
                for round in 0..3 {
                    bed.make(change, round, 400).unwrap();
                    let members = bed.list();
                    assert_eq!(
                        *planner.plan(&members, bed.policy.clone()),
                        plan(&members, &bed.policy),
                        "{change:?}"
                    );
                }
            }
            assert_eq!(planner.full_plans(), 1);
        }
    }

    fn bed(size: u32, granularity: Granularity) -> Bed {
        let members = (0..size).map(|number| (name(number), Arc::new(placed(number).unwrap()))).collect();
        let policy = Policy { granularity, ..Policy::new(name(0)) };
        Bed { members, policy, planner: Planner::default(), applier: Applier::default() }
    }
}
