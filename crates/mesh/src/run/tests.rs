use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fairlead_api::names::{ANNOTATION_ENDPOINT, ANNOTATION_KILO_KEEPALIVE};
use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_dataplane::kernel_watch::KernelWatch;
use fairlead_dataplane::wireguard::Preference;
use fairlead_keys::PrivateKey;
use fairlead_members::departures::Session;
use fairlead_members::membership::Membership;
use fairlead_members::state_file::StateFile;
use fairlead_members::{MemberSource, SourceProblem};
use fairlead_port_mapping::task::PortMappings;
use fairlead_topology::{Member, MemberRecord, Source};
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt as _};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::watcher::Event;
use tokio::sync::{mpsc, watch};

use super::*;
use crate::apply::reconciler::DeviceSlot;
use crate::gather::keys::Keys;
use crate::gather::network::{MeshIdentity, NetworkWatches};
use crate::model::nat64::Nat64Answer;
use crate::plan::desired::tests::{key, member};
use crate::tests::{FakeKernel, Shared, paths};

/// A source in memory that counts how often it is read.
struct CountedSource {
    members: Arc<Mutex<Vec<Member>>>,
    reads: Arc<AtomicUsize>,
    is_listed: Arc<AtomicBool>,
    changes: watch::Receiver<()>,
}

impl MemberSource for CountedSource {
    fn changed(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if self.changes.changed().await.is_err() {
                std::future::pending().await
            }
        })
    }

    fn is_ready(&self) -> bool {
        self.is_listed.load(Ordering::Relaxed)
    }

    /// A member has a bad endpoint.
    fn records(&mut self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        problems.push(bad_endpoint("node-0002"));
        let record = |member: &Member| MemberRecord {
            member: member.clone(),
            ..MemberRecord::of_node(Source::Kubernetes, "")
        };
        self.members.lock().unwrap().iter().map(record).collect()
    }
}

/// A node of a cluster with a mesh: its reader, and what the test changes.
struct Cluster {
    members: Arc<Mutex<Vec<Member>>>,
    reads: Arc<AtomicUsize>,
    is_listed: Arc<AtomicBool>,
    changed: watch::Sender<()>,
    api_server: watch::Sender<Option<Vec<std::net::SocketAddr>>>,
    meshes: Arc<Cache<WireKubeMesh>>,
    mesh_events: mpsc::UnboundedSender<Event<WireKubeMesh>>,
    _watches: Supervisor,
}

impl Cluster {
    async fn new() -> (Self, InputReader) {
        Self::with_state_in(Path::new("/nonexistent")).await
    }

    async fn with_state_in(directory: &Path) -> (Self, InputReader) {
        let mut watches = Supervisor::default();
        let annotations = serde_json::json!({ ANNOTATION_ENDPOINT: "bad", ANNOTATION_KILO_KEEPALIVE: "7" });
        let node = serde_json::json!({ "metadata": { "name": "node-0001", "annotations": annotations } });
        let node: Node = serde_json::from_value(node).unwrap();
        let (nodes, _) = cache(&mut watches, "Nodes", node).await;
        let (meshes, mesh_events) = cache(&mut watches, "WireKubeMeshes", mesh()).await;
        let (service_ranges, _) = cache(&mut watches, "ServiceCIDRs", services()).await;
        let members = Arc::new(Mutex::new(vec![member(2), member(3)]));
        let reads = Arc::new(AtomicUsize::new(0));
        let is_listed = Arc::new(AtomicBool::new(true));
        let (changed, changes) = watch::channel(());
        let (api_server, endpoints) = watch::channel(Some(Vec::new()));
        let source = CountedSource {
            members: Arc::clone(&members),
            reads: Arc::clone(&reads),
            is_listed: Arc::clone(&is_listed),
            changes,
        };
        let reader = InputReader::new(
            state_file(directory),
            nodes,
            Arc::clone(&meshes),
            service_ranges,
            Membership::new("node-0001".to_owned(), vec![Box::new(source)], Box::new(|_| Session::Never)),
            endpoints,
            NetworkWatches {
                port_mappings: watch::channel(PortMappings::default()).1,
                public_ipv4: watch::channel(None).1,
                nat64: watch::channel(Nat64Answer::default()).1,
                announced_sources: watch::channel(BTreeSet::new()).1,
                source_nodes: watch::channel(Some(Arc::default())).1,
                mesh_identity: MeshIdentity {
                    interface_id: None,
                    is_in_cluster: true,
                    cluster: watch::channel(None).1,
                    keys: watch::channel(Keys { public_key: key(1), ..Keys::new(PrivateKey([8; 32])) }).1,
                },
            },
        );
        let cluster =
            Self { members, reads, is_listed, changed, api_server, meshes, mesh_events, _watches: watches };
        (cluster, reader)
    }

