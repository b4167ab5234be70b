//! Egress of a node on caches that a test fills, gateways that a test sets, and real network namespaces.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fairlead_api::fou::Gateway;
use fairlead_api::resources::Egress as EgressObject;
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::events::{EventMetrics, EventPublisher};
use fairlead_cluster::pods::{self, SlimPod};
use fairlead_cluster::subsystem::{Subsystem, Supervisor};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_egress::EgressName;
use fairlead_egress::client::known::EgressInfo;
use fairlead_egress::client::plan::NextHop;
use fairlead_ipam::Key;
use fairlead_ipam::check::Owner;
use fairlead_pods::cni::{Attachment, EgressRequest, Failure, PodInterface};
use fairlead_pods::container_locks::ContainerLocks;
use fairlead_pods::ipam::Ipam;
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{Namespace as NamespaceObject, Service};
use kube::Api;
use kube::api::PartialObjectMeta;
use kube::runtime::events::Reporter;
use kube::runtime::reflector::{self, Lookup};
use kube::runtime::watcher::{self, Event};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed_api::server::client;
use testbed_netns::Namespace;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::super::gateways::Gateways;
use super::super::inputs::Inputs;
use super::super::metrics::EgressMetrics;
use super::super::objects::{CachedEgress, CachedService};
use super::super::pod_egress::EgressDeps;
use super::super::registrar::Client;
use super::super::{Egress, EgressProblems, EgressSwitches};

/// The address of each family, of the pod, of the Service, and of a gateway.
pub(crate) const POD: [&str; 2] = ["10.20.30.40", "fd02::1"];
pub(crate) const SERVICE: [&str; 2] = ["10.68.124.145", "fd04::2"];
pub(crate) const GATEWAY: [&str; 2] = ["10.20.50.1", "fd02::50:1"];
/// Addresses behind the gateways.
pub(crate) const BEHIND: [&str; 2] = ["203.0.113.1:9", "[2001:db8::1]:9"];

/// Gateways as a test wants them.
#[derive(Default)]
pub(crate) struct FakeGateways {
    ways: Mutex<BTreeMap<EgressName, NextHop>>,
    clients: Mutex<BTreeMap<EgressName, BTreeSet<String>>>,
    refusal: Mutex<Option<String>>,
    changes: watch::Sender<u64>,
}

impl FakeGateways {
    pub(crate) fn set(&self, egress: &str, way: NextHop) {
        self.ways.lock().unwrap().insert(name(egress), way);
        self.changes.send_modify(|count| *count += 1);
    }

    pub(crate) fn refuse(&self, why: Option<&str>) {
        *self.refusal.lock().unwrap() = why.map(str::to_owned);
    }

    /// UIDs of the clients of an Egress.
    pub(crate) fn clients(&self, egress: &str) -> Vec<String> {
        self.clients.lock().unwrap().get(&name(egress)).into_iter().flatten().cloned().collect()
    }
}

#[tonic::async_trait]
impl Gateways for FakeGateways {
    fn set_clients(&self, clients: BTreeMap<EgressName, Vec<Client>>) {
        let uids = |all: Vec<Client>| all.into_iter().map(|client| client.uid).collect();
        *self.clients.lock().unwrap() =
            clients.into_iter().map(|(egress, all)| (egress, uids(all))).collect();
    }

    fn add_client(&self, egress: &EgressName, client: Client) {
        self.clients.lock().unwrap().entry(egress.clone()).or_default().insert(client.uid);
    }

    fn expect_clients(&self, _: BTreeSet<EgressName>) {}

    fn remove_client(&self, egress: &EgressName, uid: &str) {
        if let Some(clients) = self.clients.lock().unwrap().get_mut(egress) {
            clients.remove(uid);
        }
    }

    async fn registered(&self, _: &EgressName, _: &str) -> Result<(), String> {
        self.refusal.lock().unwrap().clone().map_or(Ok(()), Err)
    }

