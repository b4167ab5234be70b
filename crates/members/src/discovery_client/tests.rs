//! Nodes whose secret changes, at a real server.

use std::sync::Mutex;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_address::AddressFilter;
use fairlead_api::names::{DISCOVERY_CLUSTER_ID, DISCOVERY_CLUSTER_SECRET};
use fairlead_cluster::local_api::{self, LocalObjects};
use fairlead_discovery::server::{Observer, Server, Settings};
use fairlead_keys::PrivateKey;
use fairlead_wire::discovery::{Affiliate, KubeSpan};
use futures::stream;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::*;

/// Bounds a test that hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// The Secret of a node.
struct OneSecret(Arc<Mutex<u8>>);

impl LocalObjects for OneSecret {
    fn list(&self, _: &str) -> Vec<Value> {
        Vec::new()
    }

    fn get(&self, path: &str) -> Option<Value> {
        let secret = STANDARD.encode([*self.0.lock().unwrap(); 32]);
        let data = json!({
            DISCOVERY_CLUSTER_ID: STANDARD.encode("c"),
            DISCOVERY_CLUSTER_SECRET: STANDARD.encode(secret),
        });
        path.ends_with("/secrets/s")
            .then(|| json!({ "metadata": { "name": "s", "namespace": "ns" }, "data": data }))
    }
}

/// A node that never changes.
struct Published {
    name: String,
    key: PrivateKey,
}

impl LocalNode for Published {
    fn publication(&self) -> Option<Local> {
        let public_key = self.key.public_key().to_string();
        let kubespan = KubeSpan { public_key, without_preshared_key: true, ..KubeSpan::default() };
        let affiliate = Affiliate {
            hostname: self.name.clone(),
            nodename: self.name.clone(),
            kubespan: Some(kubespan),
            ..Affiliate::default()
        };
        Some(Local {
            affiliate,
            endpoints: ["192.168.1.10:51820", "203.0.113.9:4000"].map(|it| it.parse().unwrap()).into(),
            extra_endpoints: Vec::new(),
            port: Some(51820),
            filter: AddressFilter::default(),
        })
    }

    fn changes(&self) -> BoxStream<'static, ()> {
        stream::pending().boxed()
    }

    fn session(&self, _: &PublicKey) -> Session {
        Session::Unknown
    }

    fn observe(&self, _: &DiscoveryStatus) {}
}

