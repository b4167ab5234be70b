//! Load for a discovery server, over its gRPC service without TLS: any server of the protocol can be measured with it.
//!
//! Orders on standard input, each answered by a line of numbers: `publish` (affiliates, seconds), `update SECONDS` (updates, seconds),
//! `watch` (watches, seconds, MiB that came), `pace SECONDS CHANGES` and `saturate SECONDS` (see [`Paced`] and [`Saturated`]).

use std::collections::HashMap;
use std::fmt;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fairlead_wire::discovery::server::cluster_client::ClusterClient;
use fairlead_wire::discovery::server::{self as wire, AffiliateUpdateRequest};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tonic::transport::Channel;

use super::paced::{Paced, Saturated};
use super::streams::STREAM_WINDOW;
use super::watchers::{OPENING, Watchers};
use crate::cpu;

/// Connections for updates.
const CONNECTIONS: usize = 16;
/// Updates on their way at once.
const IN_FLIGHT: usize = 64;
/// Encrypted affiliates of nodes of Talos have about so many bytes.
const DATA: usize = 512;
const ENDPOINTS: usize = 4;
/// Bytes of an encrypted IPv4 or IPv6 endpoint.
const ENDPOINT: usize = 32;
const TTL: Duration = Duration::from_secs(30 * 60);
/// Clients publish again after half the TTL, with the same bytes unless something has changed.
const REFRESH: Duration = Duration::from_secs(15 * 60);
/// Longest time until the last changes have arrived.
const PATIENCE: Duration = Duration::from_secs(60);

/// Size of the load: members that are published, and watches of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Load {
    /// Host and port of the server.
    pub(super) address: String,
    pub(super) clusters: usize,
    /// Members of each cluster.
    pub(super) affiliates: usize,
    /// Watches of each cluster.
    pub(super) watches: usize,
    /// Connections that share the watches.
    pub(super) connections: usize,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} clusters of {} affiliates, each with {DATA} bytes of data and {ENDPOINTS} endpoints of {ENDPOINT} bytes, TTL {} s; updates from \
             {CONNECTIONS} connections, {IN_FLIGHT} on their way at once; then {} watches of each cluster on {} further connections, of which \
             {OPENING} at a time are told all affiliates; each watch may be sent {STREAM_WINDOW} bytes before the server is told that they were \
             read, a connection 2^31-1. HTTP/2 without TLS, from one address. While changes are paced, {:.1} updates a second change nothing \
             (each affiliate every {} s), and changes are of affiliates in turn, clusters in turn",
            self.clusters,
            self.affiliates,
            TTL.as_secs(),
            self.watches,
            self.connections,
            self.refreshes(),
            REFRESH.as_secs(),
        )
    }
}

impl Load {
    pub(crate) fn parse(words: &[String]) -> Result<Self> {
        let [address, clusters, affiliates, watches, connections] = words else {
            bail!("{} ADDRESS:PORT CLUSTERS AFFILIATES WATCHES CONNECTIONS", super::LOAD_COMMAND);
        };
        let number = |word: &String| word.parse().with_context(|| format!("{word:?} is no number"));
        Ok(Self {
            address: address.clone(),
            clusters: number(clusters)?,
            affiliates: number(affiliates)?,
            watches: number(watches)?,
            connections: number(connections)?,
        })
    }

    /// Updates a second that change nothing.
    fn refreshes(&self) -> f64 {
        self.clusters.saturating_mul(self.affiliates) as f64 / REFRESH.as_secs_f64()
    }

    pub(super) fn arguments(&self) -> [String; 5] {
        let numbers = [self.clusters, self.affiliates, self.watches, self.connections];
        let [clusters, affiliates, watches, connections] = numbers.map(|number| number.to_string());
        [self.address.clone(), clusters, affiliates, watches, connections]
    }

    /// Follows the orders until standard input ends.
    pub(crate) fn run(&self) -> Result<()> {
        tokio::runtime::Runtime::new().context("cannot start a runtime")?.block_on(self.serve())
    }

