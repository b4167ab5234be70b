//! Hosts beside a node, which are no members of the mesh.

use std::process::Command;

use fairlead_demo::World;
use testbed_lab::{Process, eventually};

use crate::outage::{TIMEOUT, node};

/// A host with one link, to one node, and no route anywhere: it answers only what comes from the node's own address there.
pub(crate) struct Beside {
    process: Process,
    node: String,
}

impl Beside {
    /// A host at 10.77.0.2, beside a node at 10.77.0.1.
    pub(crate) fn start(world: &World, name: &str) -> Self {
        let host = &node(world, name).host;
        let output = world.directory().join(format!("beside-{name}.log"));
        let mut sleep = Command::new("unshare");
        sleep.args(["--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity"]);
        let mut process = host.spawn(&mut sleep, output).unwrap();
        process.wait_for_output("ready", TIMEOUT).unwrap();
        let inside = format!("nsenter --net=/proc/{}/ns/net", process.id());
        let script = format!(
            "ip link add site0 type veth peer name lan0 netns {pid}\n\
             ip link set site0 up; ip addr add 10.77.0.1/24 dev site0\n\
             {inside} ip link set lan0 up; {inside} ip addr add 10.77.0.2/24 dev lan0\n\
             {inside} nft add table inet judge\n\
             {inside} nft 'add chain inet judge in {{ type filter hook input priority 0; }}'\n\
             {inside} nft add rule inet judge in ip saddr 10.77.0.1 icmp type echo-request counter accept\n\
             {inside} nft add rule inet judge in icmp type echo-request counter accept\n",
            pid = process.id(),
        );
        host.shell(&script).unwrap();
        Self { process, node: name.to_owned() }
    }

    /// Echo requests that came from the node's address, and from others.
    pub(crate) fn requests(&self, world: &World) -> (u64, u64) {
        let listed = node(world, &self.node)
            .host
            .shell(&format!(
                "nsenter --net=/proc/{}/ns/net nft -j list chain inet judge in",
                self.process.id()
            ))
            .unwrap();
        let counts = fairlead_demo::judge::counters(&listed).unwrap();
        (counts[0], counts[1])
    }
}

/// Waits until a pod and its node reach an address.
pub(crate) fn reached(world: &World, from: &str, address: &str) {
    let pod = world.pods.iter().find(|pod| pod.node == from).unwrap();
    eventually(TIMEOUT, || {
        fairlead_demo::probe::ping(pod, address.parse()?)?;
        node(world, from).host.shell(&format!("ping -n -c 1 -W 1 {address}")).map(drop)
    })
    .unwrap();
}
