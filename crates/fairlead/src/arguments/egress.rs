//! Arguments of the controller of egress gateways, and of a gateway.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fairlead_api::names::FOU_PORT;
use fairlead_cli::arguments::value_parsers::{duration, listen_address};
use fairlead_controller::egress::{OwnPod, SeccompDefault};
use ipnet::IpNet;

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
    /// Seccomp profile of gateways whose Egress names none in spec.template
    #[arg(
        long,
        value_name = "PROFILE",
        env = "FAIRLEAD_EGRESS_SECCOMP_PROFILE",
        default_value = RUNTIME_DEFAULT,
        value_parser = seccomp_default()
    )]
    pub(crate) egress_seccomp_profile: SeccompDefault,
    /// Prefixes in which Egresses may have source addresses (spec.sourceAddresses) [default: none]
    #[arg(long, value_name = "CIDR", env = "FAIRLEAD_EGRESS_SOURCE_ADDRESSES", value_delimiter = ',')]
    pub(crate) egress_source_addresses: Vec<IpNet>,
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

/// Values of `--egress-seccomp-profile`.
const NO_PROFILE: &str = "none";
const RUNTIME_DEFAULT: &str = "RuntimeDefault";

fn seccomp_default() -> impl TypedValueParser<Value = SeccompDefault> {
    let values = [
        PossibleValue::new(NO_PROFILE).help(
            "Profile of the kubelet for pods that name none: with CRI-O, whose own profile refuses bpf",
        ),
        PossibleValue::new(RUNTIME_DEFAULT).help("Profile of the container runtime"),
    ];
    PossibleValuesParser::new(values).map(|name| match name.as_str() {
        NO_PROFILE => SeccompDefault::None,
        _ => SeccompDefault::RuntimeDefault,
    })
}

impl EgressControllerArguments {
    /// The pod of this replica, if it is known.
    pub(crate) fn pod(&self) -> Option<OwnPod> {
        Some(OwnPod { namespace: self.pod_namespace.clone()?, name: self.pod_name.clone()? })
    }

    /// Names of the flags that were given and have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut flags = self.logging.given();
        flags.extend(self.backend.is_some().then_some("--backend"));
        flags.extend(self.webhook.given());
        flags
    }
}

/// User name of node programs: their ServiceAccount.
const NODE_USER: &str = "system:serviceaccount:kube-system:fairlead-node";

#[derive(Debug, Args)]
pub(crate) struct EgressGatewayArguments {
    /// Serve Prometheus metrics on this address; port 0 serves none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:8080", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:8081", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// UDP port of Foo-over-UDP
    #[arg(long, value_name = "PORT", default_value_t = FOU_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) fou_port: u16,
    /// Compute the UDP source port from the flow inside, instead of sending from the UDP port
    #[arg(long, value_name = "BOOL", default_value = "false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_sport_auto: bool,
    /// User name of node programs, as the API server knows it
    #[arg(long, value_name = "NAME", default_value = NODE_USER)]
    pub(crate) node_user: String,
    /// Seconds for which flows may go on after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub(crate) drain_seconds: Duration,
    /// Namespace of the Egress and of this pod
    #[arg(long, value_name = "NAMESPACE", env = "COIL_POD_NAMESPACE")]
    pub(crate) pod_namespace: String,
    /// Name of the Egress
    #[arg(long, value_name = "NAME", env = "COIL_EGRESS_NAME")]
    pub(crate) egress_name: String,
    /// Addresses of this pod
    #[arg(long, value_name = "ADDRESS", env = "COIL_POD_ADDRESSES", value_delimiter = ',', required = true)]
    pub(crate) pod_addresses: Vec<IpAddr>,
    /// Name of this pod
    #[arg(long, value_name = "NAME", env = "HOSTNAME", default_value = "")]
    pub(crate) pod_name: String,
    /// Coil's choice between iptables and nftables.
    #[arg(long, hide = true)]
    backend: Option<String>,
    #[command(flatten)]
    pub(crate) logging: IgnoredLoggingArguments,
}

impl EgressGatewayArguments {
    /// Names of the flags that were given and have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut flags = self.logging.given();
        flags.extend(self.backend.is_some().then_some("--backend"));
        flags
    }
}

/// A number of seconds, or a duration with its unit.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) => Ok(Duration::from_secs(seconds)),
        Err(_) => duration(text),
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
    fn seccomp_profiles_are_in_the_help_and_no_others_are_taken() {
        let profile = |flags: &[&str]| parse(flags).egress_seccomp_profile;
        assert_eq!(profile(&[]), SeccompDefault::RuntimeDefault);
        assert_eq!(profile(&["--egress-seccomp-profile=RuntimeDefault"]), SeccompDefault::RuntimeDefault);
        assert_eq!(profile(&["--egress-seccomp-profile=none"]), SeccompDefault::None);
        let refused = |flag: &str| {
            let words = ["fairlead", "egress-controller", flag];
            Arguments::try_parse_from(words).unwrap_err().to_string()
        };
        let help = refused("--help");
        for words in ["- none: ", "- RuntimeDefault: Profile of the container", "[default: RuntimeDefault]"] {
            assert!(help.contains(words), "{words:?} is not in {help}");
        }
        let error = refused("--egress-seccomp-profile=runtimedefault");
        assert!(error.contains("[possible values: none, RuntimeDefault]"), "{error}");
    }

    #[test]
    fn a_gateway_has_the_defaults_and_flags_of_coils() {
        let own = ["--pod-namespace=n", "--egress-name=e", "--pod-addresses=10.0.0.1,fd00::1"];
        let parse = |flags: &[&str]| {
            let words = ["fairlead", "egress-gateway"].iter().chain(&own).chain(flags);
            let Command::EgressGateway(arguments) = Arguments::parse_from(words).command else {
                panic!("unexpected command")
            };
            *arguments
        };
        let arguments = parse(&[]);
        assert_eq!((arguments.metrics_addr.port(), arguments.health_addr.port()), (8080, 8081));
        assert_eq!(arguments.fou_port, 5555);
        assert_eq!((arguments.drain_seconds.as_secs(), arguments.pod_addresses.len()), (300, 2));
        assert!(!arguments.enable_sport_auto && arguments.without_effect().is_empty());
        let flags = [
            "--zap-stacktrace-level=panic",
            "--enable-sport-auto=true",
            "--backend=nftables",
            "--drain-seconds=20",
        ];
        let arguments = parse(&flags);
        assert_eq!(arguments.without_effect(), ["--zap-stacktrace-level", "--backend"]);
        assert!(arguments.enable_sport_auto && arguments.drain_seconds.as_secs() == 20);
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
