//! Endpoints as users write them: `192.0.2.1:51820`, `[2001:db8::1]:51820`, `node.example.com:51820`.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// Address or DNS name of a peer, with a port. Names are kept, not resolved.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Endpoint {
    /// An address and a port.
    Address(SocketAddr),
    /// A DNS name (RFC 1123 2.1) and a port.
    Name {
        /// The name, without a port.
        host: String,
        /// UDP port, never zero.
        port: u16,
    },
}

/// A text that is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "not an endpoint: {0:?}; write ADDRESS:PORT, [IPV6 ADDRESS]:PORT or NAME:PORT, with a port from 1 to 65535"
)]
pub struct InvalidEndpoint(pub String);

impl Endpoint {
    /// The address; `None` for a name.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Address(address) => Some(*address),
            Self::Name { .. } => None,
        }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        match self {
            Self::Address(address) => address.port(),
            Self::Name { port, .. } => *port,
        }
    }
}

impl FromStr for Endpoint {
    type Err = InvalidEndpoint;

    fn from_str(text: &str) -> Result<Self, InvalidEndpoint> {
        let name = || {
            let (host, port) = text.rsplit_once(':')?;
            // `u16::from_str` takes a sign.
            let digits = port.bytes().all(|byte| byte.is_ascii_digit());
            let port = port.parse().ok().filter(|_| digits)?;
            is_dns_name(host).then(|| Self::Name { host: host.to_owned(), port })
        };
        text.parse()
            .ok()
            .map(Self::Address)
            .or_else(name)
            .filter(|endpoint| endpoint.port() != 0)
            .ok_or_else(|| InvalidEndpoint(text.to_owned()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// RFC 1123 2.1. The last label must have a letter, or `300.1.1.1` would be a name.
fn is_dns_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= 253 && name.split('.').all(label) && last.bytes().any(|byte| byte.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_and_names_are_told_apart() {
        let parsed = |text: &str| text.parse::<Endpoint>().unwrap();
        assert_eq!(parsed("192.0.2.1:51820").address(), "192.0.2.1:51820".parse().ok());
        assert_eq!(parsed("[2001:db8::1]:1").address(), "[2001:db8::1]:1".parse().ok());
        for (text, host) in
            [("node-1.example.com:51820", "node-1.example.com"), ("a.:51820", "a."), ("4u:51820", "4u")]
        {
            assert_eq!(parsed(text), Endpoint::Name { host: host.to_owned(), port: 51820 });
        }
    }

    #[test]
    fn what_is_no_endpoint_is_refused_and_named() {
        let long = format!("{}:5", ["a23456789"; 26].join("."));
        for text in [
            "",
            ":",
            ":5",
            "192.0.2.1",
            "192.0.2.1:",
            "192.0.2.1:0",
            "192.0.2.1:65536",
            "300.1.1.1:5",
            "2001:db8::1:5",
            "[2001:db8::1]",
            "[::1]:+5",
            "name:+5",
            "name:0",
            "name",
            "-a:5",
            "a-:5",
            "a..b:5",
            "a b:5",
            "http://a:5",
            &long,
        ] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("not an endpoint: {text:?}")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_read_back(text in "\\PC{0,20}|[a-f0-9.:\\[\\]-]{0,20}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
            }
        }

        #[test]
        fn every_address_is_read_back(address: std::net::IpAddr, port in 1u16..) {
            let endpoint = Endpoint::Address((address, port).into());
            prop_assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
    }
}