    /// Deletes the mesh, or makes it again.
    async fn set_mesh(&self, exists: bool) {
        let event = if exists { Event::Apply(mesh()) } else { Event::Delete(mesh()) };
        self.mesh_events.send(event).unwrap();
        while self.meshes.store.is_empty() == exists {
            tokio::task::yield_now().await;
        }
    }

    fn reads(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }
}

fn bad_endpoint(node: &str) -> SourceProblem {
    SourceProblem::InvalidEndpoint {
        node: node.to_owned(),
        annotation: ANNOTATION_ENDPOINT,
        value: "bad".to_owned(),
    }
}

fn state_file(directory: &Path) -> StateFile {
    StateFile { directory: directory.to_owned(), node: "node-0001".to_owned() }
}

fn services() -> ServiceCIDR {
    let range = serde_json::json!({ "metadata": { "name": "kubernetes" }, "spec": { "cidrs": ["fd96::/112", "10.96.0.0/12"] } });
    serde_json::from_value(range).unwrap()
}

fn mesh() -> WireKubeMesh {
    let mesh = serde_json::json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh",
        "metadata": { "name": "default" }, "spec": {},
    });
    serde_json::from_value(mesh).unwrap()
}

async fn cache<K>(
    watches: &mut Supervisor,
    what: &'static str,
    object: K,
) -> (Arc<Cache<K>>, mpsc::UnboundedSender<Event<K>>)
where
    K: kube::runtime::reflector::Lookup<DynamicType = ()> + Clone + std::fmt::Debug + Send + Sync + 'static,
{
    let list = [Ok(Event::Init), Ok(Event::InitApply(object)), Ok(Event::InitDone)];
    let (sender, changes) = mpsc::unbounded_channel();
    let changes = stream::unfold(changes, |mut changes| async { Some((Ok(changes.recv().await?), changes)) });
    let events = stream::iter(list).chain(changes).chain(stream::pending());
    let cache = caches::start(watches.subsystem("caches"), what, events);
    while !cache.is_ready() {
        tokio::task::yield_now().await;
    }
    (Arc::new(cache), sender)
}

fn schedule() -> Schedule {
    Schedule::new(Instant::now())
}

/// A kernel that never changes by itself.
fn kernel_changes() -> KernelChanges {
    KernelWatch::default().subscribe(fairlead_dataplane::mesh::concerns)
}

fn reports() -> Arc<Reports> {
    Arc::new(Reports::new("self", None, false))
}

#[test]
fn failures_in_a_row_make_the_pause_longer_up_to_a_limit() {
    let pauses: Vec<u128> = [1, 2, 3, 6, 7, 1000].map(|n| retry_interval(n).as_millis()).to_vec();
    assert_eq!(pauses, [50, 100, 200, 1600, 2000, 2000]);
}

