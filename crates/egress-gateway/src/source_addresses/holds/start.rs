//! All tasks for source addresses, which run only while the Egress has some.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_api::names::EGRESS_PEER_PORT;
use fairlead_cluster::subsystem::Supervisor;
use fairlead_dataplane::egress_gateway::{Holding, SourceTable};
use fairlead_egress::EgressName;
use fairlead_source_addresses::copies::Slots;
use fairlead_source_addresses::copies::incoming::Addresses;
use fairlead_source_addresses::members::OwnPod;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::announced::Announcer;
use super::metrics::HoldMetrics;
use super::{Holds, Inputs, Leases, Machine, finish};
use crate::cluster::Cluster;
use crate::condition::Conditions;
use crate::data_path::InPlace;
use crate::facts;
use crate::registry::store::Store;
use crate::source_addresses::sync::SyncMetrics;
use crate::source_addresses::sync::start::{self, Copies, Gateway, Started};

/// Longest wait for tasks to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// Handles and settings with which the tasks are made.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) egress: EgressName,
    pub(crate) pod: OwnPod,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) store: Arc<Store>,
    pub(crate) cluster: Cluster,
    pub(crate) in_place: watch::Receiver<InPlace>,
    pub(crate) conditions: Arc<Conditions>,
    pub(crate) announcer: Arc<Announcer>,
    pub(crate) table: SourceTable,
    pub(crate) metrics: HoldMetrics,
    pub(crate) sync_metrics: SyncMetrics,
}

/// Runs until `stop` is cancelled, and then gives up what this gateway holds.
///
/// # Errors
/// The certificate cannot be made, the port cannot be used, or a task ended.
pub(crate) async fn run(context: Context, stop: CancellationToken) -> anyhow::Result<()> {
    let mut slots = context.cluster.slots.clone();
    loop {
        let begun = slots.wait_for(Option::is_some);
        match stop.run_until_cancelled(begun).await {
            None | Some(Err(_)) => return Ok(()),
            Some(Ok(_)) => {}
        }
        let mut supervisor = Supervisor::default();
        let machine = Arc::new(Machine::new(&context.pod.name));
        let holding = context.table.open();
        let of_copies = start(&mut supervisor, &context, &machine, &holding)?;
        let over = async { while slots.changed().await.is_ok() && slots.borrow_and_update().is_some() {} };
        let ended = supervisor.run_until(stop.run_until_cancelled(over)).await;
        // The task that holds addresses ends first: nothing says any more that they are held.
        supervisor.stop("holds", STOP_TIMEOUT).await;
        let leases = Leases::new(&context.client, &context.egress);
        finish(&machine, holding, &leases, &context.conditions, &context.announcer).await;
        context.metrics.set(&BTreeMap::new(), None);
        if ended.is_ok() && !stop.is_cancelled() {
            // The addresses are no longer of the Egress, and copies with them are deleted.
            of_copies.send_replace(Arc::default());
        }
        supervisor.shutdown(&["membership"], STOP_TIMEOUT).await;
        ended.context("a task for source addresses ended")?;
        if stop.is_cancelled() {
            return Ok(());
        }
        // The Egress has no source addresses any more.
        context.announcer.set_held(Vec::new());
        context.announcer.set_sources(None);
        context.conditions.set_standby(false);
    }
}

/// Starts them. What it returns tells the task that copies connections which slots there are.
fn start(
    supervisor: &mut Supervisor,
    context: &Context,
    machine: &Arc<Machine>,
    holding: &Holding,
) -> anyhow::Result<watch::Sender<Arc<Slots>>> {
    let (slots, of_copies) = watch::channel(Arc::default());
    let copies = Copies {
        slots: of_copies,
        addresses: Arc::new(Known { store: Arc::clone(&context.store), cluster: context.cluster.clone() }),
        metrics: context.sync_metrics.clone(),
    };
    let gateway = Gateway {
        egress: context.egress.clone(),
        pod: context.pod.clone(),
        addresses: context.addresses.clone(),
        listen: (Ipv6Addr::UNSPECIFIED, EGRESS_PEER_PORT).into(),
    };
    let hold = Arc::clone(machine) as _;
    let Started { peers, complete, joined, leaves } =
        start::start(supervisor, &context.client, gateway, hold, copies)?;
    let holds = Holds {
        machine: Arc::clone(machine),
        pod: context.pod.name.clone(),
        leases: Leases::new(&context.client, &context.egress),
        transport: Arc::clone(&peers) as _,
        holding: holding.clone(),
        earlier: context.table.deadlines(),
        conditions: Arc::clone(&context.conditions),
        announcer: Arc::clone(&context.announcer),
        metrics: context.metrics.clone(),
        inputs: Inputs {
            slots: context.cluster.slots.clone(),
            in_place: context.in_place.clone(),
            members: peers.members(),
            joined,
            leaves,
            copies: complete,
        },
        slots: slots.clone(),
        current: Vec::new(),
        writes: JoinSet::new(),
    };
    supervisor.subsystem("holds").spawn("source addresses", holds.run());
    Ok(slots)
}

/// Connections that members may name: those of clients to addresses that clients may send to.
struct Known {
    store: Arc<Store>,
    cluster: Cluster,
}

impl Addresses for Known {
    fn is_client(&self, address: IpAddr) -> bool {
        self.store.read(|registry| registry.may_be_client(address))
    }

    fn is_destination(&self, address: IpAddr) -> bool {
        facts::may_send_to(&self.cluster.destinations.borrow(), address)
    }
}
