//! Source addresses as other subsystems see them: those that this node announces, and the nodes that may have them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use fairlead_topology::SourceNodes;
use tokio::sync::watch;

/// Nodes that may have each source address of the cluster.
pub(crate) type Nodes = BTreeMap<IpAddr, SourceNodes>;

/// Source addresses that this node announces, and those of the cluster; cheap to clone.
#[derive(Clone)]
pub struct SourceAddresses {
    pub(super) announced: watch::Sender<BTreeSet<IpAddr>>,
    nodes: watch::Sender<Option<Arc<Nodes>>>,
    report: Arc<Mutex<Report>>,
}

/// Source addresses that are announced, and those that are not, for the status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Source addresses that this node announces.
    pub announced: Vec<Shown>,
    /// Reasons why others are not announced, one sentence each, with a CamelCase word in front.
    pub problems: Vec<String>,
}

/// An address that is announced, for status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The address.
    pub address: IpAddr,
    /// Namespace and name of the Egress.
    pub egress: String,
    /// Name of the gateway pod that holds it.
    pub gateway: String,
    /// Term of the hold.
    pub term: u64,
    /// Links by which hosts beside this node find it.
    pub links: Vec<String>,
}

impl Default for SourceAddresses {
    fn default() -> Self {
        let (announced, nodes) = (watch::Sender::new(BTreeSet::new()), watch::Sender::new(None));
        Self { announced, nodes, report: Arc::default() }
    }
}

impl SourceAddresses {
    /// Takes what the kernel has from before the start.
    pub fn adopt(&self, addresses: BTreeSet<IpAddr>) {
        self.set_announced(addresses);
    }

    /// The addresses that this node announces.
    pub fn announced(&self) -> watch::Receiver<BTreeSet<IpAddr>> {
        self.announced.subscribe()
    }

    /// Nodes that may have each address; `None` until the API server has answered.
    pub fn nodes(&self) -> watch::Receiver<Option<Arc<Nodes>>> {
        self.nodes.subscribe()
    }

    /// Addresses that are announced, and problems with others.
    pub fn report(&self) -> Report {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_announced(&self, addresses: BTreeSet<IpAddr>) {
        self.announced.send_if_modified(|known| {
            let differs = *known != addresses;
            *known = addresses;
            differs
        });
    }

    pub(super) fn set_nodes(&self, nodes: Nodes) {
        self.nodes.send_if_modified(|known| {
            let differs = known.as_deref() != Some(&nodes);
            if differs {
                *known = Some(Arc::new(nodes));
            }
            differs
        });
    }

    pub(super) fn set_report(&self, report: Report) {
        let mut known = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        if known.problems != report.problems {
            tracing::warn!(problems = ?report.problems, "source addresses of egress gateways have other problems than before");
        }
        *known = report;
    }
}
