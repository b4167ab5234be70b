//! Debian's etcd, replicas that are programs of their own, and connections between them that can be cut.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fairlead_wire::discovery::server as wire;
use fairlead_wire::discovery::server::cluster_client::ClusterClient;
use fairlead_wire::discovery::server::{
    Affiliate, AffiliateDeleteRequest, AffiliateUpdateRequest, ListRequest, WatchRequest, WatchResponse,
};
use testbed_cache::{debian, free_port};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// Bounds a test that hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(40);
const POLL: Duration = Duration::from_millis(50);

pub(crate) fn free_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free_port().unwrap()).into()
}

/// Waits until `is` gives a value.
pub(crate) async fn until<T>(what: &str, mut is: impl AsyncFnMut() -> Option<T>) -> T {
    let wait = async {
        loop {
            match is().await {
                Some(value) => return value,
                None => sleep(POLL).await,
            }
        }
    };
    timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("in vain: {what}"))
}

/// Killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Certificates of etcd and its clients, of one authority.
pub(crate) struct Certificates {
    pub(crate) authority: PathBuf,
    pub(crate) chain: PathBuf,
    pub(crate) key: PathBuf,
}

impl Certificates {
    pub(crate) fn make(directory: &Path) -> Self {
        let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority_key = rcgen::KeyPair::generate().unwrap();
        let authority_pem = authority.self_signed(&authority_key).unwrap().pem();
        let issuer = rcgen::Issuer::new(authority, authority_key);
        let mut leaf = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        leaf.extended_key_usages =
            vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth, rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().unwrap();
        let chain = leaf.signed_by(&key, &issuer).unwrap().pem();
        let write = |name: &str, pem: String| {
            let path = directory.join(name);
            fs::write(&path, pem).unwrap();
            path
        };
        Self {
            authority: write("ca.crt", authority_pem),
            chain: write("tls.crt", chain),
            key: write("tls.key", key.serialize_pem()),
        }
    }
}

/// A member of etcd, most often the only one, whose data survives its process.
pub(crate) struct Etcd {
    directory: tempfile::TempDir,
    name: String,
    /// All members: their names, and where they listen for each other.
    members: String,
    pub(crate) client: SocketAddr,
    peer: SocketAddr,
    certificates: Option<Certificates>,
    process: Option<Process>,
}