    fn next_hop(&self, egress: &EgressName, _: &str) -> NextHop {
        self.ways.lock().unwrap().get(egress).cloned().unwrap_or(NextHop::Gateways(Vec::new()))
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

pub(crate) fn name(text: &str) -> EgressName {
    let (namespace, name) = text.split_once('/').unwrap();
    EgressName { namespace: namespace.to_owned(), name: name.to_owned() }
}

/// Gateways at these addresses.
pub(crate) fn gateways(addresses: &[&str]) -> NextHop {
    let gateway = |text: &&str| Gateway { address: text.parse().unwrap(), is_draining: false };
    NextHop::Gateways(addresses.iter().map(gateway).collect())
}

/// A watch whose events come from a test.
pub(crate) struct Feed<K>(mpsc::UnboundedSender<watcher::Result<Event<K>>>);

impl<K> Feed<K>
where
    K: Lookup<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
{
    fn start(subsystem: &mut Subsystem, what: &'static str, first: Vec<K>) -> (Self, Cache<K>) {
        Self::parsed(subsystem, what, first, |object| object)
    }

    /// With a cache of what is read of the objects.
    fn parsed<T>(
        subsystem: &mut Subsystem,
        what: &'static str,
        first: Vec<K>,
        parse: impl Fn(K) -> T + Send + 'static,
    ) -> (Self, Cache<T>)
    where
        T: Lookup<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    {
        let (sender, events) = mpsc::unbounded_channel();
        let feed = Self(sender);
        feed.send(Event::Init);
        first.into_iter().for_each(|object| feed.send(Event::InitApply(object)));
        feed.send(Event::InitDone);
        let events = caches::parsed(UnboundedReceiverStream::new(events), parse);
        (feed, caches::start(subsystem, what, events))
    }

    fn send(&self, event: Event<K>) {
        self.0.send(Ok(event)).ok();
    }

    pub(crate) fn apply(&self, object: K) {
        self.send(Event::Apply(object));
    }

    pub(crate) fn delete(&self, object: K) {
        self.send(Event::Delete(object));
    }
}

/// Objects and switches at the start of a test.
#[derive(Clone, Default)]
pub(crate) struct Objects {
    pub(crate) egresses: Vec<EgressObject>,
    pub(crate) services: Vec<Service>,
    pub(crate) pods: Vec<SlimPod>,
    pub(crate) namespaces: Vec<PartialObjectMeta<NamespaceObject>>,
    pub(crate) switches: EgressSwitches,
}

/// The egress of a node.
pub(crate) struct Bed {
    pub(crate) supervisor: Supervisor,
    pub(crate) egress: Egress,
    pub(crate) gateways: Arc<FakeGateways>,
    pub(crate) locks: Arc<ContainerLocks>,
    pub(crate) egresses: Feed<EgressObject>,
    pub(crate) services: Feed<Service>,
    pub(crate) pods: Feed<SlimPod>,
    pub(crate) namespaces: Feed<PartialObjectMeta<NamespaceObject>>,
    pub(crate) cached_pods: Arc<Cache<SlimPod>>,
    pub(crate) events: EventPublisher,
    pub(crate) problems: EgressProblems,
    directory: Arc<TempDir>,
}

impl Bed {
    pub(crate) fn new(objects: Objects) -> Self {
        Self::beside(Arc::new(tempfile::tempdir().unwrap()), Arc::default(), objects)
    }

    /// With gateways that are not a test's fake ones.
    pub(crate) fn with_gateways(gateways: Arc<dyn Gateways>, objects: Objects) -> Self {
        Self::start(Arc::new(tempfile::tempdir().unwrap()), Arc::default(), gateways, objects)
    }

    fn beside(directory: Arc<TempDir>, gateways: Arc<FakeGateways>, objects: Objects) -> Self {
        Self::start(directory, Arc::clone(&gateways), gateways, objects)
    }

    fn start(
        directory: Arc<TempDir>,
        fake: Arc<FakeGateways>,
        gateways: Arc<dyn Gateways>,
        objects: Objects,
    ) -> Self {
        let mut supervisor = Supervisor::default();
        let caches = supervisor.subsystem("caches");
        let (egresses, cached_egresses) = Feed::parsed(caches, "Egresses", objects.egresses, |egress| {
            CachedEgress::from(EgressInfo::of(&egress))
        });
        let (services, cached_services) =
            Feed::parsed(caches, "Services", objects.services, CachedService::from);
        let (namespaces, cached_namespaces) = Feed::start(caches, "Namespaces", objects.namespaces);
        let (pods, cached_pods) = Feed::start(caches, "Pods", objects.pods);
        let cached_pods = Arc::new(cached_pods);
        let inputs =
            Inputs::of((cached_egresses, cached_services), Arc::new(cached_namespaces), objects.switches);
        let mut metrics = Registry::default();
        let events = EventPublisher::start(
            supervisor.subsystem("events"),
            client(|_| futures::future::pending().boxed()),
            Reporter { controller: "test".to_owned(), instance: None },
            EventMetrics::register(&mut metrics),
        );
        let pools = Api::all(client(|_| futures::future::pending().boxed()));
        let ipam = Arc::new(Ipam::new("n1", RoutingIds::default(), reflector::store().0, pools));
        let problems = EgressProblems::default();
        let locks = Arc::<ContainerLocks>::default();
        let deps = EgressDeps {
            inputs,
            gateways,
            pods: Arc::clone(&cached_pods),
            ipam,
            locks: Arc::clone(&locks),
            events: events.clone(),
            metrics: EgressMetrics::register(&mut metrics),
            problems: problems.clone(),
        };
        let socket = directory.path().join("s");
        let egress = Egress::start(deps, &socket, supervisor.subsystem("egress"));
        Self {
            supervisor,
            egress,
            gateways: fake,
            locks,
            egresses,
            services,
            pods,
            namespaces,
            cached_pods,
            events,
            problems,
            directory,
        }
    }

    /// Another program takes over.
    pub(crate) async fn restart(self, objects: Objects) -> Self {
        let Self { supervisor, gateways, directory, .. } = self;
        supervisor.shutdown(&["egress"], Duration::from_secs(5)).await;
        Self::beside(directory, gateways, objects)
    }

    /// An ADD, which has the container to itself as in `fairlead_pods::cni`.
    pub(crate) async fn add(&self, pod: &Pod, chosen: &[(&str, &str)]) -> Result<(), Failure> {
        self.add_labelled(pod, chosen, &[]).await
    }

    /// As [`Self::add`], of a pod with labels.
    pub(crate) async fn add_labelled(
        &self,
        pod: &Pod,
        chosen: &[(&str, &str)],
        labels: &[(&str, &str)],
    ) -> Result<(), Failure> {
        let _guard = self.locks.lock(&pod.key.container_id).await;
        let labels = labels.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned()));
        let mut request = EgressRequest {
            uid: Some("u1".to_owned()),
            annotations: annotations(chosen),
            labels: labels.collect(),
            ..EgressRequest::default()
        };
        self.egress.examine("shop", &mut request).await?;
        self.egress.attach(&pod.attachment(), pod.interface(), request).await
    }
}

