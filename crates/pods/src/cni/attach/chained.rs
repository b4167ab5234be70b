//! Behind another CNI plugin, which allocated the addresses and made the interface (`--enable-ipam=false`).

use fairlead_ipam::Key;
use fairlead_wire::cni::CniArgs;
use serde_json::Value;

use super::{AttachContext, CheckContext, Stage};
use crate::cni::check;
use crate::cni::failure::{Failure, Reason};

/// Passes the result of the plugin before on.
pub(in crate::cni) struct ChainedStage;

#[tonic::async_trait]
impl Stage for ChainedStage {
    async fn attach(&self, context: &mut AttachContext) -> Result<(), Failure> {
        context.result = pass_on(&context.args)?;
        Ok(())
    }

    async fn detach(&self, _: &Key) -> Result<(), Failure> {
        Ok(())
    }

    /// Compares what the plugin before reported with what the kernel shows; the host's side is that plugin's.
    async fn check(&self, context: &mut CheckContext) -> Result<(), Failure> {
        let previous = context.previous.take().unwrap_or_default();
        let at = (context.key.ifname.as_str(), context.netns.as_path());
        check::chained(at, &previous, &context.kernel, &mut context.differences);
        Ok(())
    }
}

/// Whether another plugin ran before. Old plugins say so in their own argument (Coil v2).
pub(super) fn is_chained(args: &CniArgs) -> bool {
    let marked = args.args.get("IS_CHAINED").is_some_and(|value| value == "true");
    marked || !args.interfaces.is_empty() || !args.ips.is_empty()
}

/// The result of the plugin before, unchanged.
fn pass_on(args: &CniArgs) -> Result<Vec<u8>, Failure> {
    let undecodable = |error: serde_json::Error| {
        Failure::new(Reason::InvalidNetworkConfig, "the network configuration cannot be decoded")
            .details(error)
    };
    let previous = match args.stdin_data.trim_ascii() {
        [] => None,
        text => {
            let mut configuration: Value = serde_json::from_slice(text).map_err(undecodable)?;
            configuration.get_mut("prevResult").map(Value::take).filter(Value::is_object)
        }
    };
    previous.map(|result| result.to_string().into_bytes()).ok_or_else(|| {
        // In Coil's words, which administrators search for.
        let message = "coil must be called after another plugin when IPAM related features are disabled";
        Failure::new(Reason::InvalidPluginOrder, message).details(
            "there is no prevResult: put it behind the plugin that makes the pod's interface, or start \
             `fairlead node` with --enable-ipam",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(stdin: &str) -> CniArgs {
        CniArgs { stdin_data: stdin.as_bytes().to_vec(), ..CniArgs::default() }
    }

    #[test]
    fn the_result_of_the_plugin_before_is_passed_on_unchanged() {
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
            assert!(refused.message.contains("after another plugin"), "{nothing}: {refused}");
        }
        assert!(pass_on(&args("{")).unwrap_err().message.contains("decoded"));
    }

    #[test]
    fn a_chain_is_recognized_by_any_of_its_marks() {
        assert!(!is_chained(&CniArgs::default()));
        let marked = |value: &str| CniArgs {
            args: [("IS_CHAINED".to_owned(), value.to_owned())].into(),
            ..CniArgs::default()
        };
        assert!(is_chained(&marked("true")) && !is_chained(&marked("false")));
        assert!(is_chained(&CniArgs { ips: vec!["10.0.0.1".to_owned()], ..CniArgs::default() }));
        assert!(is_chained(&CniArgs {
            interfaces: [("eth0".to_owned(), true)].into(),
            ..CniArgs::default()
        }));
    }
}
