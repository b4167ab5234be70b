//! Flags of Coil's `coild`: routing table IDs and rule priorities, and flags that are accepted without effect so that
//! Coil's manifests keep working.

use clap::Args;
use fairlead_api::names::{ROUTE_PROTOCOL, RULE_PRIORITY_PODS, TABLE_EXPORT, TABLE_PODS};
use fairlead_node::routing_ids::{RawRoutingIds, Reserved, RoutingIds};

/// Routing tables, rule priority and route protocol. They have no effect with `--enable-ipam=false`.
#[derive(Debug, Args)]
pub(crate) struct RoutingArguments {
    /// Routing table of this node's pods
    #[arg(long, value_name = "ID", default_value_t = TABLE_PODS, hide_short_help = true)]
    pod_table_id: u32,
    /// Priority of the routing rule that looks up the table of pods
    #[arg(long, value_name = "PRIORITY", default_value_t = RULE_PRIORITY_PODS, hide_short_help = true)]
    pod_rule_prio: u32,
    /// Routing table that exports this node's blocks to routing daemons
    #[arg(long, value_name = "ID", default_value_t = TABLE_EXPORT, hide_short_help = true)]
    export_table_id: u32,
    /// Route protocol of the routes in both tables
    #[arg(long, value_name = "ID", default_value_t = ROUTE_PROTOCOL.into(), hide_short_help = true)]
    protocol_id: u32,
}

impl RoutingArguments {
    /// The IDs, unless one of them is reserved.
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

/// Flags that are accepted and ignored.
#[derive(Debug, Default, Args)]
pub(crate) struct IgnoredArguments {
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

impl IgnoredArguments {
    /// Names of the flags that were given.
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
        let required = ["fairlead", "node", "--node-name", "a"];
        let Command::Node(node) =
            Arguments::parse_from(required.into_iter().chain(flags.split_whitespace())).command
        else {
            panic!("unexpected command")
        };
        *node
    }

    #[test]
    fn flags_of_coil_are_accepted_and_ignored_ones_are_listed() {
        let flags = "-v 2 --enable-ipam=false --enable-egress --egress-port=5555 --compat-calico \
                     --backend nftables --addressblock-gc-interval=10m --health-addr=:9385";
        let given = node(flags);
        assert_eq!((given.enable_ipam, given.enable_egress, given.compat_calico), (false, true, true));
        assert_eq!(given.addressblock_gc_interval, Duration::from_secs(600));
        assert_eq!(given.ignored.given(), ["-v", "--egress-port", "--backend"]);
        let plain = node("");
        assert_eq!((plain.enable_ipam, plain.compat_calico, plain.ignored.given().len()), (true, false, 0));
    }

    #[test]
    fn routing_ids_are_parsed_and_reserved_ones_refused() {
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
