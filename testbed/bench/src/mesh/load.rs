//! Load for a discovery server, over its gRPC service without TLS: any server of the protocol can be measured with it.
//!
//! Orders on standard input, each answered by a line of numbers: `publish` (affiliates, seconds), `update SECONDS` (updates, seconds),
//! `watch` (watches), `pace SECONDS` (updates, changes that watches saw, changes that they did not see, milliseconds until a watch saw one at
//! p50 and p99).

use std::fmt;
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fairlead_wire::discovery::server::cluster_client::ClusterClient;
use fairlead_wire::discovery::server::{self as wire, AffiliateUpdateRequest, WatchRequest};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::transport::Channel;

use crate::statistics::percentile;

/// Connections for updates, and for watches.
const CONNECTIONS: usize = 16;
/// Updates on their way at once.
const IN_FLIGHT: usize = 64;
/// Updates a second of all clusters together, where the time until watches see them is measured.
const PACE: u32 = 100;
/// Encrypted affiliates of nodes of Talos have about so many bytes.
const DATA: usize = 512;
const ENDPOINTS: usize = 4;
/// Bytes of an encrypted IPv4 or IPv6 endpoint.
const ENDPOINT: usize = 32;
const TTL: Duration = Duration::from_secs(30 * 60);
/// How long the last changes may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is published and watched.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Load {
    /// Host and port of the server.
    pub(super) address: String,
    pub(super) clusters: usize,
    /// Of each cluster.
    pub(super) affiliates: usize,
    /// Of each cluster.
    pub(super) watches: usize,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} clusters of {} affiliates, each with {DATA} bytes of data and {ENDPOINTS} endpoints of {ENDPOINT} bytes, TTL {} s, from {} \
             connections of HTTP/2 without TLS from one address; {IN_FLIGHT} updates on their way at once; then {} watches of each \
             cluster on {CONNECTIONS} further connections, and {PACE} updates a second of affiliates in turn, clusters in turn",
            self.clusters,
            self.affiliates,
            TTL.as_secs(),
            CONNECTIONS,
            self.watches,
        )
    }
}

impl Load {
    pub(crate) fn parse(words: &[String]) -> Result<Self> {
        let [address, clusters, affiliates, watches] = words else {
            bail!("{} ADDRESS:PORT CLUSTERS AFFILIATES WATCHES", super::LOAD_COMMAND);
        };
        let number = |word: &String| word.parse().with_context(|| format!("{word:?} is no number"));
        Ok(Self {
            address: address.clone(),
            clusters: number(clusters)?,
            affiliates: number(affiliates)?,
            watches: number(watches)?,
        })
    }

    pub(super) fn arguments(&self) -> [String; 4] {
        let [clusters, affiliates, watches] =
            [self.clusters, self.affiliates, self.watches].map(|number| number.to_string());
        [self.address.clone(), clusters, affiliates, watches]
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
                ["pace", seconds] => running.pace(Duration::from_secs(seconds.parse()?)).await?,
                ["publish"] => running.publish().await?,
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
    /// Nanoseconds since `start` at which an update was made, and at which a watch saw it.
    seen: mpsc::UnboundedReceiver<(u64, u64)>,
    sees: mpsc::UnboundedSender<(u64, u64)>,
    start: Instant,
}

impl Running {
    async fn new(load: Load) -> Result<Self> {
        let (sees, seen) = mpsc::unbounded_channel();
        let clients = connections(&load.address).await?;
        Ok(Self { load, clients, seen, sees, start: Instant::now() })
    }

    /// The `number`-th update of all: affiliates of all clusters in turn.
    fn request(&self, number: usize) -> AffiliateUpdateRequest {
        let clusters = self.load.clusters.max(1);
        let affiliate = number / clusters % self.load.affiliates.max(1);
        let mut data = vec![0xa5; DATA];
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        data.iter_mut().zip(now.to_be_bytes()).for_each(|(byte, part)| *byte = part);
        let endpoint = |at: usize| {
            let mut endpoint = vec![0x5a; ENDPOINT];
            let id = (affiliate * ENDPOINTS + at).to_be_bytes();
            endpoint.iter_mut().zip(id).for_each(|(byte, part)| *byte = part);
            endpoint.into()
        };
        AffiliateUpdateRequest {
            cluster_id: cluster(number % clusters),
            affiliate_id: format!("affiliate-{affiliate}"),
            affiliate_data: Some(data.into()),
            affiliate_endpoints: (0..ENDPOINTS).map(endpoint).collect(),
            ttl: Some(wire::Duration { seconds: i64::try_from(TTL.as_secs()).unwrap_or_default(), nanos: 0 }),
        }
    }