    async fn serve(&self) -> Result<()> {
        let mut running = Running::new(self.clone()).await?;
        say("ready")?;
        for line in std::io::stdin().lines() {
            let line = line.context("cannot read orders")?;
            let answer = match *line.split_whitespace().collect::<Vec<_>>() {
                ["pace", seconds, changes] => {
                    running.pace(Duration::from_secs(seconds.parse()?), changes.parse()?).await?.to_string()
                }
                ["publish"] => running.publish().await?,
                ["saturate", seconds] => {
                    running.saturate(Duration::from_secs(seconds.parse()?)).await?.to_string()
                }
                ["update", seconds] => running.update(Duration::from_secs(seconds.parse()?)).await?,
                ["watch"] => running.watch().await?,
                _ => bail!("no order: {line:?}"),
            };
            say(&answer)?;
        }
        Ok(())
    }
}

fn say(answer: &str) -> Result<()> {
    let mut output = std::io::stdout();
    writeln!(output, "{answer}").and_then(|()| output.flush()).context("cannot write to standard output")
}

/// The connections, and what watches see.
struct Running {
    load: Load,
    clients: Vec<ClusterClient<Channel>>,
    /// When the last change of each affiliate was made.
    made: Vec<AtomicU64>,
    watchers: Option<Watchers>,
    start: Instant,
}

impl Running {
    async fn new(load: Load) -> Result<Self> {
        let clients = connections(&load.address).await?;
        let made = (0..load.clusters.saturating_mul(load.affiliates)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { load, clients, made, watchers: None, start: Instant::now() })
    }

    /// Nanoseconds since `start`, by which changes are told apart.
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn cluster_of(&self, number: usize) -> usize {
        number % self.load.clusters.max(1)
    }

    /// The `number`-th change of all: affiliates of all clusters in turn.
    fn change(&self, number: usize) -> (u64, AffiliateUpdateRequest) {
        let now = self.now();
        if let Some(made) = self.made.get(number % self.made.len().max(1)) {
            made.store(now, Ordering::Relaxed);
        }
        (now, self.request(number, now))
    }

    /// Request that publishes the latest state of a member again.
    fn refresh(&self, number: usize) -> AffiliateUpdateRequest {
        let made = self.made.get(number % self.made.len().max(1));
        self.request(number, made.map_or(0, |made| made.load(Ordering::Relaxed)))
    }

    fn request(&self, number: usize, made: u64) -> AffiliateUpdateRequest {
        let affiliate = number / self.load.clusters.max(1) % self.load.affiliates.max(1);
        let mut data = vec![0xa5; DATA];
        data.iter_mut().zip(made.to_be_bytes()).for_each(|(byte, part)| *byte = part);
        let endpoint = |at: usize| {
            let mut endpoint = vec![0x5a; ENDPOINT];
            let id = (affiliate * ENDPOINTS + at).to_be_bytes();
            endpoint.iter_mut().zip(id).for_each(|(byte, part)| *byte = part);
            endpoint.into()
        };
        AffiliateUpdateRequest {
            cluster_id: cluster(self.cluster_of(number)),
            affiliate_id: format!("affiliate-{affiliate}"),
            affiliate_data: Some(data.into()),
            affiliate_endpoints: (0..ENDPOINTS).map(endpoint).collect(),
            ttl: Some(wire::Duration { seconds: i64::try_from(TTL.as_secs()).unwrap_or_default(), nanos: 0 }),
        }
    }

    fn send(
        &self,
        number: usize,
        request: AffiliateUpdateRequest,
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let client = self.clients.get(number % CONNECTIONS).cloned();
        async move {
            let mut client = client.context("no connection")?;
            client.affiliate_update(request).await.map(drop).context("an update was refused")
        }
    }

    async fn publish(&self) -> Result<String> {
        let (all, start) = (self.load.clusters.saturating_mul(self.load.affiliates), Instant::now());
        stream::iter(0..all)
            .map(|number| self.send(number, self.change(number).1))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>()
            .await?;
        Ok(format!("{all} {}", start.elapsed().as_secs_f64()))
    }

