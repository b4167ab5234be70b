//! Objects that are applied, and compared with what was applied.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fairlead_cluster::lean;
use fairlead_cluster::writes::is_stale;
use fairlead_egress::status::Finding;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Field manager of the objects, and of what the status says of them.
pub(super) const MANAGER: &str = "fairlead-egress-controller";

/// Applies objects.
#[derive(Debug, Default)]
pub(super) struct Writer {
    applied: Mutex<BTreeMap<Name, Applied>>,
}

/// Kind, namespace and name.
type Name = (String, Option<String>, String);

/// Record of the last apply of an object.
#[derive(Debug)]
struct Applied {
    desired: Value,
    /// Fingerprint of the object after that write.
    fingerprint: u64,
}

/// An object that cannot be written.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// An object of this name belongs to another owner.
    #[error("{0}")]
    NameTaken(String),
    /// The API server refuses it.
    #[error("{0}")]
    Rejected(String),
    /// The object is being deleted.
    #[error("{0}")]
    Terminating(String),
    /// The API server does not answer, or the object has just changed.
    #[error("{0}")]
    Unavailable(String),
}

impl Failure {
    /// Finding for the condition; `None` if another attempt may succeed as things are.
    pub(super) fn finding(&self) -> Option<Finding> {
        let reason = match self {
            Self::NameTaken(_) => "NameTaken",
            Self::Rejected(_) => "Rejected",
            Self::Terminating(_) => "Terminating",
            Self::Unavailable(_) => return None,
        };
        Some(Finding::problem(reason, self.to_string()))
    }

    fn of(what: &str, error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status)
                if (400..500).contains(&status.code)
                    && status.code != 429
                    && !is_stale(error)
                    && !is_not_judged(&status.message) =>
            {
                Self::Rejected(format!("the API server refuses {what}: {}", status.message))
            }
            error => Self::Unavailable(format!("cannot write {what}: {error}")),
        }
    }
}

/// Whether the API server could not judge a write, as its policies have not read the Egress yet (k8s.io/apiserver,
/// pkg/admission/plugin/policy/validating/dispatcher.go): the Egress may be younger than what they know.
fn is_not_judged(message: &str) -> bool {
    message.contains("failed to configure binding: ")
}

impl Writer {
    /// The object as it is: from the watch, else from the API server, as the watch shows only objects with labels of ours.
    pub(super) async fn live<K>(
        &self,
        api: &Api<K>,
        cached: Option<&K>,
        name: &str,
    ) -> Result<Option<K>, Failure>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        if let Some(cached) = cached {
            return Ok(Some(cached.clone()));
        }
        let mut found = api.get_opt(name).await.map_err(|error| Failure::of(&what::<K>(name), &error))?;
        if let Some(found) = &mut found {
            lean::any(found);
        }
        Ok(found)
    }

    /// Applies an object unless it was applied and has not changed since. With `force`, fields of other writers are taken.
    pub(super) async fn apply<K>(
        &self,
        api: &Api<K>,
        live: Option<&K>,
        desired: Value,
        force: bool,
    ) -> Result<(), Failure>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
    {
        let word = |field: &str| Some(desired.get("metadata")?.get(field)?.as_str()?.to_owned());
        let name: Name = (K::kind(&()).into_owned(), word("namespace"), word("name").unwrap_or_default());
        let current = live.map(fingerprint);
        let is_applied =
            |applied: &Applied| applied.desired == desired && Some(applied.fingerprint) == current;
        if self.applied().get(&name).is_some_and(is_applied) {
            return Ok(());
        }
        let parameters = PatchParams { force, ..PatchParams::apply(MANAGER) };
        let patch = Patch::Apply(with_uid(&desired, live.and_then(|live| live.uid())));
        let what = what::<K>(&name.2);
        let applied = api.patch(&name.2, &parameters, &patch).await;
        let mut object = applied.map_err(|error| Failure::of(&what, &error))?;
        lean::any(&mut object);
        let fingerprint = fingerprint(&object);
        if current != Some(fingerprint) {
            tracing::info!(object = what, namespace = name.1, "applied");
        }
        self.applied().insert(name, Applied { desired, fingerprint });
        Ok(())
    }

    /// Changes the version of an object that was read, where server-side apply cannot.
    pub(super) async fn merge<K>(&self, api: &Api<K>, name: &str, patch: Value) -> Result<K, Failure>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let merged = api.patch(name, &parameters, &Patch::Merge(patch)).await;
        let mut object = merged.map_err(|error| Failure::of(&what::<K>(name), &error))?;
        lean::any(&mut object);
        Ok(object)
    }

    /// Deletes an object that is as it was read.
    pub(super) async fn delete<K>(&self, api: &Api<K>, object: &K) -> Result<(), Failure>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let name = object.name_any();
        let preconditions = Preconditions { uid: object.uid(), resource_version: None };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
        match api.delete(&name, &parameters).await {
            Ok(_) => tracing::info!(object = what::<K>(&name), "deleted"),
            Err(error) if is_stale(&error) => {}
            Err(error) => return Err(Failure::of(&what::<K>(&name), &error)),
        }
        Ok(())
    }

    /// Forgets objects of all other namespaces.
    pub(super) fn forget_namespaces_but(&self, namespaces: &BTreeSet<String>) {
        let is_kept =
            |namespace: &Option<String>| namespace.as_ref().is_none_or(|name| namespaces.contains(name));
        self.applied().retain(|(_, namespace, _), _| is_kept(namespace));
    }

    fn applied(&self) -> MutexGuard<'_, BTreeMap<Name, Applied>> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The patch applies only to the object that was read.
fn with_uid(desired: &Value, uid: Option<String>) -> Value {
    let mut desired = desired.clone();
    if let (Some(metadata), Some(uid)) = (desired.get_mut("metadata").and_then(Value::as_object_mut), uid) {
        metadata.insert("uid".to_owned(), json!(uid));
    }
    desired
}

/// Fingerprint of an object without its observed state. Fields that others write are compared, too.
fn fingerprint(object: &impl Serialize) -> u64 {
    let mut value = json!(object);
    if let Some(fields) = value.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("resourceVersion");
        metadata.remove("generation");
    }
    let mut hasher = DefaultHasher::new();
    value.to_string().hash(&mut hasher);
    hasher.finish()
}

fn what<K: Resource<DynamicType = ()>>(name: &str) -> String {
    format!("{} {name}", K::kind(&()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(code: u16, message: &str) -> Failure {
        let status = json!({ "status": "Failure", "code": code, "reason": "Invalid", "message": message });
        Failure::of("Service nat", &kube::Error::Api(serde_json::from_value(status).unwrap()))
    }

    #[test]
    fn a_write_that_policies_could_not_judge_yet_is_tried_again_without_a_word() {
        let policy = "ValidatingAdmissionPolicy 'fairlead-egress-controller-exists' with binding \
            'fairlead-egress-controller-exists' denied request: ";
        for unjudged in [
            "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction",
            "failed to configure binding: paramKind kind `coil.cybozu.com/v2, Kind=Egress` not yet synced to use for admission",
        ] {
            assert!(failure(422, &format!("{policy}{unjudged}")).finding().is_none(), "{unjudged}");
        }
        let refused = failure(403, &format!("{policy}gateway pods may not have hostPID")).finding().unwrap();
        assert_eq!(refused.reason, "Rejected");
    }
}