    async fn send(&self, number: usize) -> Result<()> {
        let mut client = self.clients.get(number % CONNECTIONS).context("no connection")?.clone();
        client.affiliate_update(self.request(number)).await.map(drop).context("an update was refused")
    }

    async fn publish(&self) -> Result<String> {
        let (all, start) = (self.load.clusters.saturating_mul(self.load.affiliates), Instant::now());
        stream::iter(0..all)
            .map(|number| self.send(number))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>()
            .await?;
        Ok(format!("{all} {}", start.elapsed().as_secs_f64()))
    }

    async fn update(&self, length: Duration) -> Result<String> {
        let start = Instant::now();
        let numbers = stream::iter(0_usize..).take_while(|_| std::future::ready(start.elapsed() < length));
        let sent = numbers.map(|number| self.send(number)).buffer_unordered(IN_FLIGHT);
        let updates = sent.try_fold(0_usize, async |count, ()| Ok(count.saturating_add(1))).await?;
        Ok(format!("{updates} {}", start.elapsed().as_secs_f64()))
    }

    /// Begins the watches; each has shown all affiliates.
    async fn watch(&self) -> Result<String> {
        let clients = connections(&self.load.address).await?;
        let watches = self.load.clusters.saturating_mul(self.load.watches);
        for number in 0..watches {
            let mut client = clients.get(number % CONNECTIONS).context("no connection")?.clone();
            let cluster_id = cluster(number % self.load.clusters.max(1));
            let mut changes = client.watch(WatchRequest { cluster_id }).await?.into_inner();
            let mut known = 0_usize;
            while known < self.load.affiliates {
                let message = changes.message().await?.context("a watch ended")?;
                known = known.saturating_add(message.affiliates.len());
            }
            let (sees, start) = (self.sees.clone(), self.start);
            tokio::spawn(async move {
                while let Ok(Some(message)) = changes.message().await {
                    let now = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    for affiliate in message.affiliates {
                        let made = affiliate.data.first_chunk().map(|made| u64::from_be_bytes(*made));
                        // The receiver is gone when the program ends.
                        let _ = sees.send((made.unwrap_or_default(), now));
                    }
                }
            });
        }
        Ok(watches.to_string())
    }

    async fn pace(&mut self, length: Duration) -> Result<String> {
        while self.seen.try_recv().is_ok() {}
        let (start, since) = (Instant::now(), self.start.elapsed());
        let mut ticks = interval(Duration::from_secs(1) / PACE);
        // A server that falls behind is not given less.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut sent = 0_usize;
        while start.elapsed() < length {
            ticks.tick().await;
            self.send(sent).await?;
            sent = sent.saturating_add(1);
        }
        let expected = sent.saturating_mul(self.load.watches);
        let since = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let mut delays = Vec::new();
        while delays.len() < expected
            && let Ok(Some((made, seen))) = timeout(PATIENCE, self.seen.recv()).await
        {
            if made >= since {
                delays.push(Duration::from_nanos(seen.saturating_sub(made)).as_secs_f64() * 1000.0);
            }
        }
        let of = |share| percentile(&delays, share).unwrap_or(f64::NAN);
        let missing = expected.saturating_sub(delays.len());
        Ok(format!("{sent} {} {missing} {} {}", delays.len(), of(0.5), of(0.99)))
    }
}

fn cluster(number: usize) -> String {
    format!("cluster-{number}")
}

async fn connections(address: &str) -> Result<Vec<ClusterClient<Channel>>> {
    let connect = || ClusterClient::connect(format!("http://{address}"));
    let connections = stream::iter(0..CONNECTIONS).then(|_| connect()).try_collect();
    connections.await.with_context(|| format!("cannot connect to {address}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_arguments_are_read_again() {
        let load =
            Load { address: "127.0.0.1:3000".to_owned(), clusters: 10, affiliates: 1_000, watches: 20 };
        assert_eq!(Load::parse(&load.arguments()).unwrap(), load);
        assert!(Load::parse(&load.arguments()[..3]).is_err());
        assert!(load.to_string().contains("10 clusters of 1000 affiliates"));
    }
}