fn annotations(chosen: &[(&str, &str)]) -> BTreeMap<String, String> {
    let named = |(namespace, names): &(&str, &str)| {
        (format!("egress.coil.cybozu.com/{namespace}"), (*names).to_owned())
    };
    chosen.iter().map(named).collect()
}

/// An Egress and its Service.
pub(crate) fn egress(of: &str, destinations: &[&str]) -> EgressObject {
    let EgressName { namespace, name } = name(of);
    serde_json::from_value(json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": { "namespace": namespace, "name": name },
        "spec": { "destinations": destinations }, "status": { "clusterRanges": [] },
    }))
    .unwrap()
}

pub(crate) fn service(of: &str, cluster_ips: &[&str]) -> Service {
    let EgressName { namespace, name } = name(of);
    serde_json::from_value(json!({
        "metadata": { "namespace": namespace, "name": name },
        "spec": {
            "clusterIPs": cluster_ips, "ports": [{ "port": 5555, "protocol": "UDP" }], "sessionAffinity": "ClientIP",
        },
    }))
    .unwrap()
}

/// The pod as a watch shows it.
pub(crate) fn shown(chosen: &[(&str, &str)], more: &Value) -> SlimPod {
    let mut pod = json!({
        "metadata": { "name": "web", "namespace": "shop", "uid": "u1", "annotations": annotations(chosen) },
        "status": { "podIPs": [] },
    });
    pod.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut pod = serde_json::from_value(pod).unwrap();
    pods::trimmed(&mut pod);
    pod
}

