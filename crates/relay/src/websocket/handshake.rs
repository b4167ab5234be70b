//! The opening handshake (RFC 6455, section 4).

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_wire::http::{HeadError, RequestHead, ResponseHead};
use fairlead_wire::relay::{PATH, SUBPROTOCOL};

/// Appended to the key of a request (RFC 6455, section 1.3).
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
const VERSION: &str = "13";

/// A request that a relay accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upgrade {
    /// Response that accepts the request, in bytes.
    pub response: Vec<u8>,
    /// Length of the request's head.
    pub length: usize,
}

/// A request that a relay refuses: the status it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(&'static str);

impl Refusal {
    /// The response.
    pub fn response(&self) -> Vec<u8> {
        // RFC 6455, section 4.2.2: the version that is understood.
        let more = if self.0.starts_with("426") {
            format!("Upgrade: websocket\r\nSec-WebSocket-Version: {VERSION}\r\n")
        } else {
            String::new()
        };
        format!("HTTP/1.1 {}\r\n{more}Connection: close\r\nContent-Length: 0\r\n\r\n", self.0).into_bytes()
    }
}

/// Reason why a response does not open a WebSocket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Something that is not HTTP, or too long.
    #[error("the answer is not HTTP")]
    NotHttp,
    /// Another status than 101.
    #[error("the answer is HTTP status {0}; is there a relay at this address?")]
    Status(u16),
    /// The headers are not those of an accepted WebSocket.
    #[error("the answer has no valid {0}")]
    Header(&'static str),
}

/// Parses the head of a request, or says that more is needed.
///
/// # Errors
/// It does not ask for the WebSocket of a relay.
pub fn read_request(bytes: &[u8]) -> Result<Option<Upgrade>, Refusal> {
    let head = match RequestHead::parse(bytes) {
        Ok(Some(head)) => head,
        Ok(None) => return Ok(None),
        Err(HeadError::NotHttp) => return Err(Refusal("400 Bad Request")),
        Err(HeadError::TooLong) => return Err(Refusal("431 Request Header Fields Too Large")),
    };
    if head.path.split_once('?').map_or(head.path, |(path, _)| path) != PATH {
        return Err(Refusal("404 Not Found"));
    }
    if head.method != "GET" {
        return Err(Refusal("405 Method Not Allowed"));
    }
    let headers = &head.headers;
    if !headers.has_token("upgrade", "websocket") || headers.value("sec-websocket-version") != Some(VERSION) {
        return Err(Refusal("426 Upgrade Required"));
    }
    // Only browsers send it, on behalf of a page; no page has reason to.
    if headers.value("origin").is_some() {
        return Err(Refusal("403 Forbidden"));
    }
    let key = headers.value("sec-websocket-key").filter(|key| is_key(key));
    let (Some(key), true) = (key, headers.has_token("sec-websocket-protocol", SUBPROTOCOL)) else {
        return Err(Refusal("400 Bad Request"));
    };
    let response = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {}\r\nSec-WebSocket-Protocol: {SUBPROTOCOL}\r\n\r\n",
        accept(key)
    );
    Ok(Some(Upgrade { response: response.into_bytes(), length: head.length }))
}

/// A request for the relay at `host` (with a port, if it is not the default one).
pub fn request(host: &str, nonce: [u8; 16]) -> Vec<u8> {
    format!(
        "GET {PATH} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: {}\r\nSec-WebSocket-Version: {VERSION}\r\nSec-WebSocket-Protocol: {SUBPROTOCOL}\r\n\r\n",
        STANDARD.encode(nonce)
    )
    .into_bytes()
}

/// Parses the head of the response to [`request`] and returns its length, or says that more is needed.
///
/// # Errors
/// The WebSocket is not open.
pub fn read_response(bytes: &[u8], nonce: [u8; 16]) -> Result<Option<usize>, HandshakeError> {
    let head = match ResponseHead::parse(bytes) {
        Ok(Some(head)) => head,
        Ok(None) => return Ok(None),
        Err(_) => return Err(HandshakeError::NotHttp),
    };
    if head.status != 101 {
        return Err(HandshakeError::Status(head.status));
    }
    let headers = &head.headers;
    if !headers.has_token("upgrade", "websocket") {
        return Err(HandshakeError::Header("Upgrade"));
    }
    if headers.value("sec-websocket-accept") != Some(accept(&STANDARD.encode(nonce)).as_str()) {
        return Err(HandshakeError::Header("Sec-WebSocket-Accept"));
    }
    if headers.value("sec-websocket-protocol") != Some(SUBPROTOCOL) {
        return Err(HandshakeError::Header("Sec-WebSocket-Protocol"));
    }
    Ok(Some(head.length))
}

