//! Attachments of this node's pods, with the places of their network namespaces.
//!
//! An ADD says it, and one file for each attachment keeps it for later programs (`fairlead_wire::spool`): also for pods that get their
//! annotation while they run, and behind another CNI plugin, which keeps its own records. A pod of before the first file is looked
//! for among the namespaces of the container runtime, by its addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fairlead_address::DualStackAddrs;
use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::annotation::chosen;
use fairlead_ipam::Key;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::RouteSocket;
use fairlead_wire::spool;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::registrar::Client;
use super::without_egress::WithoutEgress;

/// The interface of a pod in Kubernetes.
const IFNAME: &str = "eth0";
/// Largest file that is read, in bytes: more than the annotations of any pod (256 KiB) take in JSON.
const MAX_FILE: u64 = 2 << 20;

/// An attachment of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sandbox {
    /// The pod's namespace in Kubernetes.
    pub(crate) namespace: String,
    /// The pod's name.
    pub(crate) pod: String,
    /// The pod's UID; `None` of runtimes that do not pass it.
    pub(crate) uid: Option<String>,
    /// File of the network namespace.
    pub(crate) netns: PathBuf,
    /// The interface by which packets leave.
    pub(crate) ifname: String,
    /// The addresses of that interface.
    pub(crate) addresses: Vec<IpAddr>,
    /// MTU of that interface in bytes.
    pub(crate) mtu: u32,
    /// The pod's egress annotations at the ADD, which count until the watch shows the pod.
    #[serde(default)]
    pub(crate) annotations: BTreeMap<String, String>,
    /// The Egress of which the pod is a gateway.
    #[serde(default)]
    pub(crate) gateway_of: Option<String>,
    /// Egresses that select the pod by its labels, as `NAMESPACE/NAME`; they count until the watch shows the pod.
    #[serde(default)]
    pub(crate) selected: BTreeSet<String>,
    /// Egresses at whose gateways the pod may be registered: a later program tells them if it is no client any more.
    #[serde(default)]
    pub(crate) clients_of: BTreeSet<String>,
    /// Egresses of its last plan, those among `clients_of` that the kernel leads to; `None` if no program has recorded them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) planned: Option<BTreeSet<String>>,
}

/// Most Egresses in [`Sandbox::clients_of`]; beyond, only those that it is a client of now are kept.
const MAX_CLIENTS_OF: usize = 64;

impl Sandbox {
    /// The addresses, one of each family.
    pub(crate) fn addresses(&self) -> DualStackAddrs {
        self.addresses.iter().copied().collect()
    }

    /// ID of the pod at gateways: its UID, or `NAMESPACE/NAME` where the runtime passes none.
    pub(crate) fn uid(&self) -> String {
        self.uid.clone().unwrap_or_else(|| format!("{}/{}", self.namespace, self.pod))
    }

    /// Pod of the attachment as a client of gateways.
    pub(crate) fn client(&self) -> Client {
        Client {
            uid: self.uid(),
            namespace: self.namespace.clone(),
            name: self.pod.clone(),
            addresses: self.addresses(),
        }
    }

    /// The Egresses that select the pod.
    pub(crate) fn selected(&self) -> BTreeSet<EgressName> {
        self.selected.iter().filter_map(|text| EgressName::parse(text)).collect()
    }

    /// Whether both are one attachment in one place, whatever its pod asks for.
    pub(crate) fn is_same_place(&self, other: &Self) -> bool {
        let Self { annotations, selected, clients_of, planned, .. } = other.clone();
        *other == Self { annotations, selected, clients_of, planned, ..self.clone() }
    }

    /// Egresses that the pod is a client of until another plan is made. An earlier program has recorded only all that it had ever been a
    /// client of.
    pub(crate) fn planned(&self) -> BTreeSet<EgressName> {
        let texts = self.planned.as_ref().unwrap_or(&self.clients_of);
        texts.iter().filter_map(|text| EgressName::parse(text)).collect()
    }

    /// With what its pod asks for now, and the Egresses that it is a client of, unless these are not known yet.
    fn asking(
        &self,
        annotations: BTreeMap<String, String>,
        selected: &BTreeSet<EgressName>,
        clients_of: Option<&BTreeSet<EgressName>>,
    ) -> Self {
        let texts =
            |all: &BTreeSet<EgressName>| all.iter().map(EgressName::to_string).collect::<BTreeSet<_>>();
        let asking = Self { annotations, selected: texts(selected), ..self.clone() };
        let Some(now) = clients_of.map(texts) else { return asking };
        let mut all: BTreeSet<String> = self.clients_of.union(&now).cloned().collect();
        if all.len() > MAX_CLIENTS_OF {
            all.clone_from(&now);
        }
        // Files of pods that never were clients stay as they are.
        let planned = (!all.is_empty()).then_some(now);
        Self { clients_of: all, planned, ..asking }
    }