/// A pod with `eth0` to a node, which counts what comes.
pub(crate) struct Pod {
    pub(crate) inside: Namespace,
    node: Namespace,
    pub(crate) key: Key,
}

const NODE_RULES: &str = "
    table inet node {
        counter in_clear { }
        counter encapsulated { }
        counter from_fixed_port { }
        chain received { type filter hook prerouting priority raw;
            udp sport 5555 udp dport 5555 counter name from_fixed_port
            ip daddr 203.0.113.0/24 counter name in_clear drop
            ip daddr 192.168.10.0/24 counter name in_clear drop
            ip6 daddr 2001:db8::/32 counter name in_clear drop
            udp dport 5555 counter name encapsulated drop
        }
    }";

const OUTSIDE_RULES: &str = "
    table inet node {
        counter in_clear { }
        counter encapsulated { }
        chain received { type filter hook prerouting priority raw;
            udp dport 9 counter name in_clear drop
            udp dport 5555 counter name encapsulated drop
        }
    }";

impl Pod {
    pub(crate) fn new() -> Self {
        let (inside, node) = (Namespace::new(), Namespace::new());
        // The kernel would report link-local addresses of its own at any time.
        inside.sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode");
        inside.veth("eth0", &node, "host");
        let mac = node.sh("ip -br link show host | awk '{print $3}'").trim().to_owned();
        let [ipv4, ipv6] = POD;
        inside.sh(&format!(
            "ip addr add {ipv4}/32 dev eth0; ip -6 addr add {ipv6}/128 dev eth0 nodad
             ip route add 169.254.1.1 dev eth0; ip neigh add 169.254.1.1 lladdr {mac} dev eth0
             ip route add default via 169.254.1.1 dev eth0
             ip -6 neigh add fe80::1 lladdr {mac} dev eth0; ip -6 route add default via fe80::1 dev eth0"
        ));
        node.sh(&format!("nft '{NODE_RULES}'"));
        let key = Key { container_id: "c1".to_owned(), ifname: "eth0".to_owned() };
        Self { inside, node, key }
    }

    pub(crate) fn attachment(&self) -> Attachment {
        Attachment {
            key: self.key.clone(),
            netns: self.inside.path().into(),
            pod: Owner { namespace: "shop".to_owned(), name: "web".to_owned(), uid: Some("u1".to_owned()) },
        }
    }

    pub(crate) fn interface(&self) -> PodInterface {
        let addresses = POD.map(|text| text.parse().unwrap()).into_iter().collect();
        PodInterface { addresses, mtu: Some(1500) }
    }

    /// Packets that came to the node: `in_clear` or `encapsulated`, and of the latter those `from_fixed_port`.
    pub(crate) fn counted(&self, counter: &str) -> u64 {
        let listed = self.node.sh(&format!("nft list counter inet node {counter}"));
        listed.split_whitespace().skip_while(|word| *word != "packets").nth(1).unwrap().parse().unwrap()
    }

