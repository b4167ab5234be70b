//! Many agents of path probes in one process, one relay, and a real API server: what they cost at rest, and what they do when the relay
//! restarts. Each has a link to the relay and all others as peers, reached only by way of it; some of them have traffic.

mod agent;
mod publisher;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_api::resources::WireKubePeer;
use fairlead_demo::World;
use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_relay::client::{Endpoint, Settings, trust};
use kube::Api;
use rcgen::{CertificateParams, KeyPair};
use testbed_lab::{Host, Process, Progress};
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::agent::{Agent, Common, Counters, View};
use self::publisher::{Publisher, Writes, spread};
use crate::ipam::cluster::{client, create};
use crate::report::Measurement;
use crate::statistics::percentile;
use crate::{Effort, Options, cni, cpu, mesh_scale, progress};

pub(crate) const CASE: &str = "agents";
const OURS: &str = "fairlead";
/// Only this host connects to it.
const ADDRESS: &str = "127.0.0.1:443";
const HOST: &str = "127.0.0.1";
const TOKEN: &str = "benchmark";
/// Active peers of each agent.
const ACTIVE: usize = 20;
/// Time for which agents are watched at rest.
const REST: Duration = Duration::from_secs(60);
/// After which a peer without traffic is idle, and the rest of a round.
const IDLE: Duration = Duration::from_secs(100);
/// Downtime of the relay.
const AWAY: Duration = Duration::from_secs(2);
/// Time for its clients to be back, and to write what follows.
const BACK: Duration = Duration::from_secs(120);
/// Bounds what hangs.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs it with 1,000 agents, 100 with `--quick`, or as many as `--peers` says.
pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let agents = options.peers.unwrap_or(if options.effort == Effort::Quick { 100 } else { 1_000 });
    raise_descriptors()?;
    let world = World::start(&cni::bed::topology()?, &Progress::default())?;
    world.plane.apply(
        "apiVersion: wirekube.io/v1alpha1\nkind: WireKubeMesh\nmetadata: {name: default}\nspec: {}\n",
    )?;
    let host = world.plane_host().clone();
    host.run(|| {
        let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
        runtime.block_on(measure(&world, &host, agents))
    })?
}

/// Each link needs a descriptor at either end. Only the soft limit is raised: another hard one needs `CAP_SYS_RESOURCE`.
const DESCRIPTORS: &str = "--nofile=16384:";

fn raise_descriptors() -> Result<()> {
    let process = std::process::id().to_string();
    let status = Command::new("prlimit")
        .args(["--pid", &process, DESCRIPTORS])
        .stdout(Stdio::null())
        .status()
        .context("cannot start prlimit")?;
    ensure!(status.success(), "prlimit cannot raise the limit of open files");
    Ok(())
}

/// The relay's files, and the program.
struct Relay<'a> {
    host: &'a Host,
    directory: &'a Path,
}

impl Relay<'_> {
    fn start(&self) -> Result<Process> {
        let file = |name: &str| self.directory.join(name);
        let mut command = Command::new("prlimit");
        command
            .args([DESCRIPTORS, "--"])
            .arg(testbed_lab::executable("fairlead")?)
            .args(["relay", "--addr", ADDRESS, "--name", HOST, "--stun-addr", "127.0.0.1:0"])
            .args(["--metrics-addr", "[::]:0", "--health-addr", "[::]:0", "--max-clients", "8192"])
            .arg("--tls-cert-file")
            .arg(file("relay.crt"))
            .arg("--tls-private-key-file")
            .arg(file("relay.key"))
            .arg("--token-file")
            .arg(file("tokens"));
        self.host.spawn(&mut command, self.directory.join("relay.log"))
    }

    /// A certificate, and the token.
    fn write_files(&self) -> Result<Vec<u8>> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![HOST.to_owned()])?.self_signed(&key)?;
        let files = [
            ("relay.crt", certificate.pem()),
            ("relay.key", key.serialize_pem()),
            ("tokens", TOKEN.to_owned()),
        ];
        for (name, text) in files {
            let path = self.directory.join(name);
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(certificate.pem().into_bytes())
    }
}

/// All agents and what is seen of them.
struct Agents {
    common: Arc<Common>,
    traffic: watch::Sender<bool>,
    mark: watch::Sender<Instant>,
    views: Vec<View>,
    _tasks: JoinSet<Result<()>>,
}