/// Runs until it is dropped.
struct Running {
    secret: Arc<Mutex<u8>>,
    known: watch::Receiver<Arc<Discovered>>,
    shared: watch::Receiver<Option<Shared>>,
    status: watch::Receiver<DiscoveryStatus>,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Running {
    fn start(server: &str, directory: &TempDir, name: &str, secret: u8) -> Self {
        let secret = Arc::new(Mutex::new(secret));
        let number = name.as_bytes().last().copied().unwrap_or_default();
        let own = rcgen::generate_simple_self_signed(["unused".to_owned()]).unwrap().cert.pem();
        let settings = DiscoverySettings {
            servers: vec![server.parse().unwrap()],
            ca_bundle: Some(own.into_bytes()),
            allowed: Vec::new(),
            secret: ("ns".to_owned(), "s".to_owned()),
        };
        let file = StateFile { directory: directory.path().to_owned(), node: name.to_owned() };
        let (known, of_known) = watch::channel(Arc::default());
        let (credentials, shared) = watch::channel(Shared::saved(&file));
        let (status, of_status) = watch::channel(DiscoveryStatus::default());
        let task = DiscoveryTask {
            client: local_api::client(OneSecret(Arc::clone(&secret))),
            node: name.to_owned(),
            local: Arc::new(Published { name: name.to_owned(), key: PrivateKey([number; 32]) }),
            settings: watch::channel(ConfiguredDiscovery::Enabled(settings)).1,
            cached: DiscoveryTask::known_before(&file).0,
            file,
            known,
            credentials,
            status,
            secret_interval: Duration::from_millis(200),
            mark: 0,
        };
        let task = tokio::spawn(task.run());
        Self { secret, known: of_known, shared, status: of_status, task }
    }

    fn change(&self, secret: u8) {
        *self.secret.lock().unwrap() = secret;
    }

    fn knows(&self, name: &str) -> bool {
        self.known.borrow().records.iter().any(|record| record.member.name == name)
    }

    /// The present secret, and that of before.
    fn secrets(&self) -> (u8, Option<u8>) {
        let shared = self.shared.borrow();
        let shared = shared.as_ref().unwrap();
        (shared.current.secret[0], shared.previous.as_ref().map(|(secret, _)| secret[0]))
    }

    /// Whether a service tells of members under the present secret.
    fn told(&self) -> usize {
        self.status.borrow().services.iter().map(|service| service.members).sum()
    }

    /// Fails when the node once does not know another any more.
    fn always_knows(&self, name: &'static str) -> JoinHandle<()> {
        let mut known = self.known.clone();
        tokio::spawn(async move {
            loop {
                let is_known = known.borrow_and_update().records.iter().any(|it| it.member.name == name);
                assert!(is_known, "{name} was lost");
                if known.changed().await.is_err() {
                    return;
                }
            }
        })
    }
}

async fn until(what: &str, is: impl Fn() -> bool) {
    let waited = async {
        while !is() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, waited).await.unwrap_or_else(|_| panic!("not {what}"));
}

fn server() -> (String, Observer, JoinHandle<()>) {
    let server = Server::bind(Settings::new("127.0.0.1:0".parse().unwrap(), (100, 100))).unwrap();
    let (address, observer) = (server.local_address().unwrap(), server.observer());
    (format!("http://{address}"), observer, tokio::spawn(server.run(std::future::pending())))
}

#[tokio::test]
async fn no_member_is_lost_while_the_secret_changes_on_one_after_the_other() {
    let (server, observer, _task) = server();
    let affiliates = || observer.snapshot().totals.affiliates;
    let directories = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let first = Running::start(&server, &directories[0], "n1", 1);
    let second = Running::start(&server, &directories[1], "n2", 1);
    until("found", || first.knows("n2") && second.knows("n1")).await;
    let always = [first.always_knows("n2"), second.always_knows("n1")];

    first.change(2);
    until("published under both", || affiliates() == 3).await;
    // Every ten seconds, or when a service tells something, all is read again.
    sleep(MIN_PAUSE * 3).await;
    assert_eq!((first.secrets(), second.secrets()), ((2, Some(1)), (1, None)));
    assert_eq!((first.told(), affiliates()), (0, 3), "the second one has not changed");
    // Loopback, where the server sees the nodes, is left out of their endpoints. No affiliate is: each secret reads its own.
    let problems: Vec<String> = first.known.borrow().problems.iter().map(ToString::to_string).collect();
    assert!(problems.iter().all(|problem| problem.contains("an endpoint is no address")), "{problems:?}");
    assert!(always.iter().all(|task| !task.is_finished()));

    // It goes on where it was when the program is started again, and one that never had the old secret finds those that changed.
    drop(first);
    let first = Running::start(&server, &directories[0], "n1", 2);
    let third = Running::start(&server, &directories[2], "n3", 2);
    until("found again", || first.knows("n2") && first.knows("n3") && third.knows("n1")).await;
    assert_eq!((first.secrets(), third.secrets()), ((2, Some(1)), (2, None)));

    second.change(2);
    until("left", || [&first, &second].iter().all(|node| node.secrets() == (2, None))).await;
    until("deleted", || affiliates() == 3).await;
    assert!(first.knows("n2") && first.knows("n3") && second.knows("n1"));
    until("found", || second.knows("n3") && third.knows("n2") && third.told() == 2).await;
    assert!(!always[1].is_finished(), "the second one always knew the first");
    let saved = StateFile { directory: directories[0].path().to_owned(), node: "n1".to_owned() };
    assert_eq!(saved.saved_secrets().unwrap().previous, None);
}