#[test]
fn steps_that_take_long_leave_the_processor_to_others_and_hold_up_no_step_of_the_other_kind() {
    let mut schedule = schedule();
    let (paths_at, began) = (schedule.paths_at, Instant::now());
    for (wake, took, pause) in [
        (Wake::Change, Duration::from_millis(1), MIN_PAUSE),
        (Wake::Change, Duration::from_millis(100), Duration::from_millis(400)),
        (Wake::Sweep, Duration::from_secs(1), MAX_PAUSE),
    ] {
        let before = Instant::now();
        schedule.rest(wake, took);
        assert!((before + pause..=Instant::now() + pause).contains(&schedule.reconcile_at));
    }
    assert_eq!(schedule.paths_at, paths_at);
    let reconcile_at = schedule.reconcile_at;
    schedule.rest(Wake::Paths, Duration::from_millis(20));
    assert!(schedule.paths_at >= began + Duration::from_millis(400));
    assert_eq!(schedule.reconcile_at, reconcile_at);
}

/// Endpoints that answer must not wait until a node that has much to reconcile has rested.
#[tokio::test]
async fn an_endpoint_is_set_while_reconciliation_rests() {
    let (cluster, mut reader) = Cluster::new().await;
    let (mut schedule, reports, mut kernel) = (schedule(), reports(), kernel_changes());
    assert!(matches!(schedule.work(Wake::Sweep, &mut reader, &reports), Some(Work::Reconcile(_))));
    schedule.rest(Wake::Sweep, Duration::from_secs(1));
    schedule.sweep_at = Instant::now() + SWEEP_INTERVAL;
    cluster.changed.send_replace(());
    let driver = paths();
    driver.port().with_agent(|agent| {
        let paths = fairlead_path::PeerPaths {
            candidates: vec![fairlead_path::Candidate {
                address: "192.0.2.2:51820".parse().unwrap(),
                source: fairlead_path::Source::Host,
            }],
            ..Default::default()
        };
        agent.upsert_peer(Duration::ZERO, key(2), paths);
        agent.observe(Duration::ZERO, &key(2), fairlead_path::Observation::default());
    });
    assert_eq!(schedule.next(&mut reader, &mut kernel, driver.port()).await, Wake::Paths);
    assert_eq!(driver.port().take_due(false).endpoints.len(), 1);
    assert_ne!(schedule.next(&mut reader, &mut kernel, driver.port()).await, Wake::Paths);
}

#[tokio::test]
async fn only_a_change_of_the_inputs_is_reconciled_and_a_sweep_reads_no_objects() {
    let (cluster, mut reader) = Cluster::new().await;
    let (mut schedule, reports) = (schedule(), reports());
    let mut work = |wake| schedule.work(wake, &mut reader, &reports);
    assert!(matches!(work(Wake::Sweep), Some(Work::Reconcile(_))), "the start");
    assert!(work(Wake::Change).is_none(), "nothing is different");
    assert_eq!(cluster.reads(), 2);
    assert!(matches!(work(Wake::Sweep), Some(Work::Reconcile(_))));
    assert!(matches!(work(Wake::Paths), Some(Work::WakePaths { .. })));
    assert_eq!(cluster.reads(), 2);
    cluster.members.lock().unwrap().push(member(4));
    let Some(Work::Reconcile(inputs)) = work(Wake::Change) else { panic!("a new member") };
    assert_eq!(inputs.members.len(), 4, "with this node");
}

#[tokio::test]
async fn without_an_answer_of_the_api_server_the_paths_rest_and_the_reason_is_known() {
    let (cluster, mut reader) = Cluster::new().await;
    let (mut schedule, reports) = (schedule(), reports());
    cluster.api_server.send_replace(None);
    assert!(schedule.work(Wake::Sweep, &mut reader, &reports).is_none());
    assert_eq!(reports.snapshot().failure, Some(MeshFailure::WaitingForApiServer));
    assert!(schedule.sweep_at > Instant::now() && schedule.inputs.is_none());
}

#[tokio::test]
async fn a_mesh_that_is_deleted_is_removed_once_and_one_that_comes_back_is_made() {
    let (cluster, mut reader) = Cluster::new().await;
    let (mut schedule, reports) = (schedule(), reports());
    let mut work = |schedule: &mut Schedule, wake| schedule.work(wake, &mut reader, &reports);
    assert!(matches!(work(&mut schedule, Wake::Sweep), Some(Work::Reconcile(_))));
    cluster.set_mesh(false).await;
    assert!(matches!(work(&mut schedule, Wake::Change), Some(Work::Disable)));
    schedule.is_disabled = true;
    assert!(work(&mut schedule, Wake::Sweep).is_none(), "there is nothing left to remove");
    assert_eq!(reports.snapshot().failure, Some(MeshFailure::NoMesh));
    cluster.set_mesh(true).await;
    assert!(matches!(work(&mut schedule, Wake::Change), Some(Work::Reconcile(_))));
}

