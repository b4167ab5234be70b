//! HTTP proxies (RFC 9110, section 9.3.6): a tunnel by CONNECT, with Basic authentication (RFC 7617).

use std::fmt;
use std::io;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// The longest head of a proxy's answer.
const MAX_HEAD: usize = 8 << 10;

/// An HTTP proxy. `Debug` does not show the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    /// A DNS name, or an address without brackets.
    pub host: String,
    /// Its port.
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

/// Why a proxy does not let a connection through.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The connection to the proxy failed.
    #[error("the connection to the HTTP proxy failed: {0}")]
    Io(#[from] io::Error),
    /// Its answer is not HTTP.
    #[error("the answer of the HTTP proxy is not HTTP")]
    NotHttp,
    /// It refuses.
    #[error("the HTTP proxy refuses the tunnel with status {0}")]
    Status(u16),
}

impl Proxy {
    /// Has the proxy connect to `target`, a host and a port.
    pub(super) async fn tunnel<S: AsyncRead + AsyncWrite + Unpin>(
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
        // Byte by byte: what follows is for the relay's protocol.
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

#[cfg(test)]
mod tests {
    use super::*;

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
