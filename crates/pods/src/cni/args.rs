//! The arguments of a CNI operation, parsed.

use std::path::PathBuf;

use fairlead_ipam::Key;
use fairlead_wire::cni::CniArgs;
use fairlead_wire::spool::{is_container_id, is_identifier, is_interface_name};
use serde::Deserialize;

use super::failure::{Failure, Reason};

/// The interface of a container that an ADD is to make, and its pod.
pub struct Attachment {
    /// The container and the name of the interface.
    pub key: Key,
    /// File of its network namespace.
    pub netns: PathBuf,
    /// Namespace of its pod in Kubernetes.
    pub namespace: String,
    /// Name of its pod.
    pub pod: String,
    /// UID of its pod; `None` from runtimes that do not pass it.
    pub pod_uid: Option<String>,
}

pub(super) fn key(args: &CniArgs) -> Result<Key, Failure> {
    let invalid = |what: &str, value: &str| {
        Err(Failure::new(Reason::InvalidEnvironment, format!("{what} {value:?} is invalid")))
    };
    if !is_container_id(&args.container_id) {
        return invalid("CNI_CONTAINERID", &args.container_id);
    }
    if !is_interface_name(&args.ifname) {
        return invalid("CNI_IFNAME", &args.ifname);
    }
    Ok(Key { container_id: args.container_id.clone(), ifname: args.ifname.clone() })
}

/// The attachment that these arguments are about.
///
/// # Errors
/// A variable or argument is missing or invalid.
pub fn attachment(args: &CniArgs) -> Result<Attachment, Failure> {
    let argument = |name: &str| {
        args.args.get(name).filter(|value| !value.is_empty()).cloned().ok_or_else(|| {
            Failure::new(Reason::InvalidEnvironment, format!("CNI_ARGS has no {name}")).details(
                "Fairlead attaches Kubernetes pods: the runtime must pass K8S_POD_NAMESPACE and K8S_POD_NAME",
            )
        })
    };
    Ok(Attachment {
        key: key(args)?,
        netns: netns(args)?,
        namespace: argument("K8S_POD_NAMESPACE")?,
        pod: argument("K8S_POD_NAME")?,
        pod_uid: args.args.get("K8S_POD_UID").filter(|uid| !uid.is_empty()).cloned(),
    })
}

pub(super) fn netns(args: &CniArgs) -> Result<PathBuf, Failure> {
    if args.netns.is_empty() {
        return Err(Failure::new(Reason::InvalidEnvironment, "CNI_NETNS is empty"));
    }
    Ok(PathBuf::from(&args.netns))
}

/// `name` of the network configuration; `None` if it has no valid one.
pub(super) fn network(stdin: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
    }
    serde_json::from_slice::<Named>(stdin)
        .ok()
        .map(|named| named.name)
        .filter(|name| is_identifier(name) && name.len() <= 255)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_is_the_name_of_the_configuration() {
        assert_eq!(network(br#"{"name": "k8s-pod-network", "x": 1}"#).as_deref(), Some("k8s-pod-network"));
        for bad in ["", "null", "{}", r#"{"name": "../x"}"#, r#"{"name": ""}"#, r#"{"name": 1}"#] {
            assert_eq!(network(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(network(format!(r#"{{"name": "{}"}}"#, "x".repeat(256)).as_bytes()), None);
    }
}
