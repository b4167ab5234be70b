//! Objects without the fields that are never read, for caches: a program must stay small in a large cluster. `managedFields`
//! alone are half of most objects.

use kube::ResourceExt;
use kube::api::ObjectMeta;

/// Holds a copy of the whole object (`kubectl apply`).
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// For objects of any kind.
pub fn any(object: &mut impl ResourceExt) {
    object.meta_mut().managed_fields = None;
    if let Some(annotations) = &mut object.meta_mut().annotations {
        annotations.remove(LAST_APPLIED);
    }
}

/// For objects of whose metadata only identity and labels are read.
pub fn labelled(object: &mut impl ResourceExt) {
    let labels = object.meta_mut().labels.take();
    *object.meta_mut() = ObjectMeta { labels, ..identity(object.meta_mut()) };
}

/// For objects of whose metadata only the identity and the timestamps are read.
pub fn identified(object: &mut impl ResourceExt) {
    *object.meta_mut() = identity(object.meta_mut());
}

fn identity(metadata: &mut ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: metadata.name.take(),
        namespace: metadata.namespace.take(),
        uid: metadata.uid.take(),
        resource_version: metadata.resource_version.take(),
        creation_timestamp: metadata.creation_timestamp.take(),
        deletion_timestamp: metadata.deletion_timestamp.take(),
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn object() -> ConfigMap {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": { "key": "value" },
            "metadata": {
                "name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7",
                "deletionTimestamp": "2026-01-01T00:00:00Z", "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": { "label": "yes" }, "finalizers": ["one"], "managedFields": [{ "manager": "kubectl" }],
                "annotations": { LAST_APPLIED: "{}", "mine": "yes" },
            },
        }))
        .unwrap()
    }

    #[test]
    fn what_users_wrote_is_kept() {
        let mut lean = object();
        any(&mut lean);
        assert_eq!(lean.annotations().keys().collect::<Vec<_>>(), ["mine"]);
        assert_eq!((lean.finalizers().len(), lean.labels().len(), lean.managed_fields().len()), (1, 1, 0));
        assert_eq!(lean.data, object().data);
    }

    #[test]
    fn the_identity_is_kept() {
        let mut lean = object();
        labelled(&mut lean);
        let mut expected = object();
        expected.metadata =
            ObjectMeta { finalizers: None, managed_fields: None, annotations: None, ..expected.metadata };
        assert_eq!(lean, expected);
        identified(&mut lean);
        expected.metadata.labels = None;
        assert_eq!(lean, expected);
    }
}
