//! Membership, connections and copies of flows as tasks of the program.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::Context as _;
use fairlead_cluster::subsystem::Supervisor;
use fairlead_egress::EgressName;
use fairlead_source_addresses::copies::Slots;
use fairlead_source_addresses::copies::incoming::Addresses;
use fairlead_source_addresses::members::{Member, OwnPod};
use kube::Client;
use tokio::sync::watch;

use super::{Copier, SyncMetrics};
use crate::source_addresses::peers::lease::Membership;
use crate::source_addresses::peers::{Hold, Identity, Peers};

/// This gateway.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    /// The Egress of the gateway.
    pub(crate) egress: EgressName,
    /// The pod of the gateway.
    pub(crate) pod: OwnPod,
    /// Addresses of its pod.
    pub(crate) addresses: Vec<IpAddr>,
    /// Address at which the gateway listens for others; they dial the port of their own.
    pub(crate) listen: SocketAddr,
}

/// Inputs of the copies of connections, and their metrics.
pub(crate) struct Copies {
    /// The slots, as the hold protocol sees them.
    pub(crate) slots: watch::Receiver<Arc<Slots>>,
    /// Clients and destinations that members may name.
    pub(crate) addresses: Arc<dyn Addresses>,
    /// Metrics.
    pub(crate) metrics: SyncMetrics,
}

/// Handles of the tasks.
#[derive(Debug)]
pub(crate) struct Started {
    /// The other gateways.
    pub(crate) peers: Arc<Peers>,
    /// Slots of which this gateway has a full copy of the holder's connections.
    pub(crate) complete: watch::Receiver<BTreeSet<u32>>,
    /// Whether this gateway is in the Lease.
    pub(crate) joined: watch::Receiver<bool>,
    /// Whether the controller asks it to leave the others the source addresses.
    pub(crate) leaves: watch::Receiver<bool>,
}

/// Starts all of it: the subsystem `membership` writes this gateway into the Lease, and out of it when it is stopped; `peers` has the
/// connections and the copies.
///
/// # Errors
/// The port is in use, or the cryptography library fails.
pub(crate) fn start(
    supervisor: &mut Supervisor,
    client: &Client,
    gateway: Gateway,
    hold: Arc<dyn Hold>,
    copies: Copies,
) -> anyhow::Result<Started> {
    let Gateway { egress, pod, addresses, listen } = gateway;
    let identity = Identity::generate().context("cannot make a certificate for other gateways")?;
    let listener = fairlead_transport::listen(listen).with_context(|| {
        format!("cannot listen on {listen} for other gateways; is another program on this port?")
    })?;
    let member = Member { uid: pod.uid, addresses, key: identity.key };
    let subsystem = supervisor.subsystem("membership");
    let membership = Membership::start(subsystem, client, &egress, pod.name, member);
    let (peers, heard) = Peers::new(membership.members());
    let joined = membership.joined();
    let leaves = membership.leaves();
    subsystem.spawn_graceful("own annotation", |stop| membership.run(stop));
    let copier = Copier::new(Arc::clone(&peers), heard, copies.slots, copies.addresses, copies.metrics);
    let complete = copier.complete();
    let subsystem = supervisor.subsystem("peers");
    subsystem.spawn_graceful("copies of connections", |stop| copier.run(stop));
    subsystem.spawn("connections", Arc::clone(&peers).run(listener, identity, listen.port(), hold));
    Ok(Started { peers, complete, joined, leaves })
}
