//! Arguments of the controller of egress gateways.

use std::net::SocketAddr;

use clap::Args;
use fairlead_api::names::FOU_PORT;
use fairlead_controller::egress::OwnPod;

use super::listen_address;
use crate::coil_compat::{IgnoredLoggingArguments, IgnoredWebhookArguments};

#[derive(Debug, Args)]
pub(crate) struct EgressControllerArguments {
    /// Identity of this replica in the leader election
    #[arg(long, value_name = "NAME", env = "HOSTNAME", default_value = "fairlead-egress-controller")]
    pub(crate) identity: String,
    /// Serve Prometheus metrics on this address; port 0 serves none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9396", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve metrics with TLS, and only for tokens that the API server allows to `get` /metrics
    #[arg(long, env = "FAIRLEAD_METRICS_SECURE", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) metrics_secure: bool,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9397", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// UDP port of the gateways and their Services
    #[arg(long, value_name = "PORT", default_value_t = FOU_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) egress_port: u16,
    /// Image of the gateways [default: that of this pod's first container]
    #[arg(long, value_name = "IMAGE", env = "FAIRLEAD_EGRESS_IMAGE")]
    pub(crate) egress_image: Option<String>,
    /// Namespace of this pod
    #[arg(long, value_name = "NAMESPACE", env = "COIL_POD_NAMESPACE")]
    pod_namespace: Option<String>,
    /// Name of this pod
    #[arg(long, value_name = "NAME", env = "COIL_POD_NAME")]
    pod_name: Option<String>,
    /// Coil's choice between iptables and nftables, for its gateways.
    #[arg(long, hide = true)]
    backend: Option<String>,
    #[command(flatten)]
    pub(crate) webhook: IgnoredWebhookArguments,
    #[command(flatten)]
    pub(crate) logging: IgnoredLoggingArguments,
}

impl EgressControllerArguments {
    /// The pod of this replica, if it is known.
    pub(crate) fn pod(&self) -> Option<OwnPod> {
        let (namespace, name) = (self.pod_namespace.clone()?, self.pod_name.clone()?);
        Some(OwnPod { namespace, name })
    }

    /// Names of the flags that were given and have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut flags = self.logging.given();
        flags.extend(self.backend.is_some().then_some("--backend"));
        flags.extend(self.webhook.given());
        flags
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::arguments::{Arguments, Command};

    fn parse(flags: &[&str]) -> EgressControllerArguments {
        let words = ["fairlead", "egress-controller"].iter().chain(flags);
        let Command::EgressController(arguments) = Arguments::parse_from(words).command else {
            panic!("unexpected command")
        };
        *arguments
    }

    #[test]
    fn the_defaults_are_those_of_coils_program() {
        let arguments = parse(&["--pod-namespace=kube-system", "--pod-name=a"]);
        assert_eq!((arguments.metrics_addr.port(), arguments.health_addr.port()), (9396, 9397));
        assert_eq!((arguments.egress_port, arguments.without_effect().len()), (5555, 0));
        let pod = OwnPod { namespace: "kube-system".to_owned(), name: "a".to_owned() };
        assert_eq!(arguments.pod(), Some(pod));
        assert_eq!(parse(&["--egress-port", "6000"]).egress_port, 6000);
    }

    #[test]
    fn flags_of_coil_are_accepted_and_named() {
        let flags = [
            "--zap-stacktrace-level=panic",
            "--backend=nftables",
            "--webhook-addr=:9444",
            "--cert-dir=/certs",
            "--enable-cert-rotation",
            "--enable-restart-on-cert-refresh=true",
        ];
        let names = flags.map(|flag| flag.split('=').next().unwrap_or(flag));
        assert_eq!(parse(&flags).without_effect(), names);
    }
}
