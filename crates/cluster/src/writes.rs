//! Writes to objects that were read from a watch, and may have changed since.

use std::fmt::Debug;

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Whether a write failed because the object was deleted or changed since it was read. The watch shows what it is now.
pub fn is_stale(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found() || status.is_conflict())
}

/// Applies a patch of the status of an object as `manager`. That the object [is stale](is_stale) is no error.
///
/// # Errors
/// The API server refuses it otherwise, or cannot be reached.
pub async fn apply_status<K>(api: &Api<K>, name: &str, manager: &str, patch: &Value) -> kube::Result<()>
where
    K: Clone + DeserializeOwned + Debug,
{
    let written = api.patch_status(name, &PatchParams::apply(manager).force(), &Patch::Apply(patch)).await;
    written.map(drop).or_else(|error| if is_stale(&error) { Ok(()) } else { Err(error) })
}

/// The finalizers of an object without one of them.
pub fn other_finalizers(object: &impl ResourceExt, finalizer: &str) -> Vec<String> {
    object.finalizers().iter().filter(|other| *other != finalizer).cloned().collect()
}

/// Replaces all finalizers of the version of an object that was read.
///
/// # Errors
/// The API server refused, or the object [is stale](is_stale).
pub async fn replace_finalizers<K>(
    api: &Api<K>,
    name: &str,
    finalizers: &[String],
    version: Option<&str>,
) -> kube::Result<K>
where
    K: Clone + DeserializeOwned + Debug,
{
    let metadata = serde_json::json!({ "finalizers": finalizers, "resourceVersion": version });
    let patch = Patch::Merge(serde_json::json!({ "metadata": metadata }));
    api.patch(name, &PatchParams::default(), &patch).await
}

/// Removes one finalizer of the version of an object that was read.
///
/// # Errors
/// As of [`replace_finalizers`].
pub async fn remove_finalizer<K>(api: &Api<K>, object: &K, finalizer: &str) -> kube::Result<K>
where
    K: ResourceExt + Clone + DeserializeOwned + Debug,
{
    let others = other_finalizers(object, finalizer);
    replace_finalizers(api, &object.name_any(), &others, object.resource_version().as_deref()).await
}
