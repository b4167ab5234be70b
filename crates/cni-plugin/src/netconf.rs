//! The network configuration on standard input.

use fairlead_api::names::NODE_SOCKET;
use fairlead_wire::network::Attachment;
use fairlead_wire::spool::is_identifier;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::env::IDENTIFIER_RULE;
use crate::failure::{Failure, code};
use crate::result::CniResult;
use crate::version::SpecVersion;

/// Longest configuration that is read, in bytes. The longest real ones list every container of a node: some 100 KiB.
pub const MAX_BYTES: u64 = 2 << 20;

/// Longest message to or from the node program, in bytes: what fits in a configuration fits in a message.
pub const MAX_MESSAGE: usize = 4 << 20;

/// Longest path a UNIX socket address holds (`sun_path` of unix(7), without its final NUL).
const MAX_SOCKET_PATH: usize = 107;

/// A network configuration, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct NetConf {
    /// The version of the result and of errors.
    pub version: SpecVersion,
    /// Name of the network.
    pub name: String,
    /// UNIX socket of the node program.
    pub socket: String,
    /// The result of the plugins before this one.
    pub previous: Previous,
    /// The runtime's list of valid attachments, not parsed yet; for [`valid_attachments`].
    pub valid: Value,
}

/// `prevResult`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Previous {
    /// This plugin is the first of its list.
    None,
    /// Result of the plugins before.
    Result(CniResult),
    /// The result cannot be decoded, for this reason. ADD must fail then, DEL must not.
    Unusable(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    cni_version: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    socket: Option<String>,
    #[serde(default)]
    prev_result: Value,
    #[serde(default, rename = "cni.dev/valid-attachments")]
    valid_attachments: Value,
    /// The same under the key that libcni 1.2.0 used by mistake.
    #[serde(default, rename = "cni.dev/attachments")]
    attachments: Value,
}

/// Parses a configuration. Unknown keys are ignored, as the specification allows.
///
/// # Errors
/// Code 6 if it is not a JSON object of the expected shape, 1 for a version that is not supported, 7 for a missing or
/// invalid name or socket path.
pub fn parse(bytes: &[u8]) -> Result<NetConf, Failure> {
    let raw = decode(bytes)?;
    let version = version(raw.cni_version.as_deref())?;
    let checked = || {
        Ok(NetConf {
            version,
            name: network_name(raw.name.unwrap_or_default())?,
            socket: socket_path(raw.socket)?,
            previous: previous(raw.prev_result),
            valid: if raw.valid_attachments.is_null() { raw.attachments } else { raw.valid_attachments },
        })
    };
    checked().map_err(|failure: Failure| failure.in_version(version))
}

fn decode(bytes: &[u8]) -> Result<Raw, Failure> {
    // Through a map: a derived struct would also accept a JSON array.
    serde_json::from_slice::<Map<String, Value>>(bytes)
        .and_then(|object| serde_json::from_value(object.into()))
        .map_err(|error| {
            Failure::new(
                code::DECODING,
                format!("the network configuration on standard input cannot be decoded: {error}"),
                "it must be one JSON object; check the file in /etc/cni/net.d",
            )
        })
}

fn version(text: Option<&str>) -> Result<SpecVersion, Failure> {
    // The default of the specification.
    let text = text.filter(|text| !text.is_empty()).unwrap_or("0.1.0");
    SpecVersion::parse(text).ok_or_else(|| {
        Failure::new(
            code::INCOMPATIBLE_VERSION,
            format!("incompatible CNI versions: the network configuration has cniVersion {text:?}"),
            format!("set \"cniVersion\" to one of {}", SpecVersion::list()),
        )
    })
}

fn network_name(name: String) -> Result<String, Failure> {
    if name.is_empty() {
        let details = "add \"name\" to the file in /etc/cni/net.d";
        return Err(Failure::new(code::NETWORK_CONFIG, "the network configuration has no name", details));
    }
    if !is_identifier(&name) {
        return Err(Failure::new(
            code::NETWORK_CONFIG,
            format!("invalid network name {name:?}"),
            IDENTIFIER_RULE,
        ));
    }
    Ok(name)
}