impl Agents {
    fn start(keys: &[(PublicKey, PrivateKey)], certificate: &[u8]) -> Result<Self> {
        let (traffic, has_traffic) = watch::channel(false);
        let (mark, marked) = watch::channel(Instant::now());
        let common = Arc::new(Common {
            keys: keys.iter().map(|(public, _)| *public).collect(),
            reach: ACTIVE / 2,
            counters: Counters::default(),
            traffic: has_traffic,
            mark: marked,
        });
        let roots = Arc::new(trust(certificate)?);
        let endpoint: Endpoint = format!("tcp://{ADDRESS}").parse()?;
        let (mut views, mut tasks) = (Vec::new(), JoinSet::new());
        for (number, (_, private)) in keys.iter().enumerate() {
            let settings = Settings {
                endpoint: endpoint.clone(),
                server_name: None,
                proxy: None,
                roots: Arc::clone(&roots),
                private_key: private.clone(),
                instance: number.to_le_bytes(),
                token: TOKEN.into(),
                mark: 0,
                nat64: None,
            };
            let (agent, view) = Agent::start(number, Arc::clone(&common), settings)?;
            tasks.spawn(agent.run());
            views.push(view);
        }
        Ok(Self { common, traffic, mark, views, _tasks: tasks })
    }

    /// Waits for all links; the seconds each took.
    async fn connected(&mut self) -> Result<Vec<f64>> {
        let begin = Instant::now();
        let mut waiting = JoinSet::new();
        for view in &self.views {
            let mut link = view.link.clone();
            waiting.spawn(async move {
                link.wait_for(|status| status.is_up).await.map(drop)?;
                anyhow::Ok(begin.elapsed().as_secs_f64())
            });
        }
        let all = async {
            let mut took = Vec::new();
            while let Some(ended) = waiting.join_next().await {
                took.push(ended??);
            }
            anyhow::Ok(took)
        };
        tokio::time::timeout(TIMEOUT, all).await.context("not all agents reach the relay")?
    }

    fn count(&self, which: impl Fn(&Counters) -> &std::sync::atomic::AtomicU64) -> u64 {
        which(&self.common.counters).load(Ordering::Relaxed)
    }

    /// Seconds from the mark until each active peer was heard again, as far as they were.
    fn returns(&self) -> Vec<f64> {
        self.views.iter().flat_map(|view| view.returns.borrow().clone()).collect()
    }
}

async fn measure(world: &World, host: &Host, number: usize) -> Result<Vec<Measurement>> {
    let directory = tempfile::tempdir().context("cannot create a directory for the relay")?;
    let relay = Relay { host, directory: directory.path() };
    let certificate = relay.write_files()?;
    let keys: Vec<(PublicKey, PrivateKey)> = agent::keys(number)?.into_iter().collect();
    let client = client(world.plane.kubeconfig()).await?;
    let peers = Api::<WireKubePeer>::all(client.clone());
    let object = |(number, (key, _)): (usize, &(PublicKey, PrivateKey))| mesh_scale::peer(number, *key);
    create(&peers, keys.iter().enumerate().map(object)).await.context("cannot create WireKubePeers")?;

    let mut measured = Measured { of: format!("{number} agents"), all: Vec::new() };
    let running = relay.start()?;
    let before = resident_bytes()?;
    let mut agents = Agents::start(&keys, &certificate)?;
    agents.connected().await?;
    at_rest(&agents, before, &running, &mut measured).await?;
    let writes = publish(&agents, &keys, &client)?;
    with_traffic(&agents, &running, &mut measured).await?;
    restart(&mut agents, &relay, running, &writes.0, &mut measured).await?;
    Ok(measured.all)
}

struct Measured {
    of: String,
    all: Vec<Measurement>,
}

impl Measured {
    fn add(&mut self, metric: &str, unit: &'static str, samples: Vec<f64>) -> Result<()> {
        let measurement = Measurement::new(CASE, OURS, format!("{}: {metric}", self.of), unit, samples)?;
        progress(&format!("    {}: {:.3} {unit}", measurement.metric, measurement.value));
        self.all.push(measurement);
        Ok(())
    }

    fn percentiles(&mut self, metric: &str, samples: Vec<f64>) -> Result<()> {
        let p99 = percentile(&samples, 0.99).with_context(|| format!("no {metric}"))?;
        let longest = samples.iter().copied().fold(0.0, f64::max);
        self.add(metric, "s", samples)?;
        self.add(&format!("{metric}, p99"), "s", vec![p99])?;
        self.add(&format!("{metric}, longest"), "s", vec![longest])
    }
}

