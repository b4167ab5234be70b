//! Endpoint of a relay: transport, host and port.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Transport of frames: `docs/relay-protocol.md`, "Transport". The names are those of `spec.relay.external.transport`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Directly over TLS.
    Tcp,
    /// WebSocket without TLS.
    Ws,
    /// WebSocket over TLS.
    Wss,
}

/// The address of a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Transport of frames.
    pub transport: Transport,
    /// A DNS name, or an address without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

/// A text is not the address of a relay.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the endpoint of a relay, such as tcp://relay.example:3478 or wss://relay.example")]
pub struct InvalidEndpoint(String);

impl Endpoint {
    /// The host as it is written before a port.
    pub(crate) fn bracketed_host(&self) -> String {
        match self.host.parse() {
            Ok(IpAddr::V6(ip)) => format!("[{ip}]"),
            _ => self.host.clone(),
        }
    }

    /// Host and port as in a `Host` header: without the default port.
    pub(crate) fn authority(&self) -> String {
        match default_port(self.transport) {
            Some(port) if port == self.port => self.bracketed_host(),
            _ => format!("{}:{}", self.bracketed_host(), self.port),
        }
    }
}

fn default_port(transport: Transport) -> Option<u16> {
    match transport {
        Transport::Tcp => None,
        Transport::Ws => Some(80),
        Transport::Wss => Some(443),
    }
}

impl FromStr for Endpoint {
    type Err = InvalidEndpoint;

    fn from_str(text: &str) -> Result<Self, InvalidEndpoint> {
        let invalid = || InvalidEndpoint(text.to_owned());
        let (scheme, authority) = text.split_once("://").ok_or_else(invalid)?;
        let transport = match scheme {
            "tcp" => Transport::Tcp,
            "ws" => Transport::Ws,
            "wss" => Transport::Wss,
            _ => return Err(invalid()),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, rest)) => {
                host.parse::<std::net::Ipv6Addr>().map_err(|_| invalid())?;
                (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(invalid)?) })
            }
            None => authority.rsplit_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map(|port| port.parse::<u16>().map_err(|_| invalid())).transpose()?;
        let port = port.or(default_port(transport)).filter(|port| *port != 0).ok_or_else(invalid)?;
        let is_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        let is_valid = !host.is_empty()
            && host.chars().all(is_host)
            && (!host.contains(':') || authority.starts_with('['));
        is_valid.then(|| Self { transport, host: host.to_owned(), port }).ok_or_else(invalid)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.transport {
            Transport::Tcp => "tcp",
            Transport::Ws => "ws",
            Transport::Wss => "wss",
        };
        write!(f, "{scheme}://{}:{}", self.bracketed_host(), self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_as_they_are_written() {
        for (text, shown, authority) in [
            ("tcp://relay.example:3478", "tcp://relay.example:3478", "relay.example:3478"),
            ("wss://relay.example", "wss://relay.example:443", "relay.example"),
            ("ws://192.0.2.1/", "ws://192.0.2.1:80", "192.0.2.1"),
            ("wss://[2001:db8::1]:8443", "wss://[2001:db8::1]:8443", "[2001:db8::1]:8443"),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!((endpoint.to_string().as_str(), endpoint.authority().as_str()), (shown, authority));
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
    }

    #[test]
    fn what_is_no_endpoint_is_refused() {
        for text in [
            "relay.example:1",
            "tcp://relay.example",
            "https://relay.example",
            "wss://",
            "wss://a b",
            "wss://2001:db8::1",
            "wss://[2001:db8::1",
            "wss://[x]:1",
            "wss://a:0",
            "wss://a:65536",
            "wss://a/path",
            "wss://a\r\nX: y",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text:?}");
        }
    }
}
