//! Endpoint of a discovery server.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use fairlead_transport::split_authority;

/// The address of a discovery server, as in Talos's `DiscoveryServiceConfig`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerEndpoint {
    /// Whether the connection has TLS; only `http` has none.
    pub tls: bool,
    /// A DNS name, or an address without brackets.
    pub host: String,
    /// The TCP port; 443 where none is named, 80 for `http`.
    pub port: u16,
}

/// A text is not the address of a discovery server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the endpoint of a discovery server, such as https://discovery.example.com/")]
pub struct InvalidServerEndpoint(String);

impl ServerEndpoint {
    /// The server that this one says to use instead: a host, with or without a port.
    pub(super) fn redirected(&self, authority: &str) -> Result<Self, InvalidServerEndpoint> {
        let invalid = || InvalidServerEndpoint(authority.to_owned());
        let (host, port) = split_authority(authority).ok_or_else(invalid)?;
        Ok(Self { tls: self.tls, host: host.to_owned(), port: port.unwrap_or(default_port(self.tls)) })
    }

    /// Host and port as in a URI.
    pub(super) fn authority(&self) -> String {
        match self.host.parse() {
            Ok(IpAddr::V6(ip)) => format!("[{ip}]:{}", self.port),
            _ => format!("{}:{}", self.host, self.port),
        }
    }
}

fn default_port(tls: bool) -> u16 {
    if tls { 443 } else { 80 }
}

impl FromStr for ServerEndpoint {
    type Err = InvalidServerEndpoint;

    fn from_str(text: &str) -> Result<Self, InvalidServerEndpoint> {
        let invalid = || InvalidServerEndpoint(text.to_owned());
        let (scheme, authority) = text.split_once("://").ok_or_else(invalid)?;
        let tls = match scheme {
            "grpc" | "https" => true,
            "http" => false,
            _ => return Err(invalid()),
        };
        let (host, port) =
            split_authority(authority.strip_suffix('/').unwrap_or(authority)).ok_or_else(invalid)?;
        Ok(Self { tls, host: host.to_owned(), port: port.unwrap_or(default_port(tls)) })
    }
}

impl fmt::Display for ServerEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.tls { "https" } else { "http" }, self.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_as_talos_writes_them() {
        for (text, shown) in [
            ("https://discovery.example.com/", "https://discovery.example.com:443"),
            ("grpc://192.0.2.1:3000", "https://192.0.2.1:3000"),
            ("http://[2001:db8::1]", "http://[2001:db8::1]:80"),
        ] {
            let endpoint: ServerEndpoint = text.parse().unwrap();
            assert_eq!(endpoint.to_string(), shown);
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
        for text in
            ["discovery.example.com", "ftp://a", "https://", "https://a:0", "https://a/b", "https://::1"]
        {
            assert!(text.parse::<ServerEndpoint>().is_err(), "{text}");
        }
        let endpoint: ServerEndpoint = "https://a".parse().unwrap();
        assert_eq!(endpoint.redirected("b:1").unwrap().to_string(), "https://b:1");
        assert!(endpoint.redirected("b/c").is_err());
    }
}
