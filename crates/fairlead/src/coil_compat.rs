//! Flags of Coil's programs: routing table IDs and rule priorities, and flags that are accepted without effect so that
//! Coil's manifests keep working. Each flag without effect is named in the log once, at the start.

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

/// Flags of Coil's egress that are accepted and ignored.
#[derive(Debug, Default, Args)]
pub(crate) struct IgnoredEgressArguments {
    #[arg(long, hide = true)]
    egress_port: Option<String>,
    #[arg(long, hide = true)]
    backend: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    register_from_main: Option<String>,
}

impl IgnoredEgressArguments {
    /// Names of the flags that were given.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        given([
            ("--egress-port", self.egress_port.is_some()),
            ("--backend", self.backend.is_some()),
            ("--register-from-main", self.register_from_main.is_some()),
        ])
    }
}

/// Flags of the admission webhook of Coil's controller that are accepted and ignored: here the API server judges pools itself.
#[derive(Debug, Default, Args)]
pub(crate) struct IgnoredWebhookArguments {
    #[arg(long, hide = true)]
    webhook_addr: Option<String>,
    #[arg(long, hide = true)]
    cert_dir: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_cert_rotation: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_restart_on_cert_refresh: Option<String>,
}

impl IgnoredWebhookArguments {
    /// Names of the flags that were given.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        given([
            ("--webhook-addr", self.webhook_addr.is_some()),
            ("--cert-dir", self.cert_dir.is_some()),
            ("--enable-cert-rotation", self.enable_cert_rotation.is_some()),
            ("--enable-restart-on-cert-refresh", self.enable_restart_on_cert_refresh.is_some()),
        ])
    }
}

/// Flags of the logging libraries of Coil's programs (klog, and zap in controller-runtime), which are accepted and ignored.
#[derive(Debug, Default, Args)]
pub(crate) struct IgnoredLoggingArguments {
    #[arg(short, long, hide = true)]
    v: Option<String>,
    #[arg(long, hide = true)]
    vmodule: Option<String>,
    #[arg(long = "log_backtrace_at", hide = true)]
    log_backtrace_at: Option<String>,
    #[arg(long = "log_dir", hide = true)]
    log_dir: Option<String>,
    #[arg(long = "log_file", hide = true)]
    log_file: Option<String>,
    #[arg(long = "log_file_max_size", hide = true)]
    log_file_max_size: Option<String>,
    #[arg(long, hide = true)]
    stderrthreshold: Option<String>,
    #[arg(long = "add_dir_header", hide = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    add_dir_header: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    alsologtostderr: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    logtostderr: Option<String>,
    #[arg(long = "one_output", hide = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    one_output: Option<String>,
    #[arg(long = "skip_headers", hide = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    skip_headers: Option<String>,
    #[arg(long = "skip_log_headers", hide = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    skip_log_headers: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    zap_devel: Option<String>,
    #[arg(long, hide = true)]
    zap_encoder: Option<String>,
    #[arg(long, hide = true)]
    zap_log_level: Option<String>,
    #[arg(long, hide = true)]
    zap_stacktrace_level: Option<String>,
    #[arg(long, hide = true)]
    zap_time_encoding: Option<String>,
}

impl IgnoredLoggingArguments {
    /// Names of the flags that were given.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        given([
            ("-v", self.v.is_some()),
            ("--vmodule", self.vmodule.is_some()),
            ("--log_backtrace_at", self.log_backtrace_at.is_some()),
            ("--log_dir", self.log_dir.is_some()),
            ("--log_file", self.log_file.is_some()),
            ("--log_file_max_size", self.log_file_max_size.is_some()),
            ("--stderrthreshold", self.stderrthreshold.is_some()),
            ("--add_dir_header", self.add_dir_header.is_some()),
            ("--alsologtostderr", self.alsologtostderr.is_some()),
            ("--logtostderr", self.logtostderr.is_some()),
            ("--one_output", self.one_output.is_some()),
            ("--skip_headers", self.skip_headers.is_some()),
            ("--skip_log_headers", self.skip_log_headers.is_some()),
            ("--zap-devel", self.zap_devel.is_some()),
            ("--zap-encoder", self.zap_encoder.is_some()),
            ("--zap-log-level", self.zap_log_level.is_some()),
            ("--zap-stacktrace-level", self.zap_stacktrace_level.is_some()),
            ("--zap-time-encoding", self.zap_time_encoding.is_some()),
        ])
    }
}

fn given<const N: usize>(flags: [(&'static str, bool); N]) -> Vec<&'static str> {
    flags.into_iter().filter_map(|(name, given)| given.then_some(name)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser as _;

    use crate::arguments::node::NodeArguments;
    use crate::arguments::{Arguments, Command};

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
        let flags = "--enable-ipam=false --enable-egress --enable-originating-only --egress-port=5555 --compat-calico \
                     --backend nftables --addressblock-gc-interval=10m --health-addr=:9385";
        let given = node(flags);
        assert_eq!((given.enable_ipam, given.enable_egress, given.compat_calico), (false, true, true));
        assert!(given.enable_originating_only);
        assert_eq!(given.addressblock_gc_interval, Duration::from_secs(600));
        assert_eq!(given.without_effect(), ["--egress-port", "--backend"]);
        let plain = node("");
        assert_eq!((plain.enable_ipam, plain.compat_calico, plain.without_effect().len()), (true, false, 0));
        let off = node("--enable-egress=false");
        assert!(!off.enable_egress && !off.enable_originating_only && off.without_effect().is_empty());
    }

    #[test]
    fn logging_flags_of_coil_are_accepted_by_both_programs() {
        let klog = "-v 2 --vmodule=a=1 --log_backtrace_at x:1 --log_dir=/l --log_file /f --log_file_max_size=1 \
                    --stderrthreshold=2 --add_dir_header --alsologtostderr=true --logtostderr --one_output \
                    --skip_headers=false --skip_log_headers";
        let zap = "--zap-devel --zap-encoder json --zap-log-level=debug --zap-stacktrace-level=panic \
                   --zap-time-encoding=iso8601";
        let all = format!("{klog} {zap}");
        let expected: Vec<&str> = all
            .split_whitespace()
            .filter(|word| word.starts_with('-'))
            .map(|word| word.split_once('=').map_or(word, |(name, _)| name))
            .collect();
        assert_eq!(expected.len(), 18);
        assert_eq!(node(&all).without_effect(), expected);
        let words = ["fairlead", "controller"].into_iter().chain(all.split_whitespace());
        let Command::Controller(controller) = Arguments::parse_from(words).command else {
            panic!("unexpected command")
        };
        assert_eq!(controller.without_effect(), expected);
        assert_eq!(node("--v=4").without_effect(), ["-v"]);
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