    /// Gives the node addresses behind the gateways, from which it reaches the pod by `eth0`, whose check of sources is strict. From then on
    /// only packets that the pod sends on its own, to port 9, count as in clear.
    pub(crate) fn open_from_outside(&self) {
        self.inside.sh("for name in all eth0; do echo 1 > /proc/sys/net/ipv4/conf/$name/rp_filter; done");
        let mac = self.inside.sh("ip -br link show eth0 | awk '{print $3}'").trim().to_owned();
        let [ipv4, ipv6] = POD;
        self.node.sh(&format!(
            "ip addr add 203.0.113.1/32 dev host; ip addr add 192.168.10.1/32 dev host
             ip -6 addr add 2001:db8::1/128 dev host nodad; ip -6 addr add fd10::1/128 dev host nodad
             ip neigh replace {ipv4} lladdr {mac} dev host; ip -6 neigh replace {ipv6} lladdr {mac} dev host
             ip route add {ipv4} dev host src 203.0.113.1; ip -6 route add {ipv6} dev host src 2001:db8::1
             nft delete table inet node; nft '{OUTSIDE_RULES}'"
        ));
    }

    /// Whether connections that the node opens to the pod are answered, of each family.
    pub(crate) fn answers_tcp(&self) -> [bool; 2] {
        POD.map(|address| {
            let address: std::net::IpAddr = address.parse().unwrap();
            let listener = self.inside.run(|| std::net::TcpListener::bind((address, 0)).unwrap());
            let to = listener.local_addr().unwrap();
            self.node.run(|| std::net::TcpStream::connect_timeout(&to, Duration::from_millis(100)).is_ok())
        })
    }

    /// Whether a datagram from an address of the node to the pod is answered.
    pub(crate) fn answers_udp(&self, from: &str) -> bool {
        let from: std::net::IpAddr = from.parse().unwrap();
        let address: std::net::IpAddr = POD[usize::from(from.is_ipv6())].parse().unwrap();
        let (pause, mut buffer) = (Some(Duration::from_millis(100)), [0; 1]);
        let pod = self.inside.run(|| std::net::UdpSocket::bind((address, 0)).unwrap());
        let node = self.node.run(|| std::net::UdpSocket::bind((from, 0)).unwrap());
        pod.set_read_timeout(pause).unwrap();
        node.set_read_timeout(pause).unwrap();
        node.send_to(b"x", pod.local_addr().unwrap()).unwrap();
        let Ok((_, peer)) = pod.recv_from(&mut buffer) else { return false };
        pod.send_to(b"y", peer).is_ok() && node.recv_from(&mut buffer).is_ok()
    }

    /// Sends a datagram from the node.
    pub(crate) fn send_from_outside(&self, from: &str, to: &str) {
        let socket = self.node.run(|| std::net::UdpSocket::bind(from).unwrap());
        socket.send_to(b"x", to).unwrap();
    }

    /// Sends a datagram; the errno of a refusal.
    pub(crate) fn send(&self, to: &str) -> Option<i32> {
        let to: std::net::SocketAddr = to.parse().unwrap();
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        self.inside.run(|| {
            let sent = std::net::UdpSocket::bind(any).and_then(|socket| socket.send_to(b"x", to));
            sent.err().and_then(|error| error.raw_os_error())
        })
    }

    /// Output of a command in the pod, in one line, without unreachable routes.
    pub(crate) fn shown(&self, command: &str) -> String {
        let output = self.inside.sh(command);
        let lines = output.lines().filter(|line| !line.starts_with("unreachable"));
        lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
    }

    /// Rules, routes, links and filters of egress in the pod.
    pub(crate) fn egress_state(&self) -> String {
        self.inside.sh(
            "ip rule; ip -6 rule; ip route show table 117; ip route show table 118; ip -6 route show table 117
             ip -6 route show table 118; ip -br link | grep fou || true
             for link in $(ip -br link | awk '/^fou/ {print $1}') eth0; do tc filter show dev $link egress || true; done
             tc filter show dev eth0 ingress || true",
        )
    }
}

/// Waits until a condition holds, and returns how long that took.
pub(crate) async fn within(limit: Duration, what: &str, condition: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    start.elapsed()
}
