//! What the runtime named, understood; and how the service says no.

use std::path::PathBuf;

use fairlead_ipam::Key;
use fairlead_wire::cni::{CniArgs, CniError, ErrorCode, status_with_error};
use fairlead_wire::spool::{is_container_id, is_identifier, is_interface_name};
use serde::Deserialize;
use tonic::{Code, Status};

/// One container's interface, as the runtime named it.
pub(super) struct Attachment {
    pub(super) key: Key,
    pub(super) netns: PathBuf,
    pub(super) namespace: String,
    pub(super) pod: String,
    /// By runtimes that say it.
    pub(super) pod_uid: Option<String>,
}

pub(super) fn refuse(code: ErrorCode, message: impl Into<String>, details: impl Into<String>) -> Status {
    let grpc = match code {
        ErrorCode::LimitedConnectivity | ErrorCode::PluginNotAvailable | ErrorCode::TryAgainLater => {
            Code::Unavailable
        }
        ErrorCode::InvalidEnvironmentVariables
        | ErrorCode::InvalidNetworkConfig
        | ErrorCode::UnsupportedField => Code::InvalidArgument,
        ErrorCode::AttachmentChanged => Code::FailedPrecondition,
        ErrorCode::UnknownContainer => Code::NotFound,
        _ => Code::Internal,
    };
    status_with_error(grpc, CniError { code: code.into(), msg: message.into(), details: details.into() })
}

pub(super) fn key(args: &CniArgs) -> Result<Key, Status> {
    let invalid = |what: &str, value: &str| {
        refuse(ErrorCode::InvalidEnvironmentVariables, format!("{what} is invalid"), format!("{value:?}"))
    };
    if !is_container_id(&args.container_id) {
        return Err(invalid("CNI_CONTAINERID", &args.container_id));
    }
    if !is_interface_name(&args.ifname) {
        return Err(invalid("CNI_IFNAME", &args.ifname));
    }
    Ok(Key { container_id: args.container_id.clone(), ifname: args.ifname.clone() })
}

pub(super) fn attachment(args: &CniArgs) -> Result<Attachment, Status> {
    let argument = |name: &str| {
        args.args.get(name).filter(|value| !value.is_empty()).cloned().ok_or_else(|| {
            refuse(
                ErrorCode::InvalidEnvironmentVariables,
                format!("CNI_ARGS names no {name}"),
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

pub(super) fn netns(args: &CniArgs) -> Result<PathBuf, Status> {
    if args.netns.is_empty() {
        return Err(refuse(ErrorCode::InvalidEnvironmentVariables, "CNI_NETNS is empty", ""));
    }
    Ok(PathBuf::from(&args.netns))
}

/// Name of the network in the configuration the plugin was given; `None` if it says none that may be one.
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
    fn the_network_is_named_by_the_configuration() {
        assert_eq!(network(br#"{"name": "k8s-pod-network", "x": 1}"#).as_deref(), Some("k8s-pod-network"));
        for bad in ["", "null", "{}", r#"{"name": "../x"}"#, r#"{"name": ""}"#, r#"{"name": 1}"#] {
            assert_eq!(network(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(network(format!(r#"{{"name": "{}"}}"#, "x".repeat(256)).as_bytes()), None);
    }
}