    /// As many changes as the server answers; how many, and in how many seconds.
    async fn change_for(&self, length: Duration) -> Result<(usize, f64)> {
        let start = Instant::now();
        let numbers = stream::iter(0_usize..).take_while(|_| std::future::ready(start.elapsed() < length));
        let sent = numbers.map(|number| self.send(number, self.change(number).1)).buffer_unordered(IN_FLIGHT);
        let changes = sent.try_fold(0_usize, async |count, ()| Ok(count.saturating_add(1))).await?;
        Ok((changes, start.elapsed().as_secs_f64()))
    }

    async fn update(&self, length: Duration) -> Result<String> {
        let (updates, seconds) = self.change_for(length).await?;
        Ok(format!("{updates} {seconds}"))
    }

    /// Begins the watches; each has shown all affiliates.
    async fn watch(&mut self) -> Result<String> {
        let start = Instant::now();
        let watchers = Watchers::open(&self.load, self.start).await?;
        let mebibytes = watchers.sums().bytes as f64 / f64::from(1 << 20);
        self.watchers = Some(watchers);
        let watches = self.load.clusters.saturating_mul(self.load.watches);
        Ok(format!("{watches} {} {mebibytes}", start.elapsed().as_secs_f64()))
    }

    /// So many changes a second, beside updates that change nothing.
    async fn pace(&mut self, length: Duration, changes: u32) -> Result<Paced> {
        let mut watchers = self.watchers.take().context("there are no watches")?;
        let (before, since) = (watchers.changes(), self.now());
        let (start, busy) = (Instant::now(), cpu::seconds_of(std::process::id())?);
        watchers.record(true);
        let changed = self.paced_updates(length, changes).await?;
        let missing = |watchers: &Watchers| self.missing(changed, &before, &watchers.changes());
        let waiting = Instant::now();
        while missing(&watchers) > 0 && waiting.elapsed() < PATIENCE {
            watchers.wait().await?;
        }
        let missing = missing(&watchers);
        let seconds = start.elapsed().as_secs_f64();
        let busy = cpu::seconds_of(std::process::id())? - busy;
        watchers.record(false);
        let mut samples = watchers.samples();
        samples.retain(|(made, _)| *made >= since);
        self.watchers = Some(watchers);
        Ok(Paced::new(&samples, changed, missing, seconds, busy))
    }

    /// Updates at their times, however long others take; how many were changes.
    async fn paced_updates(&self, length: Duration, changes: u32) -> Result<usize> {
        let (start, mut updates) = (Instant::now(), JoinSet::new());
        let (mut changed, mut refreshed) = (0_usize, 0_usize);
        let mut ticks = interval(Duration::from_secs(1) / changes.max(1));
        let mut refreshes = interval(Duration::from_secs(1).div_f64(self.load.refreshes().max(0.01)));
        for timer in [&mut ticks, &mut refreshes] {
            // A server that falls behind is not given less.
            timer.set_missed_tick_behavior(MissedTickBehavior::Burst);
        }
        while start.elapsed() < length {
            tokio::select! {
                _ = ticks.tick() => {
                    updates.spawn(self.send(changed, self.change(changed).1));
                    changed = changed.saturating_add(1);
                }
                _ = refreshes.tick() => {
                    // Far from those that change.
                    let number = refreshed.saturating_add(self.made.len() / 2);
                    updates.spawn(self.send(number, self.refresh(number)));
                    refreshed = refreshed.saturating_add(1);
                }
                Some(ended) = updates.join_next() => ended.context("the task of an update failed")??,
            }
        }
        while let Some(ended) = updates.join_next().await {
            ended.context("the task of an update failed")??;
        }
        Ok(changed)
    }

    /// Changes that watches lack of so many, or saw more than once. Each watch is its cluster, and the changes that it has seen.
    fn missing(&self, changed: usize, before: &[(usize, u64)], now: &[(usize, u64)]) -> u64 {
        let of = |cluster| (0..changed).filter(|number| self.cluster_of(*number) == cluster).count() as u64;
        let expected: Vec<u64> = (0..self.load.clusters).map(of).collect();
        let watches = before.iter().zip(now).filter_map(|((cluster, before), (_, now))| {
            Some(expected.get(*cluster)?.abs_diff(now.saturating_sub(*before)))
        });
        watches.sum()
    }

