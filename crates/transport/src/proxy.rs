//! HTTP proxies (RFC 9110, section 9.3.6): a tunnel by CONNECT, with Basic authentication (RFC 7617).

use std::fmt;
use std::io;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::split_authority;

/// The longest head of a proxy's answer.
const MAX_HEAD: usize = 8 << 10;

/// An HTTP proxy. `Debug` does not show the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    /// A DNS name, or an address without brackets.
    pub host: String,
    /// TCP port of the proxy; 80 where none is given.
    pub port: u16,
    /// User and password.
    pub credentials: Option<(String, String)>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = self.credentials.as_ref().map(|(user, _)| user);
        let mut shown = f.debug_struct("Proxy");
        shown.field("host", &self.host).field("port", &self.port).field("user", &user).finish()
    }
}

/// The environment names a proxy that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable} is {value:?}, which is no HTTP proxy such as http://user:password@proxy.example:3128")]
pub struct InvalidProxy {
    variable: &'static str,
    /// Without what may be a password.
    value: String,
}

/// Variables with a proxy, and with the hosts that need none, as curl and Go read them.
const PROXY_VARIABLES: [&str; 2] = ["HTTPS_PROXY", "https_proxy"];
const NO_PROXY_VARIABLES: [&str; 2] = ["NO_PROXY", "no_proxy"];
/// The port of a proxy that names none.
const DEFAULT_PORT: u16 = 80;

/// Reason why a proxy does not let a connection through.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The connection to the proxy failed.
    #[error("the connection to the HTTP proxy failed: {0}")]
    Io(#[from] io::Error),
    /// The answer of the proxy is not HTTP.
    #[error("the answer of the HTTP proxy is not HTTP")]
    NotHttp,
    /// The proxy refuses the tunnel, with this HTTP status.
    #[error("the HTTP proxy refuses the tunnel with status {0}")]
    Status(u16),
}

impl Proxy {
    /// The proxy that the environment names for a server: `HTTPS_PROXY`, unless `NO_PROXY` lists the host.
    ///
    /// # Errors
    /// The value is no HTTP proxy.
    pub fn from_environment(
        host: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, InvalidProxy> {
        let first = |names: [&'static str; 2]| {
            let set = names.into_iter().filter_map(|name| Some((name, variable(name)?)));
            set.into_iter().find(|(_, value)| !value.trim().is_empty())
        };
        let exempt = first(NO_PROXY_VARIABLES);
        if exempt.is_some_and(|(_, hosts)| hosts.split(',').any(|entry| is_exempt(host, entry.trim()))) {
            return Ok(None);
        }
        let Some((variable, value)) = first(PROXY_VARIABLES) else { return Ok(None) };
        let shown = value.rsplit_once('@').map_or(value.as_str(), |(_, host)| host).to_owned();
        parse(value.trim()).map(Some).ok_or(InvalidProxy { variable, value: shown })
    }

    /// Has the proxy connect to `target`, a host and a port.
    ///
    /// # Errors
    /// See [`ProxyError`].
    pub async fn tunnel<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: &mut S,
        target: &str,
    ) -> Result<(), ProxyError> {
        let authorization = self.credentials.as_ref().map_or_else(String::new, |(user, password)| {
            format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(format!("{user}:{password}")))
        });
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut head = Vec::new();
        // Byte by byte: what follows is for the protocol inside.
        while !head.ends_with(b"\r\n\r\n") {
            if head.len() >= MAX_HEAD {
                return Err(ProxyError::NotHttp);
            }
            head.push(stream.read_u8().await?);
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        match response.parse(&head).map(|_| response.code) {
            Ok(Some(200..=299)) => Ok(()),
            Ok(Some(status)) => Err(ProxyError::Status(status)),
            _ => Err(ProxyError::NotHttp),
        }
    }
}

fn parse(value: &str) -> Option<Proxy> {
    let authority = match value.split_once("://") {
        Some(("http", rest)) => rest,
        Some(_) => return None,
        None => value,
    };
    let authority = authority.trim_end_matches('/');
    let decoded = |text: &str| percent_decode_str(text).decode_utf8().ok().map(String::from);
    let (credentials, host) = match authority.rsplit_once('@') {
        Some((user, host)) => {
            let (user, password) = user.split_once(':').unwrap_or((user, ""));
            (Some((decoded(user)?, decoded(password)?)), host)
        }
        None => (None, authority),
    };
    let (host, port) = split_authority(host)?;
    Some(Proxy { host: host.to_owned(), port: port.unwrap_or(DEFAULT_PORT), credentials })
}

