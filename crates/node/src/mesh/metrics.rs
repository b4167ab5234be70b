//! Metrics of the mesh and its peers.

use std::sync::atomic::AtomicU64;
use std::time::SystemTime;

use fairlead_cluster::metrics::{register, register_with_unit};
use fairlead_path::State;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::report::Report;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Peer {
    peer: String,
}

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub struct MeshMetrics {
    peer_up: Family<Peer, Gauge>,
    peer_handshake: Family<Peer, Gauge<f64, AtomicU64>>,
    peer_received: Family<Peer, Gauge>,
    peer_sent: Family<Peer, Gauge>,
    problems: Gauge,
    netlink_changes: Gauge,
}

impl MeshMetrics {
    /// Declares them in `all`.
    pub fn register(all: &mut Registry) -> Self {
        let ours = all.sub_registry_with_prefix("fairlead");
        let handshake = "When the last handshake with the peer completed";
        let received = "What the WireGuard device received from the peer since it was added";
        let sent = "What the WireGuard device sent to the peer since it was added";
        let changes = "Messages that changed kernel state since the start";
        Self {
            peer_up: register(ours, "peer_up", "Whether the tunnel to the peer works", Family::default()),
            peer_handshake: register_with_unit(
                ours,
                "peer_last_handshake_timestamp",
                handshake,
                Unit::Seconds,
                Family::default(),
            ),
            peer_received: register_with_unit(
                ours,
                "peer_received",
                received,
                Unit::Bytes,
                Family::default(),
            ),
            peer_sent: register_with_unit(ours, "peer_sent", sent, Unit::Bytes, Family::default()),
            problems: register(
                ours,
                "mesh_problems",
                "Problems that `fairlead status` explains",
                Gauge::default(),
            ),
            netlink_changes: register(ours, "netlink_changes", changes, Gauge::default()),
        }
    }

    /// The mesh was reconciled. Peers that are gone disappear.
    pub fn update(&self, report: &Report) {
        self.problems.set(report.problems.len() as i64);
        self.netlink_changes.set(fairlead_netlink::changes_sent() as i64);
        for family in [&self.peer_up, &self.peer_received, &self.peer_sent] {
            family.clear();
        }
        self.peer_handshake.clear();
        for peer in &report.peers {
            let label = Peer { peer: peer.name.clone() };
            self.peer_up.get_or_create(&label).set(i64::from(peer.path.state == State::Up));
            let Some(device) = &peer.device else { continue };
            self.peer_received.get_or_create(&label).set(device.rx_bytes as i64);
            self.peer_sent.get_or_create(&label).set(device.tx_bytes as i64);
            let at = device.last_handshake.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
            if let Some(at) = at {
                self.peer_handshake.get_or_create(&label).set(at.as_secs_f64());
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn example(&self) {
        let peer = Peer { peer: "a".to_owned() };
        drop(self.peer_up.get_or_create(&peer));
        drop(self.peer_handshake.get_or_create(&peer));
        drop(self.peer_received.get_or_create(&peer));
        drop(self.peer_sent.get_or_create(&peer));
    }
}
