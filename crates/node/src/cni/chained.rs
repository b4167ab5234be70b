//! Behind another CNI plugin, which gave the addresses and made the interface (`--enable-ipam=false`).

use fairlead_ipam::Key;
use fairlead_wire::cni::{CniArgs, ErrorCode};
use serde_json::Value;
use tonic::Status;

use super::args::{netns, refuse};
use super::check::{Previous, reported_differences};
use super::{Service, verdict};

/// Whether another plugin ran before. Old plugins say so in their own argument (Coil v2).
pub(super) fn is_chained(args: &CniArgs) -> bool {
    let said = args.args.get("IS_CHAINED").is_some_and(|value| value == "true");
    said || !args.interfaces.is_empty() || !args.ips.is_empty()
}

/// The result of the plugin before, as it is.
pub(super) fn pass_on(args: &CniArgs) -> Result<Vec<u8>, Status> {
    let undecodable = |error: serde_json::Error| {
        let msg = "the network configuration cannot be decoded";
        refuse(ErrorCode::DecodingFailure, msg, error.to_string())
    };
    let previous = match args.stdin_data.trim_ascii() {
        [] => None,
        text => {
            let mut configuration: Value = serde_json::from_slice(text).map_err(undecodable)?;
            configuration.get_mut("prevResult").map(Value::take).filter(Value::is_object)
        }
    };
    previous.map(|result| result.to_string().into_bytes()).ok_or_else(|| {
        refuse(
            ErrorCode::InvalidNetworkConfig,
            "coil must be called after another plugin when IPAM related features are disabled",
            "there is no prevResult: put it behind the plugin that makes the pod's interface, or start \
             `fairlead node` with --enable-ipam",
        )
    })
}

impl Service {
    /// Compares what the plugin before reported with what is there.
    pub(super) async fn inspect_chained(&self, args: &CniArgs, key: &Key) -> Result<(), Status> {
        let netns = netns(args)?;
        let previous = Previous::of_configuration(&args.stdin_data).map_err(|error| {
            refuse(ErrorCode::DecodingFailure, "prevResult cannot be decoded", error.to_string())
        })?;
        let previous = previous.unwrap_or_default();
        let seen = self.look(key, &netns, previous.tables()).await?;
        verdict(&reported_differences((&key.ifname, &netns), &previous, &seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(stdin: &str) -> CniArgs {
        CniArgs { stdin_data: stdin.as_bytes().to_vec(), ..CniArgs::default() }
    }

    #[test]
    fn the_result_of_the_plugin_before_is_passed_on_as_it_is() {
        let stdin = r#"{"cniVersion": "0.4.0", "name": "n", "prevResult":
            {"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.1.0.2/24"}], "x": [1, {"y": null}]}}"#;
        let passed: Value = serde_json::from_slice(&pass_on(&args(stdin)).unwrap()).unwrap();
        let given: Value = serde_json::from_str(stdin).unwrap();
        assert_eq!(passed, given["prevResult"]);
    }

    #[test]
    fn without_a_plugin_before_there_is_nothing_to_pass_on() {
        for nothing in ["", " \n", "{}", r#"{"prevResult": null}"#, r#"{"prevResult": 1}"#, "[]"] {
            let refused = pass_on(&args(nothing)).unwrap_err();
            assert!(refused.message().contains("after another plugin"), "{nothing}: {refused}");
        }
        assert!(pass_on(&args("{")).unwrap_err().message().contains("decoded"));
    }

    #[test]
    fn a_chain_is_known_by_any_of_its_marks() {
        assert!(!is_chained(&CniArgs::default()));
        let said = |value: &str| CniArgs {
            args: [("IS_CHAINED".to_owned(), value.to_owned())].into(),
            ..CniArgs::default()
        };
        assert!(is_chained(&said("true")) && !is_chained(&said("false")));
        assert!(is_chained(&CniArgs { ips: vec!["10.0.0.1".to_owned()], ..CniArgs::default() }));
        assert!(is_chained(&CniArgs {
            interfaces: [("eth0".to_owned(), true)].into(),
            ..CniArgs::default()
        }));
    }
}