fn accept(key: &str) -> String {
    STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{GUID}").as_bytes()))
}

/// 16 bytes in base64 (RFC 6455, section 4.1).
fn is_key(key: &str) -> bool {
    STANDARD.decode(key).is_ok_and(|key| key.len() == 16)
}

#[cfg(test)]
mod tests {
    use fairlead_wire::http::MAX_HEAD;
    use proptest::prelude::*;

    use super::*;

    /// The key of RFC 6455, section 1.3.
    fn nonce() -> [u8; 16] {
        *b"the sample nonce"
    }

    #[test]
    fn the_key_of_the_rfc_is_accepted_as_there() {
        let request = String::from_utf8(request("relay.example", nonce())).unwrap();
        assert!(request.contains("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"), "{request}");
        let upgrade = read_request(request.as_bytes()).unwrap().unwrap();
        let response = String::from_utf8(upgrade.response.clone()).unwrap();
        assert!(response.contains("Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"), "{response}");
        assert_eq!(upgrade.length, request.len());
        assert_eq!(read_response(&upgrade.response, nonce()), Ok(Some(upgrade.response.len())));
        let other = read_response(&upgrade.response, [0; 16]);
        assert_eq!(other, Err(HandshakeError::Header("Sec-WebSocket-Accept")));
    }

    #[test]
    fn a_request_is_read_when_it_is_complete_and_what_follows_is_left() {
        let mut request = request("relay.example:443", nonce());
        let length = request.len();
        for end in 0..length {
            assert_eq!(read_request(&request[..end]), Ok(None));
        }
        request.extend(b"more");
        assert_eq!(read_request(&request).unwrap().unwrap().length, length);
    }

    #[test]
    fn other_requests_are_refused_with_a_status() {
        let good = String::from_utf8(request("relay.example", nonce())).unwrap();
        let long = format!("X: {}\r\n\r\n", "y".repeat(MAX_HEAD));
        let cases = [
            ("404", good.replace("/relay", "/")),
            ("405", good.replace("GET", "POST")),
            ("426", good.replace("Upgrade: websocket\r\n", "")),
            ("426", good.replace("Version: 13", "Version: 8")),
            ("403", good.replace("\r\n\r\n", "\r\nOrigin: https://example.org\r\n\r\n")),
            ("400", good.replace("dGhl", "")),
            ("400", good.replace(SUBPROTOCOL, "chat")),
            ("400", "\x16\x03\x01\x02\x00\x01".to_owned()),
            ("431", good.replace("\r\n\r\n", &format!("\r\n{long}"))),
        ];
        for (status, request) in cases {
            let refusal = read_request(request.as_bytes()).unwrap_err();
            assert!(refusal.to_string().starts_with(status), "{refusal} for {request:?}");
            let response = String::from_utf8(refusal.response()).unwrap();
            assert!(response.starts_with(&format!("HTTP/1.1 {status} ")) && response.ends_with("\r\n\r\n"));
        }
    }

    #[test]
    fn an_answer_of_something_else_is_explained() {
        let answer = read_response(b"HTTP/1.1 200 OK\r\n\r\n", nonce());
        assert_eq!(answer, Err(HandshakeError::Status(200)));
        assert_eq!(read_response(b"SSH-2.0-OpenSSH\r\n", nonce()), Err(HandshakeError::NotHttp));
        let endless = [b"HTTP/1.1 101 x\r\nX: ".as_slice(), &[b'y'; MAX_HEAD]].concat();
        assert_eq!(read_response(&endless, nonce()), Err(HandshakeError::NotHttp));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), text in "\\PC{0,200}") {
            let _ = (read_request(&bytes), read_response(&bytes, nonce()));
            let _ = read_request(format!("GET /relay HTTP/1.1\r\n{text}\r\n\r\n").as_bytes());
        }
    }
}
