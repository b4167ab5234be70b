//! Writes of an agent to the API server: the status that the node program would make of it, when that would write it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use fairlead_api::resources::WireKubePeerStatus;
use fairlead_keys::{PeerConfig, PeerState, PublicKey};
use fairlead_mesh::apply::relay::{RelayReport, RelayTransport};
use fairlead_mesh::apply::report::{PeerReport, Report};
use fairlead_mesh::pause_after_write;
use fairlead_mesh::tell::publish::{Facts, desired, publish_status, urgency};
use fairlead_mesh::tell::write_budget::WriteBudget;
use fairlead_relay::client::{Endpoint, LinkCounters};
use fairlead_topology::Sources;
use kube::Client;
use tokio::sync::watch;

use super::agent::News;
use crate::mesh_scale;

/// Writes of all agents.
#[derive(Debug, Default)]
pub(super) struct Writes {
    pub(super) times: std::sync::Mutex<Vec<Instant>>,
    pub(super) failed: AtomicU64,
}

pub(super) struct Publisher {
    pub(super) client: Client,
    pub(super) name: String,
    pub(super) key: PublicKey,
    pub(super) keys: Arc<Vec<PublicKey>>,
    pub(super) endpoint: Endpoint,
    pub(super) writes: Arc<Writes>,
}

impl Publisher {
    /// Publishes until it is dropped, as the node program's publisher, without its caches.
    pub(super) async fn run(self, mut news: watch::Receiver<News>) -> Result<()> {
        let mut present: Option<WireKubePeerStatus> = None;
        let (mut budget, mut wait) = (WriteBudget::new(Instant::now()), None);
        loop {
            tokio::select! {
                changed = news.changed() => changed?,
                () = tokio::time::sleep(wait.unwrap_or(Duration::MAX)) => {}
            }
            wait = None;
            let report = self.report(&news.borrow_and_update());
            let status = desired(&Facts {
                node: &self.name,
                public_key: self.key,
                next_key: None,
                report: &report,
                claims: Vec::new(),
                observes: &|_, _| false,
                present: present.as_ref(),
                now: jiff::Timestamp::now(),
            })
            .status;
            let Some(urgency) = urgency(present.as_ref(), &status, self.keys.len()) else { continue };
            if let Err(time) = budget.take(Instant::now(), urgency) {
                wait = Some(time);
                continue;
            }
            if let Ok(mut times) = self.writes.times.lock() {
                times.push(Instant::now());
            }
            match publish_status(&self.client, &self.name, &status).await {
                Ok(()) => present = Some(status),
                Err(_) => drop(self.writes.failed.fetch_add(1, Ordering::Relaxed)),
            }
            let random = self.key.0.first().copied().unwrap_or_default();
            tokio::time::sleep(pause_after_write(u32::try_from(self.keys.len())?, random)).await;
        }
    }

    fn report(&self, news: &News) -> Report {
        let peer = |(number, path, has_session): &(usize, fairlead_path::Status, bool)| {
            let last_handshake = has_session.then(SystemTime::now);
            let config = PeerConfig { endpoint: path.endpoint, ..PeerConfig::default() };
            let key = *self.keys.get(*number)?;
            Some(PeerReport {
                name: mesh_scale::name(*number),
                public_key: key,
                relay: path.endpoint.map(|_| RelayTransport::Tcp),
                path: path.clone(),
                sources: Sources::default(),
                relay_reason: None,
                plain: Vec::new(),
                encapsulated: Vec::new(),
                device: Some(Arc::new(PeerState { config, last_handshake, rx_bytes: 1, tx_bytes: 1 })),
                prefixes: Vec::new(),
                published_endpoint: None,
            })
        };
        let relay = RelayReport {
            endpoint: self.endpoint.clone(),
            status: news.link.clone(),
            counters: LinkCounters::default(),
        };
        let peers = news.peers.iter().filter_map(peer).collect();
        Report { relay: Some(relay), ..mesh_scale::report_of(peers) }
    }
}

/// The most writes in any second, and how long they took from the first to the last.
pub(super) fn spread(times: &[Instant]) -> (usize, Duration) {
    let within = |first: &Instant| {
        let second = *first..*first + Duration::from_secs(1);
        times.iter().filter(|at| second.contains(*at)).count()
    };
    let most = times.iter().map(within).max().unwrap_or_default();
    let (first, last) = (times.iter().min(), times.iter().max());
    (most, first.zip(last).map(|(first, last)| *last - *first).unwrap_or_default())
}
