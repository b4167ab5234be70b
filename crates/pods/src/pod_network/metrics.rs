//! Counts of what was corrected.

use fairlead_cluster::metrics::declare;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Object of the kernel that differed from the desired state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    /// The routes that refuse packets to addresses of blocks that no pod has.
    Block,
    /// The nftables table that marks packets of pods for firewalls.
    Firewall,
    /// Forwarding of a family.
    Forwarding,
    /// The nftables table that masquerades.
    Masquerade,
    /// A pod's link, its addresses or its routes.
    Pod,
    /// The rule that leads to the table of pods.
    Rule,
    /// The nftables table that checks source addresses.
    SourceCheck,
}

impl Object {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Firewall => "firewall",
            Self::Forwarding => "forwarding",
            Self::Masquerade => "masquerade",
            Self::Pod => "pod",
            Self::Rule => "rule",
            Self::SourceCheck => "source_check",
        }
    }
}

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub struct PodNetworkMetrics {
    corrected: Family<[(&'static str, &'static str); 1], Counter>,
}

impl PodNetworkMetrics {
    /// Declares them in `all`.
    pub fn register(all: &mut Registry) -> Self {
        let ours = all.sub_registry_with_prefix("fairlead_pod_network");
        let help = "Objects of the kernel that differed from what pods need and were corrected";
        Self { corrected: declare(ours, "corrections", help) }
    }

    /// One operation was needed.
    pub fn corrected(&self, object: Object) {
        self.corrected.get_or_create(&[("object", object.as_str())]).inc();
    }
}