fn socket_path(path: Option<String>) -> Result<String, Failure> {
    let path = path.filter(|path| !path.is_empty()).unwrap_or_else(|| NODE_SOCKET.to_owned());
    if path.starts_with('/') && path.len() <= MAX_SOCKET_PATH && !path.contains('\0') {
        return Ok(path);
    }
    Err(Failure::new(
        code::NETWORK_CONFIG,
        format!("invalid \"socket\" {path:?} in the network configuration"),
        format!(
            "it must be an absolute path of at most {MAX_SOCKET_PATH} bytes; the default is {NODE_SOCKET}"
        ),
    ))
}

fn previous(value: Value) -> Previous {
    match value {
        Value::Null => Previous::None,
        Value::Object(_) => match serde_json::from_value::<CniResult>(value) {
            Ok(result) => result.stray_address().map_or(Previous::Result(result), Previous::Unusable),
            Err(error) => Previous::Unusable(error.to_string()),
        },
        _ => Previous::Unusable("it is not a JSON object".to_owned()),
    }
}

/// The attachments that GC must keep. Without a list, none is valid: libcni omits an empty one.
///
/// # Errors
/// Code 7 if a part of the list cannot be decoded: GC by the rest would disconnect running pods.
pub fn valid_attachments(conf: &NetConf) -> Result<Vec<Attachment>, Failure> {
    #[derive(Deserialize)]
    struct Entry {
        #[serde(rename = "containerID")]
        container_id: String,
        ifname: String,
    }
    let entries: Option<Vec<Entry>> = Option::deserialize(&conf.valid).map_err(|error| {
        Failure::new(
            code::NETWORK_CONFIG,
            format!("\"cni.dev/valid-attachments\" in the network configuration cannot be decoded: {error}"),
            "it must be a list of objects with containerID and ifname; nothing was freed",
        )
        .in_version(conf.version)
    })?;
    let attachment = |entry: Entry| Attachment { container_id: entry.container_id, ifname: entry.ifname };
    Ok(entries.unwrap_or_default().into_iter().map(attachment).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parsed(value: Value) -> Result<NetConf, Failure> {
        parse(value.to_string().as_bytes())
    }

    #[test]
    fn the_configuration_coil_users_have() {
        let conf = parsed(json!({
            "cniVersion": "0.4.0", "name": "k8s-pod-network", "type": "coil", "capabilities": {"portMappings": true},
        }))
        .unwrap();
        assert_eq!(conf.version, SpecVersion::V0_4_0);
        assert_eq!(conf.name, "k8s-pod-network");
        assert_eq!(conf.socket, "/run/coild.sock");
        assert_eq!(conf.previous, Previous::None);
    }

    #[test]
    fn the_socket_can_be_configured() {
        let conf = |socket: &str| parsed(json!({"cniVersion": "1.0.0", "name": "n", "socket": socket}));
        assert_eq!(conf("/tmp/a b.sock").unwrap().socket, "/tmp/a b.sock");
        assert_eq!(conf("").unwrap().socket, "/run/coild.sock");
        for bad in ["relative.sock", "/a\0b", &format!("/{}", "x".repeat(MAX_SOCKET_PATH))] {
            let failure = conf(bad).unwrap_err();
            assert_eq!(failure.code, code::NETWORK_CONFIG, "{bad:?}");
            assert!(failure.msg.contains("socket"));
        }
    }

    #[test]
    fn input_that_is_not_json_is_refused() {
        let cases: [&[u8]; 8] = [
            b"",
            b"{",
            b"[]",
            b"null",
            b"{\"name\": 1}",
            b"{\"socket\": []}",
            b"{\"cniVersion\": 1}",
            b"{\"a\": \"\xff\"}",
        ];
        for bytes in cases {
            assert_eq!(parse(bytes).unwrap_err().code, code::DECODING, "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn unsupported_versions_are_refused_with_the_supported_ones() {
        let cases = [(json!({"name": "n"}), "0.1.0"), (json!({"name": "n", "cniVersion": "1.2.0"}), "1.2.0")];
        for (conf, named) in cases {
            let failure = parsed(conf).unwrap_err();
            assert_eq!(failure.code, code::INCOMPATIBLE_VERSION);
            assert!(failure.msg.contains(named), "{}", failure.msg);
            assert!(failure.details.contains("0.3.1, 0.4.0, 1.0.0, 1.1.0"), "{}", failure.details);
        }
    }

    #[test]
    fn names_follow_the_rule() {
        for bad in [json!(null), json!(""), json!("-a"), json!("a b"), json!("a/b")] {
            let failure = parsed(json!({"cniVersion": "0.3.1", "name": bad})).unwrap_err();
            assert_eq!(failure.code, code::NETWORK_CONFIG, "{bad}");
            assert_eq!(
                failure.version,
                SpecVersion::V0_3_1,
                "the answer is in the version of the configuration"
            );
        }
    }

    #[test]
    fn previous_results() {
        let of = |value: Value| {
            parsed(json!({"cniVersion": "1.0.0", "name": "n", "prevResult": value})).unwrap().previous
        };
        assert_eq!(of(json!(null)), Previous::None);
        assert_eq!(of(json!({})), Previous::Result(CniResult::default()));
        assert!(
            matches!(of(json!({"ips": [{"address": "10.0.0.1/24"}]})), Previous::Result(result) if result.ips.len() == 1)
        );
        let stray = json!({"ips": [{"address": "10.0.0.1/24", "interface": 0}]});
        for bad in [json!("x"), json!([]), json!({"ips": "x"}), json!({"ips": [{"address": "x"}]}), stray] {
            assert!(matches!(of(bad.clone()), Previous::Unusable(_)), "{bad}");
        }
    }

    fn valid(value: Value) -> Result<Vec<(String, String)>, Failure> {
        let mut conf = json!({"cniVersion": "1.1.0", "name": "n"});
        conf.as_object_mut().unwrap().append(&mut value.as_object().unwrap().clone());
        let listed = valid_attachments(&parsed(conf).unwrap())?;
        Ok(listed.into_iter().map(|entry| (entry.container_id, entry.ifname)).collect())
    }

    #[test]
    fn valid_attachments_as_runtimes_send_them() {
        let pair = |id: &str| (id.to_owned(), "eth0".to_owned());
        let entry = |id: &str| json!({"containerID": id, "ifname": "eth0", "more": 1});
        let cases = [
            (json!({}), vec![]),
            (json!({"cni.dev/valid-attachments": null}), vec![]),
            (json!({"cni.dev/valid-attachments": []}), vec![]),
            (json!({"cni.dev/valid-attachments": [entry("a"), entry("b")]}), vec![pair("a"), pair("b")]),
            (json!({"cni.dev/attachments": [entry("a")]}), vec![pair("a")]),
            (
                json!({"cni.dev/valid-attachments": [entry("a")], "cni.dev/attachments": [entry("b")]}),
                vec![pair("a")],
            ),
        ];
        for (conf, expected) in cases {
            assert_eq!(valid(conf.clone()).unwrap(), expected, "{conf}");
        }
    }

    #[test]
    fn a_list_with_one_invalid_entry_is_refused() {
        let good = json!({"containerID": "a", "ifname": "eth0"});
        for bad in [json!(1), json!("a"), json!({}), json!([good, 1]), json!([good, {"containerID": "b"}])] {
            let failure = valid(json!({"cni.dev/valid-attachments": bad})).unwrap_err();
            assert_eq!((failure.code, failure.version), (code::NETWORK_CONFIG, SpecVersion::V1_1_0), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn every_valid_attachment_is_read_back(listed in prop::collection::vec((".*", ".*"), 0..5)) {
            let entries: Vec<Value> =
                listed.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname})).collect();
            prop_assert_eq!(valid(json!({"cni.dev/valid-attachments": entries})).unwrap(), listed);
        }

        #[test]
        fn hostile_bytes_never_panic(bytes: Vec<u8>) {
            prop_assert_eq!(parse(&bytes).map_err(|failure| failure.code), Err(code::DECODING));
        }

        #[test]
        fn hostile_fields_never_panic(key in "cniVersion|name|socket|prevResult|cni.dev/valid-attachments", text: String, number: f64) {
            for value in [json!(text), json!(number), json!([text]), json!({ text: number })] {
                let mut conf = json!({"cniVersion": "1.0.0", "name": "n"});
                conf[&key] = value;
                let _ = parsed(conf).map(|conf| valid_attachments(&conf));
            }
        }

        #[test]
        fn a_damaged_configuration_never_panics(at in any::<prop::sample::Index>(), byte: u8) {
            let mut bytes = br#"{"cniVersion":"1.0.0","name":"n","prevResult":{"ips":[{"address":"10.0.0.1/8"}]}}"#.to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = parse(&bytes);
        }
    }
}
