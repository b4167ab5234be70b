//! Arguments of `fairlead uninstall`.

use std::time::Duration;

use clap::Args;

use super::value_parsers::duration;
use crate::api::ApiArguments;

/// Arguments of `fairlead uninstall`.
#[derive(Debug, Args)]
pub struct UninstallArguments {
    #[command(flatten)]
    pub(crate) api: ApiArguments,
    /// Remove everything; without this flag, only report what would be removed
    #[arg(long)]
    pub(crate) yes: bool,
    /// Timeout of each step, such as the clean-up of all nodes
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// After the timeout, continue without the nodes that were not cleaned up
    #[arg(long)]
    pub(crate) skip_unreachable_nodes: bool,
}