impl Etcd {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| None).await
    }

    pub(crate) async fn start_with_tls() -> Self {
        Self::start_with(|directory| Some(Certificates::make(directory))).await
    }

    async fn start_with(certificates: impl FnOnce(&Path) -> Option<Certificates>) -> Self {
        let mut etcd = Self::new("default", certificates);
        etcd.members = etcd.member();
        etcd.begin().await;
        etcd
    }

    /// Three members, each of which has a third of the votes.
    pub(crate) async fn start_three() -> [Self; 3] {
        let mut all = ["one", "two", "three"].map(|name| Self::new(name, |_| None));
        let members = all.each_ref().map(Self::member).join(",");
        for etcd in &mut all {
            etcd.members.clone_from(&members);
            etcd.spawn();
        }
        for etcd in &all {
            etcd.until_healthy().await;
        }
        all
    }

    fn new(name: &str, certificates: impl FnOnce(&Path) -> Option<Certificates>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let certificates = certificates(directory.path());
        let (client, peer) = (free_address(), free_address());
        let name = name.to_owned();
        Self { directory, name, members: String::new(), client, peer, certificates, process: None }
    }

    fn member(&self) -> String {
        format!("{}=http://{}", self.name, self.peer)
    }

    pub(crate) fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().unwrap()
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.client)
    }

    /// As a power cut.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    /// Begins again with nothing, as another cluster.
    pub(crate) async fn empty(&mut self) {
        self.kill();
        fs::remove_dir_all(self.directory.path().join("data")).unwrap();
        self.begin().await;
    }

    pub(crate) async fn begin(&mut self) {
        self.spawn();
        self.until_healthy().await;
    }

    /// Waits until it answers, for which more than half of the members are needed.
    pub(crate) async fn until_healthy(&self) {
        until("etcd answers", async || self.try_ctl(&["endpoint", "health"]).ok()).await;
    }

    /// Whether it leads the others.
    pub(crate) fn is_leader(&self) -> bool {
        let status = &self.status()["Status"];
        status["leader"] == status["header"]["member_id"]
    }

    pub(crate) fn spawn(&mut self) {
        let mut command = Command::new(debian::program("etcd-server", "/usr/bin/etcd").unwrap());
        let (url, peer) = (self.url(), format!("http://{}", self.peer));
        command
            .arg(format!("--data-dir={}", self.directory.path().join("data").display()))
            .arg(format!("--listen-client-urls={url}"))
            .arg(format!("--advertise-client-urls={url}"))
            .arg(format!("--listen-peer-urls={peer}"))
            .arg(format!("--initial-advertise-peer-urls={peer}"))
            .arg(format!("--name={}", self.name))
            .arg(format!("--initial-cluster={}", self.members));
        if let Some(files) = &self.certificates {
            command
                .arg("--client-cert-auth")
                .arg(format!("--trusted-ca-file={}", files.authority.display()))
                .arg(format!("--cert-file={}", files.chain.display()))
                .arg(format!("--key-file={}", files.key.display()));
        }
        let log = fs::File::create(self.directory.path().join("log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        self.process = Some(Process(child));
    }

    /// Runs etcdctl.
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        self.try_ctl(arguments).unwrap()
    }

    /// Writes a value of any bytes.
    pub(crate) fn put(&self, key: &str, value: &[u8], lease: &str) {
        let path = self.directory.path().join("value");
        fs::write(&path, value).unwrap();
        let mut command = self.command(&["put", lease, key]).unwrap();
        debian::output(command.stdin(fs::File::open(&path).unwrap())).unwrap();
    }

    fn try_ctl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        debian::output(&mut self.command(arguments)?)
    }

    fn command(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(debian::program("etcd-client", "/usr/bin/etcdctl")?);
        command.env("ETCDCTL_API", "3").arg(format!("--endpoints={}", self.url())).args(arguments);
        if let Some(files) = &self.certificates {
            command
                .arg(format!("--cacert={}", files.authority.display()))
                .arg(format!("--cert={}", files.chain.display()))
                .arg(format!("--key={}", files.key.display()));
        }
        Ok(command)
    }

    pub(crate) fn revision(&self) -> i64 {
        self.status()["Status"]["header"]["revision"].as_i64().unwrap()
    }

    fn status(&self) -> serde_json::Value {
        let status: serde_json::Value =
            serde_json::from_str(&self.ctl(&["endpoint", "status", "--write-out=json"])).unwrap();
        status[0].clone()
    }
}

/// A replica: `fairlead discovery` as a program of its own, always at the same addresses.
pub(crate) struct Replica {
    pub(crate) address: SocketAddr,
    health: SocketAddr,
    metrics: SocketAddr,
    arguments: Vec<String>,
    process: Option<Process>,
}

impl Replica {
    pub(crate) fn start(etcd: &str, more: &[&str]) -> Self {
        let arguments =
            ["--etcd-endpoints", etcd, "--address-rate", "0"].into_iter().chain(more.iter().copied());
        let mut replica = Self {
            address: free_address(),
            health: free_address(),
            metrics: free_address(),
            arguments: arguments.map(str::to_owned).collect(),
            process: None,
        };
        replica.begin();
        replica
    }

    pub(crate) fn begin(&mut self) {
        let mut command = Command::new(testbed_lab::executable("fairlead").unwrap());
        command
            .arg("discovery")
            .arg(format!("--addr={}", self.address))
            .arg(format!("--health-addr={}", self.health))
            .arg(format!("--metrics-addr={}", self.metrics))
            .args(&self.arguments);
        self.process = Some(Process(command.stdin(Stdio::null()).spawn().unwrap()));
    }

    /// As `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    /// Answer of `/readyz`; `None` if there is none, or if its status does not match `is_ready`.
    pub(crate) async fn readiness(&self, is_ready: bool) -> Option<String> {
        let answer = get(self.health, "/readyz").await?;
        (answer.starts_with("HTTP/1.1 200") == is_ready).then_some(answer)
    }

    pub(crate) async fn until_ready(&self) {
        until("the replica is ready", async || self.readiness(true).await).await;
    }

