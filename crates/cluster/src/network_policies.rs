//! NetworkPolicies that no program enforces. Fairlead enforces none; the API server takes them all the same, and a user may rely on them.

use fairlead_api::names::NETWORK_POLICY_ENFORCERS;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{ListParams, ObjectMeta};
use kube::{Api, Client, ResourceExt as _};

/// Labels of DaemonSets that name the program.
const LABELS: [&str; 4] = ["app", "app.kubernetes.io/name", "k8s-app", "name"];
/// Most DaemonSets that are read.
const MAX_DAEMON_SETS: u32 = 500;

/// One of the NetworkPolicies of a cluster in which no known program enforces them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unenforced {
    /// Namespace of the NetworkPolicy.
    pub namespace: String,
    /// Name of the NetworkPolicy.
    pub name: String,
    /// UID of the NetworkPolicy.
    pub uid: String,
}

impl std::fmt::Display for Unenforced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { namespace, name, .. } = self;
        write!(
            f,
            "NetworkPolicy {namespace}/{name} is not enforced, nor is any other: Fairlead enforces none, and no program that is known to do so \
             runs here (such as kube-network-policies, or Calico's policy without its network): docs/pod-network.md#network-policies"
        )
    }
}

/// Looks for NetworkPolicies that no program enforces: one request where there are none, else three, all of bounded size.
///
/// # Errors
/// The API server refuses a request, or cannot be reached.
pub async fn unenforced(client: &Client) -> kube::Result<Option<Unenforced>> {
    let one = ListParams::default().limit(1);
    let policies = Api::<NetworkPolicy>::all(client.clone()).list_metadata(&one).await?;
    let Some(policy) = policies.items.first() else { return Ok(None) };
    let many = ListParams::default().limit(MAX_DAEMON_SETS);
    let daemon_sets = Api::<DaemonSet>::all(client.clone()).list_metadata(&many).await?;
    if daemon_sets.items.iter().any(|daemon_set| enforces(&daemon_set.metadata)) {
        return Ok(None);
    }
    if enforces_by_itself(&client.apiserver_version().await?.git_version) {
        return Ok(None);
    }
    let namespace = policy.namespace().unwrap_or_default();
    Ok(Some(Unenforced { namespace, name: policy.name_any(), uid: policy.uid().unwrap_or_default() }))
}

/// Whether a DaemonSet is one of a program that enforces NetworkPolicies: by its name, which distributions prefix, or a label.
fn enforces(daemon_set: &ObjectMeta) -> bool {
    let is_known = |word: &str| NETWORK_POLICY_ENFORCERS.contains(&word);
    let name = daemon_set.name.as_deref().unwrap_or_default();
    let prefixed = |known: &&str| name.strip_suffix(*known).is_some_and(|prefix| prefix.ends_with('-'));
    let mut labels = daemon_set.labels.iter().flatten().filter(|(key, _)| LABELS.contains(&key.as_str()));
    is_known(name)
        || NETWORK_POLICY_ENFORCERS.iter().any(prefixed)
        || labels.any(|(_, value)| is_known(value))
}

/// Whether an API server of this version comes with kube-router's controller of policies in the same process, as K3s does.
fn enforces_by_itself(version: &str) -> bool {
    version.contains("+k3s")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon_set(name: &str, label: &str, value: &str) -> ObjectMeta {
        let labels = [(label.to_owned(), value.to_owned())].into();
        ObjectMeta { name: Some(name.to_owned()), labels: Some(labels), ..ObjectMeta::default() }
    }

    #[test]
    fn programs_that_enforce_policies_are_known_by_name_or_label() {
        for (name, label, value) in [
            ("calico-node", "a", "b"),
            ("rke2-canal", "a", "b"),
            ("node", "k8s-app", "cilium"),
            ("policies", "app.kubernetes.io/name", "kube-router"),
            ("kube-network-policies", "a", "b"),
            ("antrea-agent", "app", "antrea"),
            ("weave-net", "name", "weave-net"),
        ] {
            assert!(enforces(&daemon_set(name, label, value)), "{name}");
        }
        for (name, label, value) in [
            ("coild", "app.kubernetes.io/name", "coil"),
            ("kube-proxy", "k8s-app", "kube-proxy"),
            ("mycilium", "other", "cilium"),
        ] {
            assert!(!enforces(&daemon_set(name, label, value)), "{name}");
        }
    }

    #[test]
    fn k3s_brings_its_own() {
        assert!(enforces_by_itself("v1.33.1+k3s1"));
        assert!(!enforces_by_itself("v1.36.2"));
    }
}
