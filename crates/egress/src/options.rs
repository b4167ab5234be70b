//! Options that an Egress sets for its gateways beside destinations: probes, limits and logs.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use fairlead_api::resources::{EgressHealthCheck, EgressSpec};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// Probes of the gateway; `None` is none.
    pub health: Option<HealthCheck>,
    /// Most connections that a client address may have at a time; `None` if the Egress sets no limit.
    pub max_connections: Option<u32>,
    /// Whether a log line is written for each connection that ends.
    pub log_connections: bool,
}

/// Targets and rate of probes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthCheck {
    /// Targets of which one that answers suffices.
    pub targets: BTreeSet<Target>,
    /// Time between two probes.
    pub interval: Duration,
    /// Probes in a row that change what is said of the gateway.
    pub threshold: u32,
}

/// Something outside that should answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// Answers ICMP echo requests.
    Echo(IpAddr),
    /// Accepts TCP connections.
    Connect(SocketAddr),
}

/// An entry of `spec.healthCheck.targets` that cannot be probed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "InvalidHealthTarget: '{0}' is neither an address nor ADDRESS:PORT; give an entry such as 192.0.2.1 or [2001:db8::1]:443"
)]
pub struct InvalidTarget(String);

impl FromStr for Target {
    type Err = InvalidTarget;

    fn from_str(text: &str) -> Result<Self, InvalidTarget> {
        let invalid = || InvalidTarget(text.chars().take(64).collect());
        let target = match text.parse() {
            Ok(address) => Self::Echo(address),
            Err(_) => Self::Connect(text.parse().map_err(|_| invalid())?),
        };
        let (address, port) = match target {
            Self::Echo(address) => (address, None),
            Self::Connect(address) => (address.ip(), Some(address.port())),
        };
        // A request to a group would be answered by hosts that are near.
        match address.is_unspecified() || address.is_multicast() || port == Some(0) {
            true => Err(invalid()),
            false => Ok(target),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Echo(address) => address.fmt(out),
            Self::Connect(address) => address.fmt(out),
        }
    }
}

impl HealthCheck {
    /// Health check of the targets that can be probed, if there are any, and the others.
    fn read(check: &EgressHealthCheck) -> (Option<Self>, Vec<InvalidTarget>) {
        let mut targets = BTreeSet::new();
        let mut invalid = Vec::new();
        for text in &check.targets {
            match text.parse() {
                Ok(target) => drop(targets.insert(target)),
                Err(error) => invalid.push(error),
            }
        }
        let interval = Duration::from_secs(u64::from(check.interval_seconds.clamp(1, 300)));
        let threshold = check.failure_threshold.max(1);
        ((!targets.is_empty()).then_some(Self { targets, interval, threshold }), invalid)
    }
}

impl Options {
    /// Options of an Egress, and its targets that cannot be probed: the others are.
    pub fn read(spec: &EgressSpec) -> (Self, Vec<InvalidTarget>) {
        let (health, invalid) = spec.health_check.as_ref().map(HealthCheck::read).unwrap_or_default();
        let max_connections = spec.max_connections_per_client.filter(|most| *most > 0);
        (Self { health, max_connections, log_connections: spec.log_connections }, invalid)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn targets_are_addresses_with_and_without_a_port() {
        let parse = |text: &str| text.parse::<Target>().ok();
        assert_eq!(parse("192.0.2.1"), Some(Target::Echo([192, 0, 2, 1].into())));
        assert_eq!(parse("192.0.2.1:443"), Some(Target::Connect(([192, 0, 2, 1], 443).into())));
        assert!(matches!(parse("2001:db8::1"), Some(Target::Echo(IpAddr::V6(_)))));
        assert!(matches!(parse("[2001:db8::1]:443"), Some(Target::Connect(SocketAddr::V6(_)))));
        let invalid =
            ["", "a", "192.0.2.1:0", "192.0.2.1:70000", "2001:db8::1]:1", "ff02::1", "0.0.0.0", "[::]:1"];
        assert_eq!(invalid.map(parse), [None; 8]);
    }

    #[test]
    fn what_cannot_be_probed_leaves_the_rest() {
        let check = |targets: &[&str]| EgressHealthCheck {
            targets: targets.iter().map(|text| (*text).to_owned()).collect(),
            interval_seconds: 2,
            failure_threshold: 3,
        };
        let (health, invalid) = HealthCheck::read(&check(&["x", "192.0.2.1"]));
        assert_eq!((health.unwrap().targets.len(), invalid.len()), (1, 1));
        assert!(invalid[0].to_string().starts_with("InvalidHealthTarget: 'x'"));
        assert_eq!(HealthCheck::read(&check(&["x"])).0, None);
    }

    proptest! {
        #[test]
        fn any_text_is_a_target_or_refused(text in ".{0,60}") {
            let _ = text.parse::<Target>();
        }
    }
}