#[tokio::test]
async fn timers_of_paths_read_no_objects_plan_nothing_and_dump_nothing() {
    let (cluster, reader) = Cluster::new().await;
    let (kernel, reports) = (Shared::default(), reports());
    let device = DeviceSlot::new(Preference::Auto, PathBuf::from("/nonexistent"));
    let mesh = Mesh::new(FakeKernel(Arc::clone(&kernel)), device, paths());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stopped = async { drop(stopped.await) };
    let task = tokio::spawn(run(reader, kernel_changes(), mesh, Arc::clone(&reports), stopped));
    // Each step that is no sweep is a wake of the paths: their peers do not answer.
    let path_wakes = || {
        let kernel = kernel.lock().unwrap();
        kernel.states_read.saturating_sub(kernel.networks_read)
    };
    while path_wakes() < 3 {
        sleep(MIN_PAUSE).await;
    }
    assert_eq!(cluster.reads(), 1);
    let before = kernel.lock().unwrap().networks_read;
    cluster.members.lock().unwrap().push(member(4));
    cluster.changed.send_replace(());
    while reports.snapshot().report.is_none_or(|report| report.peers.len() < 3) {
        sleep(MIN_PAUSE).await;
    }
    assert_eq!(cluster.reads(), 2);
    drop(stop);
    let mesh = task.await.unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!((mesh.plans(), kernel.applied.len()), (2, 2));
    // The first one leads packets before the device has peers, and once it has them.
    assert_eq!(kernel.mesh_reads, kernel.networks_read + 1, "only reconciliation dumps anything");
    assert!(kernel.networks_read > before && reports.snapshot().failure.is_none());
}

#[tokio::test]
async fn without_the_api_server_the_mesh_is_as_it_was_saved() {
    let directory = tempfile::tempdir().unwrap();
    let now = Instant::now();
    let (_before, mut reader) = Cluster::with_state_in(directory.path()).await;
    let live = Arc::new(reader.read(now).unwrap());
    reader.keep(&live);
    let unsaved = reader.unsaved().borrow().clone().unwrap();
    state_file(directory.path()).write(&unsaved, (Instant::now(), jiff::Timestamp::UNIX_EPOCH)).unwrap();

    let (cluster, mut reader) = Cluster::with_state_in(directory.path()).await;
    cluster.api_server.send_replace(None);
    assert_eq!(reader.read(now), Err(MeshFailure::WaitingForApiServer), "it may be about to answer");
    let later = Instant::now() + Duration::from_secs(4);
    let saved = reader.read(later).unwrap();
    assert_eq!((&saved.members, &saved.settings), (&live.members, &live.settings));
    let services: Vec<ipnet::IpNet> = vec!["10.96.0.0/12".parse().unwrap(), "fd96::/112".parse().unwrap()];
    assert_eq!((&live.services, &saved.services), (&services, &services));
    let problems = &saved.problems;
    assert!(matches!(problems[..], [_, SourceProblem::ApiServerSilent { .. }]), "{problems:?}");
    reader.keep(&Arc::new(saved));
    assert!(reader.unsaved().borrow().is_none(), "it would be saved as current");
    cluster.api_server.send_replace(Some(Vec::new()));
    assert_eq!(reader.read(later).as_ref(), Ok(&*live));
    reader.forget();
    assert!(state_file(directory.path()).read((Instant::now(), jiff::Timestamp::now())).unwrap().is_none());
}

