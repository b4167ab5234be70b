//! Running the long-lived programs.

use std::net::Ipv6Addr;
use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_api::names::EGRESS_REGISTRATION_PORT;
use fairlead_cli::proxy;
use fairlead_cluster::http::MetricsAddress;
use fairlead_egress::EgressName;
use fairlead_node::{Access, EgressSwitches};
use futures::{Stream, stream};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::controller::ControllerArguments;
use crate::arguments::discovery::{DiscoveryArguments, DiscoveryCommand};
use crate::arguments::egress::{EgressControllerArguments, EgressGatewayArguments};
use crate::arguments::node::NodeArguments;
use crate::arguments::relay::RelayArguments;
use crate::{discovery, relay};

/// Worker threads of the runtime: tasks mostly wait, and each thread costs memory on every node.
const THREADS: usize = 2;
/// Threads for blocking work: the kernel changes one link at a time, so a few create links and the others wait 10 to 40 ms
/// each for links to be freed. Further work is queued.
const BLOCKING_THREADS: usize = 64;
/// Read timeout of API server connections in seconds: the server ends a watch after 60, so a connection that died
/// silently is detected soon after.
pub(crate) const READ_SECONDS: u64 = 75;
/// Connect timeout of API server connections in seconds.
const CONNECT_SECONDS: u64 = 5;

/// The link that CNI plugins make in a pod (containerd and CRI-O name it so).
const EGRESS_UPLINK: &str = "eth0";

/// Last log message of the node program and the controller.
const KERNEL_FORWARDS: &str = "shutting down; the kernel keeps forwarding";

/// `fairlead node`
pub(crate) fn node(arguments: NodeArguments) -> anyhow::Result<ExitCode> {
    // Coil's message, which administrators search for.
    let egress = arguments.enable_egress;
    let without_effect = arguments.without_effect();
    anyhow::ensure!(arguments.enable_ipam || egress, "both IPAM and egress are disabled");
    let numbers = arguments.numbers.checked(arguments.enable_ipam)?;
    warn_of(&without_effect);
    let standalone = arguments.standalone.settings()?;
    let settings = fairlead_node::Settings {
        node: arguments.node_name,
        socket: arguments.socket,
        state_dir: arguments.state_dir,
        metrics: MetricsAddress { address: arguments.metrics_addr, secure: arguments.metrics_secure },
        health: arguments.health_addr,
        // Pools and blocks are objects of a cluster.
        enable_ipam: arguments.enable_ipam && standalone.is_none(),
        egress: EgressSwitches { enabled: egress, originating_only: arguments.enable_originating_only },
        block_grace: arguments.addressblock_gc_interval,
        wireguard: arguments.wireguard.into(),
        peers: arguments.peers,
        router: arguments.router,
        numbers,
        calico_names: arguments.compat_calico,
        metrics_per_peer: arguments.metrics_per_peer,
        clear_routes_on_shutdown: arguments.clear_routes_on_shutdown,
    };
    run(async {
        let access = match standalone {
            Some(standalone) => Access::Standalone(Box::new(standalone)),
            None => Access::Cluster(Box::new(cluster().await?)),
        };
        fairlead_node::run(settings, access, stop(KERNEL_FORWARDS)?).await
    })
}

/// `fairlead controller`
pub(crate) fn controller(arguments: ControllerArguments) -> anyhow::Result<ExitCode> {
    warn_of(&arguments.without_effect());
    let settings = fairlead_controller::Settings {
        identity: arguments.identity,
        metrics: MetricsAddress { address: arguments.metrics_addr, secure: arguments.metrics_secure },
        health: arguments.health_addr,
        sweep_interval: arguments.gc_interval,
        deleted_node_grace: arguments.deleted_node_grace,
    };
    run(async { fairlead_controller::run(settings, cluster().await?, stop(KERNEL_FORWARDS)?).await })
}

/// `fairlead egress-controller`
pub(crate) fn egress_controller(arguments: EgressControllerArguments) -> anyhow::Result<ExitCode> {
    warn_of(&arguments.without_effect());
    let settings = fairlead_controller::egress::Settings {
        pod: arguments.pod(),
        identity: arguments.identity,
        metrics: MetricsAddress { address: arguments.metrics_addr, secure: arguments.metrics_secure },
        health: arguments.health_addr,
        port: arguments.egress_port,
        image: arguments.egress_image,
        seccomp: arguments.egress_seccomp_profile,
        source_addresses: arguments.egress_source_addresses,
    };
    run(async { fairlead_controller::egress::run(settings, cluster().await?, stop("shutting down")?).await })
}

/// `fairlead egress-gateway`
pub(crate) fn egress_gateway(arguments: EgressGatewayArguments) -> anyhow::Result<ExitCode> {
    warn_of(&arguments.without_effect());
    let settings = fairlead_egress_gateway::Settings {
        egress: EgressName { namespace: arguments.pod_namespace, name: arguments.egress_name },
        pod: arguments.pod_name,
        addresses: arguments.pod_addresses,
        uplink: EGRESS_UPLINK.to_owned(),
        port: arguments.fou_port,
        source_port_auto: arguments.enable_sport_auto,
        registration: (Ipv6Addr::UNSPECIFIED, EGRESS_REGISTRATION_PORT).into(),
        node_user: arguments.node_user,
        metrics: MetricsAddress { address: arguments.metrics_addr, secure: false },
        health: arguments.health_addr,
        drain: arguments.drain_seconds,
    };
    run(async { fairlead_egress_gateway::run(settings, cluster().await?, signals()?).await })
}

/// `fairlead discovery`
pub(crate) fn discovery(arguments: DiscoveryArguments) -> anyhow::Result<ExitCode> {
    if let Some(DiscoveryCommand::Id(nodes)) = &arguments.command {
        return discovery::print_ids(nodes);
    }
    run(async { discovery::serve(arguments, stop("shutting down")?).await })
}

/// `fairlead relay`
pub(crate) fn relay(arguments: RelayArguments) -> anyhow::Result<ExitCode> {
    run(async { relay::serve(arguments, stop("shutting down")?).await })
}

fn warn_of(without_effect: &[&str]) {
    for flag in without_effect {
        tracing::warn!(flag, "this flag of Coil has no effect in Fairlead");
    }
}

pub(crate) fn run(program: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let outcome = runtime.block_on(program);
    // Blocking work (a DNS lookup, a netlink call) may still run; the program does not wait for it.
    runtime.shutdown_background();
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Client configuration: in a pod its ServiceAccount, elsewhere `KUBECONFIG` or `~/.kube/config`.
pub(crate) async fn cluster() -> anyhow::Result<kube::Config> {
    let mut config = kube::Config::infer().await.context(
        "no Kubernetes client configuration: run in a pod with a ServiceAccount, or set KUBECONFIG to a kubeconfig file",
    )?;
    config = proxy::direct(config, |name| std::env::var(name).ok())?;
    config.read_timeout = Some(std::time::Duration::from_secs(READ_SECONDS));
    config.connect_timeout = Some(std::time::Duration::from_secs(CONNECT_SECONDS));
    Ok(config)
}

/// An item for each SIGTERM and SIGINT.
fn signals() -> anyhow::Result<impl Stream<Item = ()> + Unpin> {
    let terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    Ok(Box::pin(stream::unfold((terminate, interrupt), |(mut terminate, mut interrupt)| async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Some(((), (terminate, interrupt)))
    })))
}

/// Resolves at SIGTERM or SIGINT, after this message.
pub(crate) fn stop(message: &'static str) -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("{message}");
    })
}
