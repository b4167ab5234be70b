//! The Secret for discovery services: made once where a mesh names services and there is none.
//!
//! It is never changed: an operator may have pasted that of another program, and another secret would separate nodes that have
//! read it from those that have not.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use fairlead_api::names::{
    DISCOVERY_CLUSTER_ID, DISCOVERY_CLUSTER_SECRET, DISCOVERY_SECRET, SYSTEM_NAMESPACE,
};
use fairlead_api::resources::WireKubeMesh;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Field manager of the Secret.
const MANAGER: &str = "fairlead-controller-discovery";
/// Interval of checks for the Secret while a mesh needs it; a change of the mesh is seen at once.
const INTERVAL: Duration = Duration::from_secs(60);
/// Pause after a failed check.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Runs forever.
pub(crate) async fn run(client: Client, meshes: Store<WireKubeMesh>, mut changed: watch::Receiver<u64>) {
    loop {
        let pause = match needs_secret(meshes.state()) {
            true => match make(&client).await {
                Ok(()) => INTERVAL,
                Err(error) => {
                    tracing::warn!(%error, "cannot make Secret {SYSTEM_NAMESPACE}/{DISCOVERY_SECRET}; retrying");
                    RETRY_INTERVAL
                }
            },
            false => INTERVAL,
        };
        let _ = timeout(pause, changed.changed()).await;
        // A burst of changes is one.
        sleep(Duration::from_millis(200)).await;
    }
}

/// Whether the mesh that counts, the first by name, has discovery services and names no Secret of its own.
fn needs_secret(mut meshes: Vec<Arc<WireKubeMesh>>) -> bool {
    meshes.sort_by_key(|mesh| mesh.name_any());
    let discovery = meshes.first().and_then(|mesh| mesh.spec.discovery.as_ref());
    discovery.is_some_and(|discovery| discovery.secret() == (SYSTEM_NAMESPACE, DISCOVERY_SECRET))
}

/// Makes the Secret if there is none.
async fn make(client: &Client) -> kube::Result<()> {
    let secrets = Api::<Secret>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    if secrets.get_opt(DISCOVERY_SECRET).await?.is_some() {
        return Ok(());
    }
    // Not forced: one that is pasted in this moment is not taken over.
    let object = secret(rand::random(), rand::random());
    secrets.patch(DISCOVERY_SECRET, &PatchParams::apply(MANAGER), &Patch::Apply(object)).await?;
    tracing::info!("made Secret {SYSTEM_NAMESPACE}/{DISCOVERY_SECRET} for discovery services");
    Ok(())
}

/// Both values are written as Talos writes its own.
fn secret(id: [u8; 32], secret: [u8; 32]) -> Value {
    let data: BTreeMap<&str, String> =
        [(DISCOVERY_CLUSTER_ID, URL_SAFE.encode(id)), (DISCOVERY_CLUSTER_SECRET, STANDARD.encode(secret))]
            .into();
    let labels = json!({ "app.kubernetes.io/name": "fairlead", "app.kubernetes.io/component": "discovery" });
    json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": DISCOVERY_SECRET, "namespace": SYSTEM_NAMESPACE, "labels": labels },
        "stringData": data,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(name: &str, spec: &Value) -> Arc<WireKubeMesh> {
        Arc::new(WireKubeMesh::new(name, serde_json::from_value(spec.clone()).unwrap()))
    }

    #[test]
    fn the_secret_is_made_where_the_mesh_asks_for_no_other() {
        let plain = json!({ "discovery": { "endpoints": ["https://a"] } });
        let named = json!({ "discovery": { "endpoints": ["https://a"], "secretRef": { "name": "mine" } } });
        assert!(needs_secret(vec![mesh("a", &plain)]));
        assert!(!needs_secret(vec![mesh("a", &named)]));
        assert!(!needs_secret(vec![mesh("b", &plain), mesh("a", &json!({}))]));
        assert!(!needs_secret(Vec::new()));
    }

    #[test]
    fn the_secret_has_what_nodes_read() {
        let made = secret([1; 32], [2; 32]);
        assert_eq!(made["stringData"]["clusterSecret"].as_str().map(str::len), Some(44));
        assert_eq!(made["stringData"]["clusterID"].as_str().map(str::len), Some(44));
    }
}