    /// The value of a metric, with its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let name = format!("fairlead_discovery_{name} ");
        until(&name, async || {
            let answer = get(self.metrics, "/metrics").await?;
            answer.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse().ok())
        })
        .await
    }

    pub(crate) async fn client(&self) -> Caller {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).unwrap();
        let channel = until("the replica accepts", async || endpoint.connect().await.ok()).await;
        Caller(ClusterClient::new(channel))
    }
}

async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}

/// A client of one replica, which publishes in cluster `c`.
#[derive(Clone)]
pub(crate) struct Caller(ClusterClient<Channel>);

impl Caller {
    pub(crate) async fn update(
        &self,
        id: &str,
        data: &str,
        endpoints: &[u8],
        ttl: Duration,
    ) -> Result<(), Status> {
        let request = AffiliateUpdateRequest {
            cluster_id: "c".to_owned(),
            affiliate_id: id.to_owned(),
            affiliate_data: (!data.is_empty()).then(|| data.as_bytes().to_vec().into()),
            affiliate_endpoints: endpoints.iter().map(|n| vec![*n; 16].into()).collect(),
            ttl: Some(wire::Duration {
                seconds: ttl.as_secs().cast_signed(),
                nanos: ttl.subsec_nanos().cast_signed(),
            }),
        };
        self.0.clone().affiliate_update(request).await.map(drop)
    }

    pub(crate) async fn delete(&self, id: &str) -> Result<(), Status> {
        let request = AffiliateDeleteRequest { cluster_id: "c".to_owned(), affiliate_id: id.to_owned() };
        self.0.clone().affiliate_delete(request).await.map(drop)
    }

    /// All affiliates, by identifier.
    pub(crate) async fn list(&self) -> Result<Vec<Affiliate>, Status> {
        let request = ListRequest { cluster_id: "c".to_owned() };
        let mut affiliates = self.0.clone().list(request).await?.into_inner().affiliates;
        affiliates.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(affiliates)
    }

    pub(crate) async fn ids(&self) -> Vec<String> {
        self.list().await.unwrap().into_iter().map(|affiliate| affiliate.id).collect()
    }

    /// Waits until the list is this.
    pub(crate) async fn until_ids(&self, ids: &[&str]) {
        until(&format!("the list is {ids:?}"), async || (self.ids().await == ids).then_some(())).await;
    }

    pub(crate) async fn watch(&self) -> Streaming<WatchResponse> {
        let request = WatchRequest { cluster_id: "c".to_owned() };
        self.0.clone().watch(request).await.unwrap().into_inner()
    }
}

/// The next message of a watch.
pub(crate) async fn message(stream: &mut Streaming<WatchResponse>) -> WatchResponse {
    timeout(LIMIT, stream.message()).await.expect("nothing is told").unwrap().expect("the watch ended")
}

pub(crate) fn told(message: &WatchResponse) -> (Vec<&str>, bool, bool) {
    let ids = message.affiliates.iter().map(|affiliate| affiliate.id.as_str()).collect();
    (ids, message.deleted, message.expired)
}

/// Passes connections on to the first of several addresses that answers, as a balancer of TCP does, until it is cut.
pub(crate) struct Forwarder {
    pub(crate) address: SocketAddr,
    is_open: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Forwarder {
    pub(crate) async fn start(to: Vec<SocketAddr>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (address, (is_open, observed)) = (listener.local_addr().unwrap(), watch::channel(true));
        let to = Arc::new(to);
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(forward(stream, Arc::clone(&to), observed.clone()));
            }
        });
        Self { address, is_open, task }
    }

    /// Ends all connections and lets no new ones through.
    pub(crate) fn cut(&self) {
        self.is_open.send_replace(false);
    }

    pub(crate) fn open(&self) {
        self.is_open.send_replace(true);
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(mut from: TcpStream, to: Arc<Vec<SocketAddr>>, mut is_open: watch::Receiver<bool>) {
    if !*is_open.borrow() {
        return;
    }
    for address in &*to {
        if let Ok(mut to) = TcpStream::connect(address).await {
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
                _ = is_open.wait_for(|is_open| !is_open) => {}
            }
            return;
        }
    }
}
