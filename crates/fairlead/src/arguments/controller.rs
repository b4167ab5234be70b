//! Arguments of `fairlead controller`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use fairlead_cli::arguments::value_parsers::{duration, listen_address};

use crate::coil_compat::{IgnoredLoggingArguments, IgnoredWebhookArguments};

#[derive(Debug, Args)]
pub(crate) struct ControllerArguments {
    /// Identity of this replica in the leader election
    #[arg(long, value_name = "NAME", env = "HOSTNAME", default_value = "fairlead-controller")]
    pub(crate) identity: String,
    /// Serve Prometheus metrics on this address; port 0 serves none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9386", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve metrics with TLS, and only for tokens that the API server allows to `get` /metrics
    #[arg(long, env = "FAIRLEAD_METRICS_SECURE", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) metrics_secure: bool,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9387", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// Interval of attempts to release the blocks of deleted Nodes, in addition to every change of a Node
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) gc_interval: Duration,
    /// Release the blocks of a Node after it has been deleted for this long and no Pod of it is left
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) deleted_node_grace: Duration,
    #[command(flatten)]
    pub(crate) webhook: IgnoredWebhookArguments,
    #[command(flatten)]
    pub(crate) logging: IgnoredLoggingArguments,
}

impl ControllerArguments {
    /// Names of the flags that were given and have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut flags = self.logging.given();
        flags.extend(self.webhook.given());
        flags
    }
}
