//! A node with a gateway pod, and a host beside the node, in network namespaces: from what the gateway says to what the host sees.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::pods::SlimPod;
use fairlead_cluster::subsystem::Supervisor;
use fairlead_dataplane::pods::{self, PodSpec};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::source_addresses::{self, Found, Source};
use fairlead_dataplane::uplink::{self, Ignored};
use fairlead_egress::EgressName;
use fairlead_egress::client::known::EgressInfo;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{RouteSocket, VethEnd, add_veth, set_up};
use fairlead_topology::SourceNodes;
use fairlead_wire::egress::{Hold, State};
use futures::stream::{self, StreamExt as _};
use kube::runtime::reflector::Lookup;
use kube::runtime::watcher::Event;
use prometheus_client::registry::Registry;
use serde_json::json;
use testbed_netns::{sh_in, try_sh_in};
use tokio::time::sleep;

use super::metrics::AnnounceMetrics;
use super::{AnnounceDeps, SourceAddresses, run};
use crate::objects::CachedEgress;
use crate::registrar::slices::CachedSlice;
use crate::registrar::tests::gateway::Fake;
use crate::registrar::tests::of_gateway;

const HELD: &str = "192.0.2.40";
const STALE: &str = "192.0.2.41";

fn nat() -> EgressName {
    EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() }
}

fn cache<K>(supervisor: &mut Supervisor, what: &'static str, objects: Vec<K>) -> Cache<K>
where
    K: Lookup<DynamicType = ()> + Clone + std::fmt::Debug + Send + Sync + 'static,
{
    let listed = objects.into_iter().map(Event::InitApply);
    let events = std::iter::once(Event::Init).chain(listed).chain([Event::InitDone]);
    let events: Vec<_> = events.map(Ok).collect();
    caches::start(supervisor.subsystem("caches"), what, stream::iter(events).chain(stream::pending()))
}

fn sources() -> CachedEgress {
    let egress = json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
        "metadata": {"namespace": "internet-egress", "name": "nat"}, "spec": {"destinations": ["0.0.0.0/0"]},
        "status": {"sourceAddresses": [{"addresses": [HELD], "gateway": "nat-a"}, {"addresses": [STALE]}]},
    });
    CachedEgress::from(EgressInfo::of(&serde_json::from_value(egress).unwrap()))
}

fn slice() -> CachedSlice {
    let endpoint = json!({"addresses": ["10.1.0.5"], "nodeName": "n1",
        "targetRef": {"kind": "Pod", "uid": "u1", "name": "nat-a"}});
    let slice = json!({
        "metadata": {"name": "nat-x", "namespace": "internet-egress", "labels": {"kubernetes.io/service-name": "nat"}},
        "addressType": "IPv4", "endpoints": [endpoint],
    });
    CachedSlice::new(&serde_json::from_value(slice).unwrap())
}

fn gateway_pod() -> SlimPod {
    let labels = json!({"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress",
        "app.kubernetes.io/instance": "nat"});
    serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "nat-a", "namespace": "internet-egress", "uid": "u1", "labels": labels},
        "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.5"}]},
    }))
    .unwrap()
}

/// The namespaces.
struct Bed {
    node: Netns,
    beside: Netns,
    pod: Netns,
    /// Name of the link to the pod.
    link: String,
}

impl Bed {
    fn new() -> Self {
        let mut bed = Self {
            node: Netns::create().unwrap(),
            beside: Netns::create().unwrap(),
            pod: Netns::create().unwrap(),
            link: String::new(),
        };
        let end = |name| VethEnd { name, mac: None, mtu: None, group: 0 };
        let mut socket = RouteSocket::open_in(&bed.node).unwrap();
        let pair = add_veth(&end("uplink"), &end("far"), bed.beside.as_fd());
        socket.apply(&[set_up(1, true), pair]).unwrap();
        sh_in(&bed.node, "ip link set uplink up; ip addr add 192.0.2.10/24 dev uplink");
        sh_in(&bed.beside, "ip link set far up; ip addr add 192.0.2.20/24 dev far");
        let spec = PodSpec {
            container_id: "c1".to_owned(),
            ifname: "eth0".to_owned(),
            netns: PathBuf::from(format!("/proc/self/fd/{}", bed.pod.as_fd().as_raw_fd())),
            pool: "default".to_owned(),
            addresses: [IpAddr::from([10, 1, 0, 5])].into_iter().collect(),
            mtu: None,
            link_name: None,
            ids: RoutingIds::default(),
        };
        let made = bed.node.run(|| {
            uplink::enable_forwarding().unwrap();
            pods::add(&spec).unwrap()
        });
        let made = made.unwrap();
        bed.link = made.host_name;
        let link = made.host_index;
        sh_in(&bed.pod, &format!("ip addr add {HELD} dev lo; ip addr add {STALE} dev lo"));
        // As a program before has left it.
        let stale = Source { address: STALE.parse().unwrap(), pod: IpAddr::from([10, 1, 0, 5]), link };
        let (ids, nothing) = (RoutingIds::default(), BTreeSet::new());
        bed.node
            .run(|| {
                let found = Found::read(ids, Ignored::default()).unwrap();
                source_addresses::sync(ids, &[stale], &nothing, &found).unwrap()
            })
            .unwrap();
        bed
    }

