//! The request to the node program.

use fairlead_wire::cni::CniArgs;

use crate::env::{Attachment, AttachmentOperation};
use crate::failure::{Failure, code};
use crate::netconf::{NetConf, Previous};
use crate::result::CniResult;

/// Extra key in the arguments: "true" when a plugin ran before this one (Coil v2).
const IS_CHAINED: &str = "IS_CHAINED";

/// The request for one operation; `stdin` is the network configuration, unchanged.
///
/// # Errors
/// Code 6 for an ADD or CHECK whose prevResult cannot be decoded, 7 for a CHECK without one. DEL does not need it and
/// succeeds whenever it can.
pub fn build(
    operation: AttachmentOperation,
    attachment: Attachment,
    conf: &NetConf,
    stdin: Vec<u8>,
) -> Result<CniArgs, Failure> {
    let previous = match (&conf.previous, operation) {
        (Previous::None, AttachmentOperation::Check) => return Err(missing().in_version(conf.version)),
        (Previous::None | Previous::Unusable(_), AttachmentOperation::Del) | (Previous::None, _) => None,
        (Previous::Result(result), _) => Some(result),
        (Previous::Unusable(reason), _) => return Err(unusable(reason).in_version(conf.version)),
    };
    let mut args: std::collections::HashMap<String, String> =
        attachment.args.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    args.insert(IS_CHAINED.to_owned(), (conf.previous != Previous::None).to_string());
    Ok(CniArgs {
        container_id: attachment.container_id,
        netns: attachment.netns,
        ifname: attachment.ifname,
        args,
        path: attachment.path,
        stdin_data: stdin,
        ips: previous.map(addresses).unwrap_or_default(),
        interfaces: previous.map(places).unwrap_or_default(),
    })
}

fn addresses(previous: &CniResult) -> Vec<String> {
    previous.ips.iter().map(|ip| ip.address.addr().to_string()).collect()
}

/// Name of each interface, and whether it is inside the container.
fn places(previous: &CniResult) -> std::collections::HashMap<String, bool> {
    previous.interfaces.iter().map(|link| (link.name.clone(), !link.sandbox.is_empty())).collect()
}

fn missing() -> Failure {
    Failure::new(
        code::NETWORK_CONFIG,
        "CHECK needs \"prevResult\", and the network configuration has none",
        "the runtime must pass what ADD returned (CNI 0.4.0 and newer)",
    )
}

fn unusable(reason: &str) -> Failure {
    Failure::new(
        code::DECODING,
        format!("prevResult in the network configuration cannot be decoded: {reason}"),
        "the previous plugin of the list returned it; check that plugin",
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::args::PodArgs;
    use crate::netconf;

    fn built(operation: AttachmentOperation, previous: serde_json::Value) -> Result<CniArgs, Failure> {
        let attachment = Attachment {
            container_id: "c".into(),
            netns: "/n".into(),
            ifname: "eth0".into(),
            args: PodArgs::parse("K8S_POD_NAME=p;K8S_POD_NAMESPACE=ns;K8S_POD_UID=u").unwrap(),
            path: "/opt/cni/bin".into(),
            netns_override: false,
        };
        let stdin =
            json!({"cniVersion": "0.4.0", "name": "n", "prevResult": previous}).to_string().into_bytes();
        build(operation, attachment, &netconf::parse(&stdin).unwrap(), stdin)
    }

    fn pairs(map: &std::collections::HashMap<String, String>) -> Vec<(&str, &str)> {
        let mut pairs: Vec<_> = map.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        pairs.sort_unstable();
        pairs
    }

    #[test]
    fn everything_is_passed_on() {
        let request = built(AttachmentOperation::Add, json!(null)).unwrap();
        assert_eq!((request.container_id.as_str(), request.netns.as_str()), ("c", "/n"));
        assert_eq!((request.ifname.as_str(), request.path.as_str()), ("eth0", "/opt/cni/bin"));
        let expected = [
            ("IS_CHAINED", "false"),
            ("K8S_POD_NAME", "p"),
            ("K8S_POD_NAMESPACE", "ns"),
            ("K8S_POD_UID", "u"),
        ];
        assert_eq!(pairs(&request.args), expected);
        assert!(request.stdin_data.starts_with(b"{"));
        assert!(request.ips.is_empty() && request.interfaces.is_empty());
    }

    #[test]
    fn a_previous_result_is_passed_on() {
        let previous = json!({
            "interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": "/n"}],
            "ips": [{"version": "4", "address": "10.1.2.3/24"}, {"version": "6", "address": "fd00::3/64"}],
        });
        let request = built(AttachmentOperation::Add, previous).unwrap();
        assert!(pairs(&request.args).contains(&("IS_CHAINED", "true")));
        assert_eq!(request.ips, ["10.1.2.3", "fd00::3"]);
        assert_eq!(request.interfaces, [("cni0".to_owned(), false), ("eth0".to_owned(), true)].into());
    }

    #[test]
    fn check_needs_a_previous_result() {
        assert_eq!(built(AttachmentOperation::Check, json!(null)).unwrap_err().code, code::NETWORK_CONFIG);
        assert_eq!(built(AttachmentOperation::Check, json!("x")).unwrap_err().code, code::DECODING);
        assert!(built(AttachmentOperation::Check, json!({})).is_ok());
    }

    #[test]
    fn a_broken_previous_result_stops_add_but_not_del() {
        let failure = built(AttachmentOperation::Add, json!({"ips": 1})).unwrap_err();
        assert_eq!((failure.code, failure.version.as_str()), (code::DECODING, "0.4.0"));
        let request = built(AttachmentOperation::Del, json!({"ips": 1})).unwrap();
        assert!(pairs(&request.args).contains(&("IS_CHAINED", "true")));
        assert!(request.ips.is_empty());
    }
}