    /// Whether it is an attachment of this pod, and not of an earlier one of the same name.
    pub(crate) fn is_of(&self, pod: &SlimPod) -> bool {
        (self.namespace == pod.namespace() && self.pod == pod.name())
            && self.uid.as_ref().is_none_or(|uid| pod.uids().contains(uid))
    }
}

/// The attachments of this node's pods.
#[derive(Clone)]
pub(crate) struct Sandboxes {
    directory: Arc<PathBuf>,
    without_egress: Arc<WithoutEgress>,
    known: Arc<Mutex<BTreeMap<Key, Arc<Sandbox>>>>,
    changes: Arc<watch::Sender<()>>,
}

impl Sandboxes {
    /// Attachments of a socket, as the last program left them, and the Egresses whose gateways may have their pods as clients. What cannot be
    /// read, or is of a namespace that is gone, is left out; the Egresses of the latter are not: their gateways may still have the pod.
    pub(crate) fn load(socket: &Path) -> (Self, BTreeSet<EgressName>) {
        let directory = spool::sandboxes(socket);
        let mut known = BTreeMap::new();
        let mut used = BTreeSet::new();
        for (key, file) in files(&directory) {
            let read = read(&file);
            if let Ok(sandbox) = &read {
                used.extend(chosen(&sandbox.annotations).unwrap_or_default());
                let others = sandbox.selected.iter().chain(&sandbox.clients_of);
                used.extend(others.filter_map(|text| EgressName::parse(text)));
            }
            match read {
                Ok(sandbox) if sandbox.netns.exists() => drop(known.insert(key, Arc::new(sandbox))),
                Ok(_) => drop(fs::remove_file(&file)),
                Err(error) => {
                    tracing::warn!(file = %file.display(), %error, "cannot read where a pod is; it is looked for");
                    let _ = fs::remove_file(&file);
                }
            }
        }
        let changes = Arc::new(watch::Sender::new(()));
        let without_egress = Arc::new(WithoutEgress::beside(socket));
        let known = Arc::new(Mutex::new(known));
        (Self { directory: Arc::new(directory), without_egress, known, changes }, used)
    }

    /// Adds one, or replaces it.
    ///
    /// # Errors
    /// The file cannot be written; it is known until the program ends.
    pub(crate) fn add(&self, key: &Key, sandbox: Sandbox) -> io::Result<()> {
        let text = serde_json::to_vec(&sandbox)?;
        self.lock().insert(key.clone(), Arc::new(sandbox));
        self.changes.send_replace(());
        self.write(key, text)
    }

    /// Records what the pod of an attachment asks for now, and of which Egresses it is a client, if that is new; `None` of these is not known
    /// yet, and leaves what is recorded. No other part is told of it: it is for later programs.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn record(
        &self,
        key: &Key,
        annotations: BTreeMap<String, String>,
        selected: &BTreeSet<EgressName>,
        clients_of: Option<&BTreeSet<EgressName>>,
    ) -> io::Result<()> {
        let mut all = self.lock();
        let Some(known) = all.get_mut(key) else { return Ok(()) };
        let now = known.asking(annotations, selected, clients_of);
        if now == **known {
            return Ok(());
        }
        let text = serde_json::to_vec(&now)?;
        *known = Arc::new(now);
        // Under the lock: a file must not come after the removal of its attachment.
        self.write(key, text)
    }

    fn write(&self, key: &Key, text: Vec<u8>) -> io::Result<()> {
        let Some(name) = spool::file_name(&key.container_id, &key.ifname) else { return Ok(()) };
        DirBuilder::new().recursive(true).mode(0o700).create(&*self.directory)?;
        // A name without a colon is no attachment's: a file that is not complete is not read.
        let new = self.directory.join(format!("{}.new", name.replace(':', "_")));
        fs::write(&new, text)?;
        fs::rename(new, self.directory.join(name))
    }

    /// Remembers one that was found, without a file.
    pub(crate) fn found(&self, key: Key, sandbox: Sandbox) {
        self.lock().insert(key, Arc::new(sandbox));
        self.changes.send_replace(());
    }

    /// Forgets one and returns it.
    pub(crate) fn remove(&self, key: &Key) -> Option<Arc<Sandbox>> {
        let mut all = self.lock();
        if let Some(name) = spool::file_name(&key.container_id, &key.ifname) {
            match fs::remove_file(self.directory.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(container = key.container_id, %error, "the record of where a pod was remains");
                }
                _ => {}
            }
        }
        let removed = all.remove(key);
        drop(all);
        if removed.is_some() {
            self.changes.send_replace(());
        }
        removed
    }

    /// One of them.
    pub(crate) fn get(&self, key: &Key) -> Option<Arc<Sandbox>> {
        self.lock().get(key).cloned()
    }

    /// Pods that asked for no gateways when they were attached.
    pub(crate) fn without_egress(&self) -> &WithoutEgress {
        &self.without_egress
    }

    /// Whether another interface of the same container is one of them.
    pub(crate) fn has_other_interface(&self, key: &Key) -> bool {
        let is_other = |other: &Key| other.container_id == key.container_id && other.ifname != key.ifname;
        self.lock().keys().any(is_other)
    }

    /// All of them.
    pub(crate) fn all(&self) -> BTreeMap<Key, Arc<Sandbox>> {
        self.lock().clone()
    }

    /// Sees every change from now on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, Arc<Sandbox>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(file: &Path) -> io::Result<Sandbox> {
    if file.metadata()?.len() > MAX_FILE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("more than {MAX_FILE} bytes")));
    }
    Ok(parse(&fs::read(file)?)?)
}