/// No agent has traffic.
async fn at_rest(agents: &Agents, before: f64, relay: &Process, measured: &mut Measured) -> Result<()> {
    tokio::time::sleep(IDLE).await;
    let count = agents.views.len() as f64;
    let pairs = count * (count - 1.0);
    measured.add(
        "memory of an idle peer, its share of all",
        "bytes",
        vec![(resident_bytes()? - before) / pairs],
    )?;
    let sent = agents.count(|counters| &counters.to_idle);
    let spent = [cpu::seconds_of(std::process::id())?, cpu::seconds_of(relay.id())?];
    tokio::time::sleep(REST).await;
    let percent = |before: f64, now: f64| (now - before) / REST.as_secs_f64() * 100.0;
    let own = percent(spent[0], cpu::seconds_of(std::process::id())?);
    measured.add("CPU of an agent with idle peers", "% of a core", vec![own / count])?;
    let of_relay = percent(spent[1], cpu::seconds_of(relay.id())?);
    measured.add("CPU of the relay with idle clients", "% of a core", vec![of_relay])?;
    let sent = agents.count(|counters| &counters.to_idle).saturating_sub(sent);
    measured.add("datagrams to idle peers in a minute", "datagrams", vec![sent as f64])
}

/// Starts to publish for each agent.
fn publish(
    agents: &Agents,
    keys: &[(PublicKey, PrivateKey)],
    client: &kube::Client,
) -> Result<(Arc<Writes>, JoinSet<Result<()>>)> {
    let writes = Arc::new(Writes::default());
    let public = Arc::new(agents.common.keys.clone());
    let mut tasks = JoinSet::new();
    for (number, (view, (key, _))) in agents.views.iter().zip(keys).enumerate() {
        let publisher = Publisher {
            client: client.clone(),
            name: mesh_scale::name(number),
            key: *key,
            keys: Arc::clone(&public),
            endpoint: format!("tcp://{ADDRESS}").parse()?,
            writes: Arc::clone(&writes),
        };
        tasks.spawn(publisher.run(view.news.clone()));
    }
    Ok((writes, tasks))
}

/// Each agent has traffic with some peers.
async fn with_traffic(agents: &Agents, relay: &Process, measured: &mut Measured) -> Result<()> {
    agents.mark.send_replace(Instant::now());
    agents.traffic.send_replace(true);
    tokio::time::sleep(REST).await;
    let active = agents.views.len().saturating_mul(ACTIVE.min(agents.views.len().saturating_sub(1)));
    let heard = agents.returns().len();
    ensure!(heard >= active, "only {heard} of {active} active peers were heard");
    let counted = || (agents.count(|counters| &counters.sent), agents.count(|counters| &counters.received));
    let (before, spent) = (counted(), cpu::seconds_of(relay.id())?);
    tokio::time::sleep(REST).await;
    let now = counted();
    let percent = (cpu::seconds_of(relay.id())? - spent) / REST.as_secs_f64() * 100.0;
    measured.add("CPU of the relay with traffic", "% of a core", vec![percent])?;
    let (sent, received) = (now.0.saturating_sub(before.0), now.1.saturating_sub(before.1));
    measured.add("messages in a minute", "messages", vec![sent as f64])?;
    // What is on its way at both moments is within one in a thousand.
    measured.add("messages that did not arrive", "messages", vec![sent as f64 - received as f64])
}

/// The relay is killed, and started again.
async fn restart(
    agents: &mut Agents,
    relay: &Relay<'_>,
    running: Process,
    writes: &Writes,
    measured: &mut Measured,
) -> Result<()> {
    let written = |since: Instant| -> Vec<Instant> {
        let times = writes.times.lock().map(|times| times.clone()).unwrap_or_default();
        times.into_iter().filter(|at| *at >= since).collect()
    };
    let quiet = Instant::now().checked_sub(REST).context("the clock has just begun")?;
    measured.add(
        "writes to the API server in a minute, in peace",
        "writes",
        vec![written(quiet).len() as f64],
    )?;
    // That kills it.
    drop(running);
    let killed = Instant::now();
    tokio::time::sleep(AWAY).await;
    let _running = relay.start()?;
    agents.mark.send_replace(Instant::now());
    let back = agents.connected().await?;
    measured.percentiles("until an agent is connected after the relay's start", back)?;
    tokio::time::sleep(BACK).await;
    measured.percentiles("until an active peer is heard after the relay's start", agents.returns())?;
    let active = agents.views.len().saturating_mul(ACTIVE.min(agents.views.len().saturating_sub(1)));
    let missing = active.saturating_sub(agents.returns().len());
    measured.add("active peers that were not heard again", "peers", vec![missing as f64])?;
    let times = written(killed);
    let (most, during) = spread(&times);
    measured.add("writes to the API server after the restart", "writes", vec![times.len() as f64])?;
    measured.add("most of them in a second", "writes", vec![most as f64])?;
    measured.add("from the first to the last of them", "s", vec![during.as_secs_f64()])?;
    measured.add("writes that failed", "writes", vec![writes.failed.load(Ordering::Relaxed) as f64])
}

/// `VmRSS` of this process (proc_pid_status(5)).
fn resident_bytes() -> Result<f64> {
    Ok(cpu::resident_mib(std::process::id())? * 1024.0 * 1024.0)
}
