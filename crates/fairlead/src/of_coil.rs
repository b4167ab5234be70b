//! Flags of Coil's `coild`: numbers in the kernel, and those that are accepted only so that its manifests work.

use clap::Args;
use fairlead_api::names::{ROUTE_PROTOCOL, RULE_PRIORITY_PODS, TABLE_EXPORT, TABLE_PODS};
use fairlead_node::routing_ids::{RawRoutingIds, Reserved, RoutingIds};

/// Where routes of pods and blocks stand. Without addresses of our own these numbers stand for nothing.
#[derive(Debug, Args)]
pub(crate) struct KernelNumbers {
    /// Routing table for this node's pods
    #[arg(long, value_name = "NUMBER", default_value_t = TABLE_PODS, hide_short_help = true)]
    pod_table_id: u32,
    /// Priority of the rule that looks it up
    #[arg(long, value_name = "NUMBER", default_value_t = RULE_PRIORITY_PODS, hide_short_help = true)]
    pod_rule_prio: u32,
    /// Routing table with this node's blocks, for routing daemons
    #[arg(long, value_name = "NUMBER", default_value_t = TABLE_EXPORT, hide_short_help = true)]
    export_table_id: u32,
    /// Route protocol of these routes
    #[arg(long, value_name = "NUMBER", default_value_t = ROUTE_PROTOCOL.into(), hide_short_help = true)]
    protocol_id: u32,
}

impl KernelNumbers {
    /// The numbers, if they are nobody else's.
    pub(crate) fn checked(&self, enable_ipam: bool) -> Result<RoutingIds, Reserved> {
        if !enable_ipam {
            return Ok(RoutingIds::default());
        }
        RoutingIds::try_from(RawRoutingIds {
            table_pods: self.pod_table_id,
            rule_priority: self.pod_rule_prio,
            table_export: self.export_table_id,
            protocol: self.protocol_id,
        })
    }
}

/// Flags that change nothing here.
#[derive(Debug, Default, Args)]
pub(crate) struct OfCoil {
    #[arg(short, long, hide = true)]
    v: Option<String>,
    #[arg(long, hide = true)]
    vmodule: Option<String>,
    #[arg(long, hide = true)]
    logtostderr: Option<Option<String>>,
    #[arg(long, hide = true)]
    egress_port: Option<String>,
    #[arg(long, hide = true)]
    backend: Option<String>,
    #[arg(long, hide = true)]
    enable_originating_only: Option<Option<String>>,
    #[arg(long, hide = true)]
    register_from_main: Option<Option<String>>,
}

impl OfCoil {
    /// Those that were given.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        [
            ("-v", self.v.is_some()),
            ("--vmodule", self.vmodule.is_some()),
            ("--logtostderr", self.logtostderr.is_some()),
            ("--egress-port", self.egress_port.is_some()),
            ("--backend", self.backend.is_some()),
            ("--enable-originating-only", self.enable_originating_only.is_some()),
            ("--register-from-main", self.register_from_main.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.then_some(name))
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser as _;

    use crate::arguments::{Arguments, Command, NodeArguments};

    fn node(flags: &str) -> NodeArguments {
        let usual = ["fairlead", "node", "--node-name", "a"];
        let Command::Node(node) =
            Arguments::parse_from(usual.into_iter().chain(flags.split_whitespace())).command
        else {
            panic!("another command")
        };
        *node
    }

    #[test]
    fn coils_flags_are_accepted_and_those_without_effect_are_known() {
        let coils = "-v 2 --enable-ipam=false --enable-egress --egress-port=5555 --compat-calico \
                     --backend nftables --addressblock-gc-interval=10m --health-addr=:9385";
        let given = node(coils);
        assert_eq!((given.enable_ipam, given.enable_egress, given.compat_calico), (false, true, true));
        assert_eq!(given.addressblock_gc_interval, Duration::from_secs(600));
        assert_eq!(given.of_coil.given(), ["-v", "--egress-port", "--backend"]);
        let plain = node("");
        assert_eq!((plain.enable_ipam, plain.compat_calico, plain.of_coil.given().len()), (true, false, 0));
    }

    #[test]
    fn numbers_are_read_and_those_of_others_refused_where_they_matter() {
        let ours = "--pod-table-id=116 --pod-rule-prio=2000 --export-table-id=119 --protocol-id=30";
        assert_eq!(node(ours).numbers.checked(true), node("").numbers.checked(true));
        let others = node("--pod-table-id=1116 --export-table-id 1119 --pod-rule-prio=1990 --protocol-id=40");
        let numbers = others.numbers.checked(true).unwrap();
        assert_eq!((numbers.table_pods(), numbers.table_export()), (1116, 1119));
        assert_eq!((numbers.rule_priority(), numbers.protocol()), (1990, 40));
        let main = node("--pod-table-id=254");
        let words = main.numbers.checked(true).unwrap_err().to_string();
        assert_eq!(words, "table of pods 254 is one of the kernel's own");
        let standalone = node("--enable-ipam=false --pod-table-id=0 --protocol-id=2");
        assert!(standalone.numbers.checked(false).is_ok());
    }
}
