//! The Instance Metadata Service of EC2, version 2: a token first, then what is asked for with it ("Use the Instance Metadata
//! Service to access instance metadata", Amazon EC2 User Guide). It speaks HTTP/1.1 at a link-local address.

use std::net::Ipv4Addr;

use fairlead_wire::http::{NotHttp, Response, parse_response};

/// Longest response that is read, and longest token that is sent back.
pub const MAX_RESPONSE: usize = 8 << 10;
const MAX_TOKEN: usize = 1 << 10;
/// Lifetime of the token, in seconds: one query is made with it.
const TOKEN_LIFETIME: u32 = 60;
const HEADERS: &str = "Host: 169.254.169.254\r\nUser-Agent: fairlead\r\nConnection: close\r\n";

/// Permission to ask, as the service gave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token(String);

/// Reason why a response is of no use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidResponse {
    /// The text is no HTTP response, or ends too early.
    #[error("it is no HTTP response")]
    Format,
    /// Another status than 200; 404 where the instance has no public address.
    #[error("HTTP status {0}")]
    Status(u16),
    /// The body is not what was asked for.
    #[error("its body is not what was asked for")]
    Body,
}

/// The request for a token.
pub fn token_request() -> String {
    format!(
        "PUT /latest/api/token HTTP/1.1\r\n{HEADERS}X-aws-ec2-metadata-token-ttl-seconds: {TOKEN_LIFETIME}\r\n\
         Content-Length: 0\r\n\r\n"
    )
}

/// The request for the public IPv4 address.
pub fn public_ipv4_request(Token(token): &Token) -> String {
    format!(
        "GET /latest/meta-data/public-ipv4 HTTP/1.1\r\n{HEADERS}X-aws-ec2-metadata-token: {token}\r\n\r\n"
    )
}

/// Reads the whole response to [`token_request`].
///
/// # Errors
/// It has no token that could be sent back: one line of visible ASCII.
pub fn parse_token(response: &[u8]) -> Result<Token, InvalidResponse> {
    let token = body(response)?;
    let is_line =
        !token.is_empty() && token.len() <= MAX_TOKEN && token.bytes().all(|it| it.is_ascii_graphic());
    is_line.then_some(Token(token)).ok_or(InvalidResponse::Body)
}

/// Reads the whole response to [`public_ipv4_request`].
///
/// # Errors
/// It has no address.
pub fn parse_public_ipv4(response: &[u8]) -> Result<Ipv4Addr, InvalidResponse> {
    body(response)?.parse().map_err(|_| InvalidResponse::Body)
}

/// The body of a response with status 200, without space around it.
fn body(response: &[u8]) -> Result<String, InvalidResponse> {
    let Response { status, body } = parse_response(response, true)
        .map_err(|NotHttp| InvalidResponse::Format)?
        .ok_or(InvalidResponse::Format)?;
    if status != 200 {
        return Err(InvalidResponse::Status(status));
    }
    let text = String::from_utf8(body).map_err(|_| InvalidResponse::Body)?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn response(status: &str, body: &str) -> Vec<u8> {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }

    #[test]
    fn a_token_is_sent_back_as_it_came() {
        let token = parse_token(&response("200 OK", "AQAEAP==\n")).unwrap();
        assert!(public_ipv4_request(&token).contains("\r\nX-aws-ec2-metadata-token: AQAEAP==\r\n"));
        assert!(token_request().starts_with("PUT /latest/api/token HTTP/1.1\r\n"));
        for hostile in ["", "a\r\nHost: evil", "a b", "ä", &"a".repeat(MAX_TOKEN + 1)] {
            assert_eq!(parse_token(&response("200 OK", hostile)), Err(InvalidResponse::Body), "{hostile:.9}");
        }
    }

    #[test]
    fn an_instance_without_a_public_address_says_so() {
        let address = |response: &[u8]| parse_public_ipv4(response);
        assert_eq!(address(&response("200 OK", "203.0.113.7")), Ok(Ipv4Addr::new(203, 0, 113, 7)));
        assert_eq!(address(b"HTTP/1.0 200 OK\r\n\r\n203.0.113.7"), Ok(Ipv4Addr::new(203, 0, 113, 7)));
        assert_eq!(address(&response("404 Not Found", "<html>")), Err(InvalidResponse::Status(404)));
        assert_eq!(address(&response("200 OK", "<html>")), Err(InvalidResponse::Body));
        for broken in [
            "",
            "HTTP/1.1 200 OK",
            "HTTP/1.1 abc\r\n\r\n",
            "SSH-2.0\r\n\r\n",
            "HTTP/1.1 200\r\nContent-Length: 9\r\n\r\na",
        ] {
            assert_eq!(address(broken.as_bytes()), Err(InvalidResponse::Format), "{broken}");
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..256), length in any::<u64>()) {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            let framed = [head.as_bytes(), &bytes].concat();
            for response in [&bytes, &framed] {
                if let Ok(token) = parse_token(response) {
                    prop_assert_eq!(public_ipv4_request(&token).lines().count(), 6);
                }
                let _ = parse_public_ipv4(response);
            }
        }
    }
}