    fn answers(&self, address: &str) -> bool {
        try_sh_in(&self.beside, &format!("ping -c 1 -W 1 {address}")).is_ok()
    }

    fn routes(&self) -> String {
        sh_in(&self.node, "ip route show table 116; ip route show table 119; ip neigh show proxy")
    }
}

async fn until(what: &str, limit: Duration, is_true: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_true() {
        assert!(started.elapsed() < limit, "{what} within {limit:?}");
        sleep(Duration::from_millis(10)).await;
    }
    println!("{what}: {:?}", started.elapsed());
}

fn hold(address: [u8; 4], term: u64, valid_milliseconds: u32) -> Hold {
    Hold { address: address.to_vec(), term, valid_milliseconds, settling: false }
}

async fn what_a_gateway_holds_is_announced(bed: &Bed) {
    const LIMIT: Duration = Duration::from_secs(10);
    let mut supervisor = Supervisor::default();
    let gateway = Fake::start("127.0.0.1:0").await;
    let registrar = of_gateway(nat(), "u1", &gateway, &mut supervisor);
    let (shared, mut registry) = (SourceAddresses::default(), Registry::default());
    let adopted = tokio::task::spawn_blocking(|| Found::read(RoutingIds::default(), Ignored::default()));
    shared.adopt(adopted.await.unwrap().unwrap().addresses());
    let egresses = cache(&mut supervisor, "Egresses", vec![sources()]);
    let deps = AnnounceDeps {
        registrar,
        egresses: Arc::new(egresses),
        slices: Arc::new(cache(&mut supervisor, "EndpointSlices", vec![slice()])),
        pods: Arc::new(cache(&mut supervisor, "Pods", vec![gateway_pod()])),
        sources: shared.clone(),
        ids: RoutingIds::default(),
        metrics: AnnounceMetrics::register(&mut registry),
        mesh_devices: Box::new(Vec::new),
    };
    supervisor.subsystem("egress").spawn("source addresses", run::run(deps));
    let announced = shared.announced();
    let has = |address: &str| announced.borrow().contains(&address.parse::<IpAddr>().unwrap());

    assert!(has(STALE) && bed.answers(STALE), "what was there goes on");
    until("connected without clients", LIMIT, || gateway.state().all == 1).await;
    sh_in(&bed.beside, &format!("ip neigh replace {HELD} lladdr 02:00:00:00:00:99 dev far nud reachable"));
    gateway.hold(vec![hold([192, 0, 2, 40], 2, 60_000)]);
    until("announced", LIMIT, || has(HELD)).await;
    let told = || sh_in(&bed.beside, &format!("ip neigh show {HELD}")).contains("02:00:00:00:00:99");
    until("hosts are told", LIMIT, || !told()).await;
    assert!(bed.answers(HELD));
    let nodes = shared.nodes().borrow().clone().unwrap();
    let expected = SourceNodes { holder: Some("n1".to_owned()), gateways: ["n1".to_owned()].into() };
    assert_eq!(nodes[&HELD.parse::<IpAddr>().unwrap()], expected);
    until("what no gateway confirmed is gone", LIMIT, || !bed.routes().contains(STALE)).await;
    assert!(!has(STALE));

    for command in ["ip route flush table 116", "ip neigh del proxy 192.0.2.40 dev uplink"] {
        let before = bed.routes();
        sh_in(&bed.node, command);
        sh_in(&bed.node, &format!("ip route replace 10.1.0.5 dev {} table 116 proto 30", bed.link));
        assert_ne!(bed.routes(), before);
        until(&format!("mended after {command}"), LIMIT, || bed.routes() == before).await;
    }

    gateway.hold(vec![hold([192, 0, 2, 40], 2, 60_000), hold([203, 0, 113, 9], 1, 60_000)]);
    until("a problem", LIMIT, || !shared.report().problems.is_empty()).await;
    let report = shared.report();
    assert!(report.problems[0].starts_with("SourceAddressNotListed: gateway nat-a says"), "{report:?}");
    assert_eq!((report.announced.len(), &report.announced[0].links[..]), (1, &["uplink".to_owned()][..]));
    gateway.push(State::Standby);
    // Long before what it has said last would have ended by itself.
    until("standby", LIMIT, || !bed.routes().contains(HELD)).await;
    sh_in(&bed.beside, "ip neigh flush dev far");
    assert!(!bed.answers(HELD) && !has(HELD));
    // A gateway that falls silent loses the address by itself.
    gateway.hold(vec![hold([192, 0, 2, 40], 3, 1000)]);
    until("announced again", LIMIT, || has(HELD)).await;
    until("silent", LIMIT, || !bed.routes().contains(HELD)).await;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in ["announcements_total 2", "takeovers_total 0", "corrections_total 2", "addresses 0"] {
        assert!(text.contains(&format!("fairlead_egress_source_{line}")), "{line} is not in {text}");
    }
}

#[test]
fn what_a_gateway_of_this_node_holds_is_announced_while_it_says_so() {
    let bed = Bed::new();
    // Threads of the runtime are in the namespace of the one that makes them.
    let work = || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.unwrap().block_on(what_a_gateway_holds_is_announced(&bed));
    };
    bed.node.run(work).unwrap();
}