    /// As many changes as the server answers while all watches are open, and until all watches have the last one of their cluster.
    async fn saturate(&mut self, length: Duration) -> Result<Saturated> {
        let mut watchers = self.watchers.take().context("there are no watches")?;
        let (before, busy) = (watchers.sums(), cpu::seconds_of(std::process::id())?);
        let (updates, seconds) = self.change_for(length).await?;
        let after = watchers.sums();
        let waiting = Instant::now();
        let mut last = HashMap::new();
        for number in 0..self.load.clusters {
            let (made, request) = self.change(number);
            self.send(number, request).await?;
            last.insert(self.cluster_of(number), made);
        }
        while watchers.behind(&last) > 0 && waiting.elapsed() < PATIENCE {
            watchers.wait().await?;
        }
        let behind = watchers.behind(&last);
        self.watchers = Some(watchers);
        Ok(Saturated {
            updates: updates as f64,
            seconds,
            deliveries: (after.changes - before.changes) as f64,
            messages: (after.messages - before.messages) as f64,
            drain_seconds: waiting.elapsed().as_secs_f64(),
            behind: behind as f64,
            cpu_seconds: cpu::seconds_of(std::process::id())? - busy,
        })
    }
}

/// The identifier of a cluster.
pub(super) fn cluster(number: usize) -> String {
    format!("cluster-{number}")
}

async fn connections(address: &str) -> Result<Vec<ClusterClient<Channel>>> {
    let connect = || ClusterClient::connect(format!("http://{address}"));
    let connections = stream::iter(0..CONNECTIONS).then(|_| connect()).try_collect();
    connections.await.with_context(|| format!("cannot connect to {address}"))
}

#[cfg(test)]
mod tests {
    use fairlead_discovery::server::{Server, Settings};
    use tokio_util::sync::CancellationToken;

    use super::*;

    #[test]
    fn its_arguments_are_read_again() {
        let address = "127.0.0.1:3000".to_owned();
        let load = Load { address, clusters: 10, affiliates: 1_000, watches: 20, connections: 5 };
        assert_eq!(Load::parse(&load.arguments()).unwrap(), load);
        assert!(Load::parse(&load.arguments()[..4]).is_err());
        assert!(load.to_string().contains("10 clusters of 1000 affiliates"));
    }

    #[tokio::test]
    async fn every_watch_sees_every_change() {
        let server = Server::bind(Settings {
            limits: fairlead_discovery::core::Limits { rate: 0, ..Default::default() },
            ..Settings::new("127.0.0.1:0".parse().unwrap(), (100, 100))
        });
        let server = server.unwrap();
        let (address, observer) = (server.local_address().unwrap().to_string(), server.observer());
        let stop = CancellationToken::new();
        let task = tokio::spawn(server.run(stop.clone().cancelled_owned()));
        // 70 affiliates are more than one frame, and more than a watch may be sent at once.
        let load = Load { address, clusters: 2, affiliates: 120, watches: 6, connections: 5 };
        let mut running = Running::new(load).await.unwrap();
        assert!(running.publish().await.unwrap().starts_with("240 "));
        assert!(running.watch().await.unwrap().starts_with("12 "));
        assert_eq!(observer.snapshot().totals.watches, 12);
        let paced = running.pace(Duration::from_millis(500), 40).await.unwrap();
        assert!(paced.changes >= 10.0 && paced.missing <= 0.0, "{paced}");
        assert!((paced.seen - paced.changes * 6.0).abs() < 0.5, "{paced}");
        let saturated = running.saturate(Duration::from_millis(300)).await.unwrap();
        assert!(saturated.updates >= 1.0 && saturated.behind <= 0.0, "{saturated}");
        stop.cancel();
        task.await.unwrap();
        let mut watchers = running.watchers.take().unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(10), async {
            loop {
                if let Err(error) = watchers.wait().await {
                    break error;
                }
            }
        });
        assert!(ended.await.unwrap().to_string().contains("ended"), "watches that end are noticed");
    }
}
