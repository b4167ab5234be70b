//! Deletes a node at its discovery services when its program has ended: others forget it at once, and not after the half hour
//! for which services keep what they were told.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use fairlead_discovery::client::{self, authorities, node_id};
use fairlead_wire::discovery::ClusterSecret;
use futures::future::join_all;
use tokio::time::timeout;

use crate::saved::discovery::{Credentials, SavedServices, Secrets};
use crate::state_file::StateFile;

/// Longest wait for a service that is told that this node leaves.
pub(super) const LEAVE: Duration = Duration::from_secs(5);

/// Deletes the node of this state directory at the services that it used last, and logs which of them cannot be told. Nothing is
/// done without such services.
///
/// # Errors
/// The files that the node program saved cannot be used.
pub async fn leave(state_directory: &Path) -> Result<()> {
    let file = StateFile { directory: state_directory.to_owned(), node: String::new() };
    let Some(services) = file.read_services()? else { return Ok(()) };
    let secrets = file.saved_secrets().context("the secret of its cluster is not saved")?;
    let settings = settings(&services, &secrets)?;
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

/// Settings of a client for each service and each secret under which this node is there.
fn settings(services: &SavedServices, secrets: &Secrets) -> Result<Vec<client::Settings>> {
    let roots = Arc::new(authorities(services.ca_bundle.as_deref().map(str::as_bytes))?);
    let previous = secrets.previous.as_ref().map(|previous| &previous.credentials);
    let mut all = Vec::new();
    for Credentials { cluster_id, secret } in std::iter::once(&secrets.current).chain(previous) {
        let node = node_id(secret, &services.node);
        for server in &services.servers {
            let server = server.parse()?;
            let shared = ClusterSecret::new(*secret);
            let roots = Arc::clone(&roots);
            all.push(client::Settings::new(server, cluster_id.clone(), shared, node.clone(), roots));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::discovery::Previous;

    #[test]
    fn while_the_secret_changes_a_node_is_deleted_under_both() {
        let services = SavedServices {
            node: "n1".to_owned(),
            servers: vec!["https://a:1".to_owned(), "https://b:1".to_owned()],
            ca_bundle: Some(rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap().cert.pem()),
        };
        let of = |byte| Credentials { cluster_id: format!("c{byte}"), secret: [byte; 32] };
        let previous = Previous { credentials: of(1), changed: jiff::Timestamp::now() };
        let secrets = Secrets { current: of(2), previous: Some(previous) };
        let deleted = |secrets: &Secrets| -> Vec<(String, String)> {
            let all = settings(&services, secrets).unwrap();
            all.into_iter().map(|it| (it.server.to_string(), it.cluster_id)).collect()
        };
        assert_eq!(deleted(&secrets).len(), 4, "{:?}", deleted(&secrets));
        assert_eq!(deleted(&secrets).iter().filter(|(_, cluster)| cluster == "c1").count(), 2);
        assert_eq!(deleted(&Secrets { previous: None, ..secrets }).len(), 2);
    }
}
