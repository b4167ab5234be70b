//! Behind another CNI plugin, which allocated the addresses and made the interface (`--enable-ipam=false`).

use serde_json::Value;

use super::{CheckContext, PodInterface};
use crate::cni::check::{self, Previous};
use crate::cni::failure::{Failure, Reason};

/// Failure of an ADD behind another plugin where this program allocates addresses.
pub(super) fn not_first() -> Failure {
    // In Coil's words, which administrators search for.
    let message = "coil must be called as the first plugin when IPAM related features are enabled";
    Failure::new(Reason::InvalidPluginOrder, message)
        .details("put it before the plugins that change an interface (portmap, bandwidth, tuning)")
}

/// Compares what the plugin before reported with what the kernel shows; the host's side is that plugin's.
pub(super) fn check(context: &CheckContext) -> Vec<String> {
    let previous = context.previous.clone().unwrap_or_default();
    check::chained((&context.key.ifname, &context.netns), &previous, &context.kernel)
}

/// The interface as the plugin before reported it.
pub(super) fn interface(configuration: &[u8], ifname: &str) -> PodInterface {
    let previous = Previous::of_configuration(configuration).ok().flatten();
    let reported = previous.map(|previous| previous.addresses(ifname)).unwrap_or_default();
    PodInterface { addresses: reported.into_iter().collect(), mtu: None }
}

/// The result of the plugin before, unchanged.
pub(super) fn pass_on(configuration: &[u8]) -> Result<Vec<u8>, Failure> {
    let undecodable = |error: serde_json::Error| {
        Failure::new(Reason::InvalidNetworkConfig, "the network configuration cannot be decoded")
            .details(error)
    };
    let previous = match configuration.trim_ascii() {
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

    #[test]
    fn the_result_of_the_plugin_before_is_passed_on_unchanged() {
        let stdin = r#"{"cniVersion": "0.4.0", "name": "n", "prevResult":
            {"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.1.0.2/24"}], "x": [1, {"y": null}]}}"#;
        let passed: Value = serde_json::from_slice(&pass_on(stdin.as_bytes()).unwrap()).unwrap();
        let given: Value = serde_json::from_str(stdin).unwrap();
        assert_eq!(passed, given["prevResult"]);
    }

    #[test]
    fn the_addresses_are_those_of_the_interface_in_the_container() {
        let stdin = serde_json::json!({ "cniVersion": "1.0.0", "name": "n", "prevResult": {
            "cniVersion": "1.0.0",
            "interfaces": [{ "name": "veth1" }, { "name": "eth0", "sandbox": "/ns" }],
            "ips": [{ "address": "10.20.30.40/24", "interface": 1 }, { "address": "10.9.9.9/24", "interface": 0 }],
        } });
        let addresses = ["10.20.30.40".parse().unwrap()].into_iter().collect();
        let reported = PodInterface { addresses, mtu: None };
        assert_eq!(interface(stdin.to_string().as_bytes(), "eth0"), reported);
    }

    #[test]
    fn without_a_plugin_before_there_is_nothing_to_pass_on() {
        for nothing in ["", " \n", "{}", r#"{"prevResult": null}"#, r#"{"prevResult": 1}"#, "[]"] {
            let refused = pass_on(nothing.as_bytes()).unwrap_err();
            assert!(refused.message.contains("after another plugin"), "{nothing}: {refused}");
        }
        assert!(pass_on(b"{").unwrap_err().message.contains("decoded"));
    }
}
