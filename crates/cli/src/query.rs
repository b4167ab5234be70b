//! Queries of the command line: on one thread, to the node program of this machine, with the exit code of a problem that was found.

use std::path::Path;

use anyhow::Context as _;
use fairlead_wire::node::node_client::NodeClient;
use tonic::transport::{Channel, Endpoint};

/// Exit code of a query that succeeded and found a problem.
pub const PROBLEM_FOUND: u8 = 3;

/// Runs a query on this thread.
///
/// # Errors
/// The runtime cannot be started, or the query fails.
pub fn current_thread<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Connects to the node program at a UNIX socket.
pub(crate) async fn connect(socket: &Path) -> anyhow::Result<NodeClient<Channel>> {
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
        .with_context(|| format!("{} is not the path of a UNIX socket", socket.display()))?
        .connect()
        .await
        .with_context(|| {
            format!(
                "no node program answers at {}: run this as root on a node where `fairlead node` runs, or use --cluster",
                socket.display()
            )
        })?;
    Ok(NodeClient::new(channel))
}
