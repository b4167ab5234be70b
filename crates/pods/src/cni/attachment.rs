//! Attachment of a CNI operation, parsed once from the request of the plugin.

use std::path::PathBuf;

use fairlead_ipam::Key;
use fairlead_ipam::check::Owner;
use fairlead_wire::cni::CniArgs;
use fairlead_wire::spool::{is_container_id, is_identifier, is_interface_name};
use serde::Deserialize;

use super::failure::{Failure, Reason};

/// Attachment of a Kubernetes pod: the interface of a container that an ADD makes, and its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The container and the name of the interface.
    pub key: Key,
    /// File of its network namespace.
    pub netns: PathBuf,
    /// The pod, as the runtime names it.
    pub pod: Owner,
}

impl Attachment {
    /// Parses the attachment that a request is about.
    ///
    /// # Errors
    /// A variable or argument is missing or invalid.
    pub fn parse(args: &CniArgs) -> Result<Self, Failure> {
        let argument = |name: &str| {
            args.args.get(name).filter(|value| !value.is_empty()).cloned().ok_or_else(|| {
                Failure::new(Reason::InvalidEnvironment, format!("CNI_ARGS has no {name}")).details(
                    "Fairlead attaches Kubernetes pods: the runtime must pass K8S_POD_NAMESPACE and K8S_POD_NAME",
                )
            })
        };
        Ok(Self {
            key: key(args)?,
            netns: netns(args)?,
            pod: Owner {
                namespace: argument("K8S_POD_NAMESPACE")?,
                name: argument("K8S_POD_NAME")?,
                uid: args.args.get("K8S_POD_UID").filter(|uid| !uid.is_empty()).cloned(),
            },
        })
    }
}

/// Request of an ADD.
#[derive(Debug)]
pub(super) struct AddRequest {
    pub(super) key: Key,
    /// An error for an attachment of no Kubernetes pod, which only a plugin before can have made.
    pub(super) attachment: Result<Attachment, Failure>,
    /// Name of the network; `None` if it is invalid.
    pub(super) network: Option<String>,
    /// Whether another plugin ran before.
    pub(super) is_chained: bool,
    /// The network configuration, in JSON.
    pub(super) configuration: Vec<u8>,
}

impl AddRequest {
    pub(super) fn parse(args: CniArgs) -> Result<Self, Failure> {
        Ok(Self {
            key: key(&args)?,
            attachment: Attachment::parse(&args),
            network: network(&args.stdin_data),
            is_chained: is_chained(&args),
            configuration: args.stdin_data,
        })
    }
}

/// Whether another plugin ran before. Old plugins say so in their own argument (Coil v2).
fn is_chained(args: &CniArgs) -> bool {
    let marked = args.args.get("IS_CHAINED").is_some_and(|value| value == "true");
    marked || !args.interfaces.is_empty() || !args.ips.is_empty()
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

pub(super) fn netns(args: &CniArgs) -> Result<PathBuf, Failure> {
    if args.netns.is_empty() {
        return Err(Failure::new(Reason::InvalidEnvironment, "CNI_NETNS is empty"));
    }
    Ok(PathBuf::from(&args.netns))
}

/// `name` of the network configuration; `None` if it has no valid one.
fn network(stdin: &[u8]) -> Option<String> {
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

    fn args(pod: &[(&str, &str)]) -> CniArgs {
        CniArgs {
            container_id: "c1".to_owned(),
            ifname: "eth0".to_owned(),
            netns: "/ns".to_owned(),
            args: pod.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            ..CniArgs::default()
        }
    }

    const POD: [(&str, &str); 3] =
        [("K8S_POD_NAMESPACE", "shop"), ("K8S_POD_NAME", "web"), ("K8S_POD_UID", "u1")];

    #[test]
    fn an_attachment_is_parsed_and_a_uid_is_optional() {
        let attachment = Attachment::parse(&args(&POD)).unwrap();
        assert_eq!(attachment.key, Key { container_id: "c1".to_owned(), ifname: "eth0".to_owned() });
        assert_eq!(attachment.netns, PathBuf::from("/ns"));
        let owner = |uid: Option<&str>| Owner {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            uid: uid.map(str::to_owned),
        };
        assert_eq!(attachment.pod, owner(Some("u1")));
        for without in [&POD[..2], &[POD[0], POD[1], ("K8S_POD_UID", "")]] {
            assert_eq!(Attachment::parse(&args(without)).unwrap().pod, owner(None));
        }
    }

    #[test]
    fn an_error_names_the_variable_or_argument() {
        let cases = [
            (
                CniArgs { container_id: "../c".to_owned(), ..args(&POD) },
                "CNI_CONTAINERID \"../c\" is invalid",
            ),
            (CniArgs { ifname: "a/b".to_owned(), ..args(&POD) }, "CNI_IFNAME \"a/b\" is invalid"),
            (CniArgs { netns: String::new(), ..args(&POD) }, "CNI_NETNS is empty"),
            (args(&POD[1..]), "CNI_ARGS has no K8S_POD_NAMESPACE"),
            (args(&[POD[0], ("K8S_POD_NAME", "")]), "CNI_ARGS has no K8S_POD_NAME"),
        ];
        for (args, message) in cases {
            let failure = Attachment::parse(&args).unwrap_err();
            assert_eq!((failure.reason, failure.message.as_str()), (Reason::InvalidEnvironment, message));
        }
    }

    #[test]
    fn an_add_of_no_pod_has_a_container_and_a_network() {
        let stdin_data = br#"{"name": "n"}"#.to_vec();
        let add = AddRequest::parse(CniArgs { stdin_data, ..args(&[]) }).unwrap();
        assert!(add.attachment.is_err() && add.key.container_id == "c1");
        assert_eq!(add.network.as_deref(), Some("n"));
        assert!(AddRequest::parse(CniArgs { ifname: String::new(), ..args(&POD) }).is_err());
    }

    #[test]
    fn a_chain_is_recognized_by_any_of_its_marks() {
        assert!(!is_chained(&CniArgs::default()));
        let marked = |value: &str| args(&[("IS_CHAINED", value)]);
        assert!(is_chained(&marked("true")) && !is_chained(&marked("false")));
        assert!(is_chained(&CniArgs { ips: vec!["10.0.0.1".to_owned()], ..CniArgs::default() }));
        assert!(is_chained(&CniArgs {
            interfaces: [("eth0".to_owned(), true)].into(),
            ..CniArgs::default()
        }));
    }

    #[test]
    fn the_network_is_the_name_of_the_configuration() {
        assert_eq!(network(br#"{"name": "k8s-pod-network", "x": 1}"#).as_deref(), Some("k8s-pod-network"));
        for bad in ["", "null", "{}", r#"{"name": "../x"}"#, r#"{"name": ""}"#, r#"{"name": 1}"#] {
            assert_eq!(network(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(network(format!(r#"{{"name": "{}"}}"#, "x".repeat(256)).as_bytes()), None);
    }
}
