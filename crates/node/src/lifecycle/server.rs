//! The UNIX socket of the CNI plugin and the command line.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context as _;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_pods::cni::CniHandle;
use fairlead_wire::cni::cni_server::CniServer;
use fairlead_wire::network::network_server::NetworkServer;
use fairlead_wire::node::node_server::NodeServer;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;

use crate::status;

/// Serves the CNI operations and the status until the subsystem is stopped; calls in progress are finished.
///
/// # Errors
/// The socket cannot be made.
pub(crate) fn start(
    subsystem: &mut Subsystem,
    path: &Path,
    cni: CniHandle,
    status: status::Service,
) -> anyhow::Result<()> {
    let listener = listen(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    let router = tonic::transport::Server::builder()
        .add_service(CniServer::new(cni.clone()))
        .add_service(NetworkServer::new(cni))
        .add_service(NodeServer::new(status))
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    tracing::info!(socket = %path.display(), "serving");
    subsystem.spawn_graceful("server", |stop| {
        router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned())
    });
    Ok(())
}

/// Lists the services for clients such as `grpcurl`, in the current version of the protocol and in the older one that Coil's
/// library speaks too.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(fairlead_wire::FILE_DESCRIPTORS)
}

/// Binds beside the path and renames, so that a stale socket is replaced in one step.
fn listen(path: &Path) -> std::io::Result<UnixListener> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let temporary = path.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary)?;
    // Only root may attach pods.
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&temporary, path)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    };

    use super::*;

    #[tokio::test]
    async fn clients_without_proto_files_find_the_services() {
        let mut client = ServerReflectionClient::new(reflection().build_v1().unwrap());
        let list = MessageRequest::ListServices(String::new());
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
        let mut answers =
            client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
        let answer = answers.next().await.unwrap().unwrap().message_response;
        let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
        let names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
        for name in ["pkg.cnirpc.CNI", "fairlead.cni.v1.Network", "fairlead.node.v1.Node"] {
            assert!(names.iter().any(|found| found == name), "{names:?}");
        }
    }
}
