//! Deletes a node at its discovery services when its program has ended: others forget it at once, and not after the half hour
//! for which services keep what they were told.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use fairlead_discovery::client::{self, ServerEndpoint, authorities, node_id};
use fairlead_wire::discovery::ClusterSecret;
use futures::future::join_all;
use tokio::time::timeout;

use super::LEAVE;
use crate::mesh::saved::{Credentials, SavedServices, StateFile};

/// Deletes the node of this state directory at the services that it used last, and logs which of them cannot be told. Nothing is
/// done without such services.
///
/// # Errors
/// What the node program saved cannot be used.
pub(crate) async fn leave(state_directory: &Path) -> Result<()> {
    let file = StateFile { directory: state_directory.to_owned(), node: String::new() };
    let Some(services) = file.read_services()? else { return Ok(()) };
    let credentials = file.saved_credentials();
    let credentials = credentials.context("the secret of its cluster is not saved")?;
    let settings = settings(&services, &credentials)?;
    join_all(settings.iter().map(|settings| async move {
        let server = &settings.server;
        match timeout(LEAVE, client::leave(settings)).await {
            Ok(Ok(())) => tracing::info!(%server, "deleted this node at a discovery service"),
            Ok(Err(error)) => {
                tracing::warn!(%server, %error, "cannot delete this node at a discovery service, which forgets it after half an hour");
            }
            Err(_) => {
                let seconds = LEAVE.as_secs();
                tracing::warn!(%server, "no answer from a discovery service within {seconds} s; it forgets this node after half an hour");
            }
        }
    }))
    .await;
    Ok(())
}

fn settings(services: &SavedServices, credentials: &Credentials) -> Result<Vec<client::Settings>> {
    let roots = Arc::new(authorities(services.ca_bundle.as_deref().map(str::as_bytes))?);
    let node = node_id(&credentials.secret, &services.node);
    let of_server = |text: &String| {
        let server: ServerEndpoint = text.parse()?;
        let secret = ClusterSecret::new(credentials.secret);
        let (id, node) = (credentials.cluster_id.clone(), node.clone());
        Ok(client::Settings::new(server, id, secret, node, Arc::clone(&roots)))
    };
    services.servers.iter().map(of_server).collect()
}