/// Whether an entry of `NO_PROXY` covers a host: all, a domain with what is below it, an address or a prefix.
fn is_exempt(host: &str, entry: &str) -> bool {
    if let Ok(ip) = host.parse::<IpAddr>() {
        let prefix = entry.parse::<IpNet>().or_else(|_| entry.parse::<IpAddr>().map(IpNet::from));
        return entry == "*" || prefix.is_ok_and(|prefix| prefix.contains(&ip));
    }
    let (host, domain) = (host.to_ascii_lowercase(), entry.trim_start_matches('.').to_ascii_lowercase());
    let is_below = host.strip_suffix(&domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    entry == "*" || (!domain.is_empty() && is_below)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_environment(host: &str, set: &[(&str, &str)]) -> Result<Option<Proxy>, InvalidProxy> {
        let value =
            |name: &str| set.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned());
        Proxy::from_environment(host, value)
    }

    #[test]
    fn the_environment_names_a_proxy_and_the_hosts_that_need_none() {
        let relay = "relay.example.com";
        assert_eq!(of_environment(relay, &[]), Ok(None));
        let proxy = of_environment(relay, &[("https_proxy", "http://Aladdin:open%20sesame@proxy:3128/")]);
        assert_eq!(proxy, Ok(Some(super::tests::proxy())));
        let plain = of_environment(relay, &[("HTTPS_PROXY", "[2001:db8::1]")]).unwrap().unwrap();
        assert_eq!((plain.host.as_str(), plain.port, plain.credentials), ("2001:db8::1", 80, None));
        for (relay, no_proxy, is_exempt) in [
            (relay, "example.com", true),
            (relay, "localhost, .Example.com", true),
            (relay, "*", true),
            (relay, "ample.com,relay.example.org,", false),
            ("192.0.2.7", "192.0.2.0/24", true),
            ("192.0.2.7", "192.0.2.8", false),
            ("2001:db8::1", "2001:db8::1", true),
        ] {
            let set = [("HTTPS_PROXY", "http://proxy:3128"), ("NO_PROXY", no_proxy)];
            assert_eq!(of_environment(relay, &set).unwrap().is_none(), is_exempt, "{relay} {no_proxy}");
        }
    }

    #[test]
    fn what_is_no_http_proxy_is_named_without_its_password() {
        for value in ["socks5://u:secret@proxy:1", "http://u:secret@proxy:x", "http://u:secret@"] {
            let error = of_environment("relay", &[("HTTPS_PROXY", value)]).unwrap_err().to_string();
            assert!(error.starts_with("HTTPS_PROXY is") && !error.contains("secret"), "{error}");
        }
    }

    fn proxy() -> Proxy {
        Proxy {
            host: "proxy".to_owned(),
            port: 3128,
            credentials: Some(("Aladdin".to_owned(), "open sesame".to_owned())),
        }
    }

    async fn answered(answer: &str) -> (Result<(), ProxyError>, String, String) {
        let (mut client, mut server) = tokio::io::duplex(1 << 16);
        server.write_all(answer.as_bytes()).await.unwrap();
        let tunnel = proxy().tunnel(&mut client, "[2001:db8::1]:443").await;
        drop(server.shutdown().await);
        let mut asked = vec![0; 1000];
        let length = server.read(&mut asked).await.unwrap();
        let mut rest = String::new();
        client.read_to_string(&mut rest).await.unwrap();
        (tunnel, String::from_utf8(asked[..length].to_vec()).unwrap(), rest)
    }

    #[tokio::test]
    async fn a_tunnel_is_asked_for_and_what_follows_the_answer_is_left() {
        let answer = "HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\nhello";
        let (tunnel, asked, rest) = answered(answer).await;
        tunnel.unwrap();
        let expected = "CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\
                        Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n\r\n";
        assert_eq!((asked.as_str(), rest.as_str()), (expected, "hello"));
    }

    #[tokio::test]
    async fn a_refusal_has_its_status_and_other_answers_are_told_apart() {
        let (refused, ..) = answered("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n").await;
        assert!(matches!(refused, Err(ProxyError::Status(407))), "{refused:?}");
        let (other, ..) = answered("SSH-2.0-OpenSSH\r\n\r\n").await;
        assert!(matches!(other, Err(ProxyError::NotHttp)), "{other:?}");
        let (endless, ..) = answered(&format!("HTTP/1.1 200 OK\r\nX: {}", "y".repeat(MAX_HEAD))).await;
        assert!(matches!(endless, Err(ProxyError::NotHttp)), "{endless:?}");
    }

    #[test]
    fn a_password_is_not_shown() {
        assert!(!format!("{:?}", proxy()).contains("sesame"));
    }
}