/// The content of a file.
pub(crate) fn parse(content: &[u8]) -> serde_json::Result<Sandbox> {
    serde_json::from_slice(content)
}

fn files(directory: &Path) -> Vec<(Key, PathBuf)> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(%error, "cannot read where the pods are; they are looked for");
            }
            return Vec::new();
        }
    };
    let key = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let (container_id, ifname) = spool::parse_file_name(name.to_str()?)?;
        let key = Key { container_id: container_id.to_owned(), ifname: ifname.to_owned() };
        Some((key, entry.path()))
    };
    entries.flatten().filter_map(key).collect()
}

/// Looks for the namespace with a pod's addresses among those of container runtimes. Blocks on the kernel.
pub(crate) fn locate(directories: &[&Path], pod: &SlimPod) -> Option<Sandbox> {
    let wanted = pod.addresses();
    let entries = directories.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten().flatten();
    entries.map(|entry| entry.path()).find_map(|path| {
        let netns = Netns::open(&path).ok()?;
        let mut socket = RouteSocket::open_in(&netns).ok()?;
        let link = socket.link_by_name(IFNAME).ok()??;
        let found = socket.addresses_on(link.index).ok()?;
        let has = |ip: &IpAddr| found.iter().any(|address| address.prefix.addr() == *ip);
        (!wanted.is_empty() && wanted.iter().all(has)).then(|| Sandbox {
            namespace: pod.namespace().to_owned(),
            pod: pod.name().to_owned(),
            uid: pod.uids().into_iter().next(),
            netns: path,
            ifname: IFNAME.to_owned(),
            addresses: wanted.clone(),
            mtu: link.mtu,
            annotations: BTreeMap::new(),
            gateway_of: pod.gateway_of().map(str::to_owned),
            selected: BTreeSet::new(),
            clients_of: BTreeSet::new(),
            planned: None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> Key {
        Key { container_id: id.to_owned(), ifname: "eth0".to_owned() }
    }

    pub(crate) fn sandbox(netns: &Path) -> Sandbox {
        Sandbox {
            namespace: "shop".to_owned(),
            pod: "web".to_owned(),
            uid: Some("u1".to_owned()),
            netns: netns.to_owned(),
            ifname: "eth0".to_owned(),
            addresses: vec!["10.1.0.5".parse().unwrap()],
            mtu: 1420,
            annotations: BTreeMap::from([("egress.coil.cybozu.com/n".to_owned(), "a".to_owned())]),
            gateway_of: None,
            selected: BTreeSet::new(),
            clients_of: BTreeSet::new(),
            planned: None,
        }
    }

    #[test]
    fn what_a_running_pod_asks_for_is_known_to_a_later_program() {
        let directory = tempfile::tempdir().unwrap();
        let (socket, netns) = (directory.path().join("s"), directory.path().join("netns"));
        fs::write(&netns, "").unwrap();
        let (sandboxes, _) = Sandboxes::load(&socket);
        let first = Sandbox { annotations: BTreeMap::new(), ..sandbox(&netns) };
        sandboxes.add(&key("a"), first.clone()).unwrap();
        let mut changes = sandboxes.subscribe();
        changes.mark_unchanged();
        let of = |name: &str| EgressName { namespace: "n".to_owned(), name: name.to_owned() };
        let annotations = BTreeMap::from([("egress.coil.cybozu.com/n".to_owned(), "b".to_owned())]);
        let clients = BTreeSet::from([of("b"), of("c")]);
        sandboxes.record(&key("a"), annotations.clone(), &BTreeSet::from([of("c")]), Some(&clients)).unwrap();
        assert!(!changes.has_changed().unwrap() && sandboxes.get(&key("a")).unwrap().is_same_place(&first));
        // It asks for nothing any more, but gateways may not have been told yet.
        sandboxes.record(&key("a"), BTreeMap::new(), &BTreeSet::new(), Some(&BTreeSet::new())).unwrap();
        let (again, used) = Sandboxes::load(&socket);
        assert_eq!(used, clients);
        assert_eq!(again.get(&key("a")).unwrap().annotations, BTreeMap::new());
        assert_eq!(again.get(&key("a")).unwrap().planned(), BTreeSet::new());
        sandboxes.remove(&key("a"));
        sandboxes.record(&key("a"), annotations, &clients, Some(&clients)).unwrap();
        assert!(Sandboxes::load(&socket).0.all().is_empty());
    }

    #[test]
    fn the_egresses_of_the_last_plan_stay_recorded_while_it_is_not_known_what_a_pod_asks_for() {
        let directory = tempfile::tempdir().unwrap();
        let (socket, netns) = (directory.path().join("s"), directory.path().join("netns"));
        fs::write(&netns, "").unwrap();
        let (sandboxes, _) = Sandboxes::load(&socket);
        let of = |name: &str| EgressName { namespace: "n".to_owned(), name: name.to_owned() };
        // An earlier program recorded only which gateways may have the pod.
        let clients_of = BTreeSet::from(["n/a".to_owned(), "n/b".to_owned()]);
        sandboxes.add(&key("a"), Sandbox { clients_of, ..sandbox(&netns) }).unwrap();
        let planned = |sandboxes: &Sandboxes| sandboxes.get(&key("a")).unwrap().planned();
        assert_eq!(planned(&Sandboxes::load(&socket).0), BTreeSet::from([of("a"), of("b")]));
        let record = |clients_of: Option<&BTreeSet<EgressName>>| {
            sandboxes.record(&key("a"), BTreeMap::new(), &BTreeSet::new(), clients_of).unwrap();
        };
        record(Some(&BTreeSet::from([of("b")])));
        record(None);
        let (again, used) = Sandboxes::load(&socket);
        assert_eq!(planned(&again), BTreeSet::from([of("b")]));
        assert_eq!(used, BTreeSet::from([of("a"), of("b")]), "gateways of both are told");
    }

    #[test]
    fn what_an_add_said_is_known_after_a_restart_while_the_namespace_exists() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let netns = directory.path().join("netns");
        fs::write(&netns, "").unwrap();
        let (sandboxes, used) = Sandboxes::load(&socket);
        assert_eq!(used, BTreeSet::new());
        let mut changes = sandboxes.subscribe();
        sandboxes.add(&key("a"), sandbox(&netns)).unwrap();
        sandboxes.add(&key("gone"), sandbox(&directory.path().join("gone"))).unwrap();
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        fs::write(spool::sandboxes(&socket).join("broken:eth0"), "{").unwrap();
        let (again, used) = Sandboxes::load(&socket);
        let egress = EgressName { namespace: "n".to_owned(), name: "a".to_owned() };
        assert_eq!(used, BTreeSet::from([egress]), "also of the one that is gone");
        assert_eq!(again.all(), BTreeMap::from([(key("a"), Arc::new(sandbox(&netns)))]));
        assert_eq!(again.remove(&key("a")).as_deref(), Some(&sandbox(&netns)));
        assert_eq!(again.remove(&key("a")), None);
        assert!(Sandboxes::load(&socket).0.all().is_empty());
        assert_eq!(files(&spool::sandboxes(&socket)), []);
    }

    #[test]
    fn a_pod_of_the_same_name_may_be_a_later_one() {
        let pod = |uid: &str| {
            let metadata = serde_json::json!({ "name": "web", "namespace": "shop", "uid": uid });
            serde_json::from_value::<SlimPod>(serde_json::json!({ "metadata": metadata })).unwrap()
        };
        let mut sandbox = sandbox(Path::new("/ns"));
        assert!(sandbox.is_of(&pod("u1")) && !sandbox.is_of(&pod("u2")));
        sandbox.uid = None;
        assert!(sandbox.is_of(&pod("u2")));
        assert_eq!(sandbox.uid(), "shop/web");
    }
}