#[tokio::test]
async fn what_a_member_had_that_is_missing_after_a_restart_is_guarded_and_that_is_saved() {
    let directory = tempfile::tempdir().unwrap();
    let now = || (Instant::now(), jiff::Timestamp::now());
    let (_before, mut reader) = Cluster::with_state_in(directory.path()).await;
    let live = Arc::new(reader.read(Instant::now()).unwrap());
    reader.keep(&live);
    let unsaved = reader.unsaved().borrow().clone().unwrap();
    state_file(directory.path()).write(&unsaved, now()).unwrap();
    for _ in 0..2 {
        let (cluster, mut reader) = Cluster::with_state_in(directory.path()).await;
        cluster.members.lock().unwrap().pop();
        let inputs = Arc::new(reader.read(Instant::now()).unwrap());
        assert!(!inputs.members.iter().any(|member| member.name == "node-0003"));
        let guarded: Vec<_> = inputs.departures.guarded(true, |_, _| true).copied().collect();
        assert_eq!(guarded, member(3).claims, "it is not in the list of the cluster any more");
        assert!(inputs.problems.iter().any(|problem| problem.reason() == "MemberMissing"));
        // From now on the file knows it by this alone.
        reader.keep(&inputs);
        let unsaved = reader.unsaved().borrow().clone().unwrap();
        state_file(directory.path()).write(&unsaved, now()).unwrap();
    }
}

#[tokio::test]
async fn what_was_saved_long_ago_is_not_guarded_for_a_day_because_it_was_used_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let (before, mut reader) = Cluster::with_state_in(directory.path()).await;
    before.members.lock().unwrap()[1].blocks = vec!["10.64.3.0/27".parse().unwrap()];
    let live = Arc::new(reader.read(Instant::now()).unwrap());
    reader.keep(&live);
    let unsaved = reader.unsaved().borrow().clone().unwrap();
    state_file(directory.path()).write(&unsaved, (Instant::now(), jiff::Timestamp::UNIX_EPOCH)).unwrap();

    let (cluster, mut reader) = Cluster::with_state_in(directory.path()).await;
    cluster.api_server.send_replace(None);
    let later = Instant::now() + Duration::from_secs(4);
    let saved = Arc::new(reader.read(later).unwrap());
    assert_eq!(saved.members, live.members);
    reader.keep(&saved);
    cluster.members.lock().unwrap().pop();
    cluster.api_server.send_replace(Some(Vec::new()));
    let inputs = reader.read(later).unwrap();
    assert_eq!(inputs.departures.guarded(true, |_, _| true).count(), 0);
}

#[tokio::test]
async fn an_api_server_that_answers_slowly_has_a_minute_before_older_facts_are_used() {
    let directory = tempfile::tempdir().unwrap();
    let (_before, mut reader) = Cluster::with_state_in(directory.path()).await;
    let live = Arc::new(reader.read(Instant::now()).unwrap());
    reader.keep(&live);
    let unsaved = reader.unsaved().borrow().clone().unwrap();
    state_file(directory.path()).write(&unsaved, (Instant::now(), jiff::Timestamp::UNIX_EPOCH)).unwrap();

    let (cluster, mut reader) = Cluster::with_state_in(directory.path()).await;
    cluster.is_listed.store(false, Ordering::Relaxed);
    let after = |seconds| Instant::now() + Duration::from_secs(seconds);
    assert_eq!(reader.read(after(50)), Err(MeshFailure::WaitingForApiServer));
    assert_eq!(reader.read(after(61)).unwrap().members, live.members);
}

/// Peers may cause any number of problems, and of a long list the end is left out.
#[tokio::test]
async fn problems_of_this_node_come_before_those_of_peers() {
    let (_cluster, mut reader) = Cluster::new().await;
    let inputs = reader.read(Instant::now()).unwrap();
    assert_eq!(inputs.problems, [bad_endpoint("node-0001"), bad_endpoint("node-0002")]);
}

#[tokio::test]
async fn the_keepalive_of_kilo_s_annotation_is_read() {
    let (_cluster, mut reader) = Cluster::new().await;
    assert_eq!(reader.read(Instant::now()).unwrap().own.keepalive, Some(7));
}
