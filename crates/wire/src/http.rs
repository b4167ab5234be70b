//! Responses of HTTP/1 servers to requests on connections of their own (RFC 9112): metadata services and gateways.

use httparse::{EMPTY_HEADER, Header, ParserConfig, Status, parse_chunk_size};

/// Most headers that are read.
const MAX_HEADERS: usize = 64;

/// A whole response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// Its status code.
    pub status: u16,
    /// Its body, chunks put together.
    pub body: Vec<u8>,
}

/// It is no HTTP response, or ends too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is no HTTP response")]
pub struct NotHttp;

/// The beginning of a response: status and headers.
pub struct Head<'a> {
    /// Its status code.
    pub status: u16,
    /// Bytes of status and headers: a body begins behind them.
    length: usize,
    headers: [Header<'a>; MAX_HEADERS],
}

impl<'a> Head<'a> {
    /// The beginning of these bytes; `None` while a part is missing. Gateways in homes write headers that no server should: those
    /// are left out.
    ///
    /// # Errors
    /// See [`NotHttp`].
    pub fn parse(bytes: &'a [u8]) -> Result<Option<Self>, NotHttp> {
        let mut config = ParserConfig::default();
        config
            .allow_spaces_after_header_name_in_responses(true)
            .allow_obsolete_multiline_headers_in_responses(true)
            .ignore_invalid_headers_in_responses(true);
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        match config.parse_response(&mut response, bytes) {
            Ok(Status::Complete(length)) => {
                Ok(Some(Self { status: response.code.ok_or(NotHttp)?, length, headers }))
            }
            Ok(Status::Partial) => Ok(None),
            Err(_) => Err(NotHttp),
        }
    }

    /// The value of the first header with this name.
    pub fn value(&self, name: &str) -> Option<&'a str> {
        let header = self.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(header.value).ok().map(str::trim)
    }
}

/// Reads what has come of a response, after which the connection `has_ended` or not; `None` while a part is missing.
///
/// # Errors
/// See [`NotHttp`].
pub fn parse_response(bytes: &[u8], has_ended: bool) -> Result<Option<Response>, NotHttp> {
    let incomplete = || if has_ended { Err(NotHttp) } else { Ok(None) };
    let Some(head) = Head::parse(bytes)? else { return incomplete() };
    let rest = bytes.get(head.length..).unwrap_or_default();
    let coding = head.value("transfer-encoding");
    let is_chunked = coding.is_some_and(|coding| coding.to_ascii_lowercase().contains("chunked"));
    let body = if is_chunked {
        dechunked(rest)?
    } else if let Some(length) = head.value("content-length") {
        let length: usize = length.parse().map_err(|_| NotHttp)?;
        rest.get(..length).map(<[u8]>::to_vec)
    } else {
        has_ended.then(|| rest.to_vec())
    };
    body.map_or_else(incomplete, |body| Ok(Some(Response { status: head.status, body })))
}

/// Chunks put together (RFC 9112, section 7.1); `None` while the last one is missing.
fn dechunked(mut rest: &[u8]) -> Result<Option<Vec<u8>>, NotHttp> {
    let mut body = Vec::new();
    loop {
        let (begin, length) = match parse_chunk_size(rest).map_err(|_| NotHttp)? {
            Status::Complete(found) => found,
            Status::Partial => return Ok(None),
        };
        if length == 0 {
            return Ok(Some(body));
        }
        let length = usize::try_from(length).map_err(|_| NotHttp)?;
        let chunk = rest.get(begin..).and_then(|rest| rest.split_at_checked(length));
        let Some((chunk, behind)) = chunk else { return Ok(None) };
        body.extend_from_slice(chunk);
        let Some(behind) = behind.get(2..) else { return Ok(None) };
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn body(response: &str, has_ended: bool) -> Result<Option<String>, NotHttp> {
        let response = parse_response(response.as_bytes(), has_ended)?;
        Ok(response.map(|response| String::from_utf8(response.body).unwrap()))
    }

    #[test]
    fn a_body_ends_where_its_headers_say() {
        let some = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(body("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc", false), some("ab"));
        assert_eq!(body("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc", false), Ok(None));
        assert_eq!(body("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc", true), Err(NotHttp));
        assert_eq!(body("HTTP/1.0 200 OK\r\n\r\nabc", false), Ok(None));
        assert_eq!(body("HTTP/1.0 200 OK\r\n\r\nabc", true), some("abc"));
        assert_eq!(body("HTTP/1.1 200 OK\r\n", false), Ok(None));
        assert_eq!(body("HTTP/1.1 200 OK\r\n", true), Err(NotHttp));
        assert_eq!(body("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", true), Err(NotHttp));
        assert_eq!(body("SSH-2.0\r\n\r\n", false), Err(NotHttp));
    }

    #[test]
    fn chunks_are_put_together() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n";
        let whole = format!("{head}2;a=b\r\nab\r\n1\r\nc\r\n0\r\n\r\n");
        assert_eq!(body(&whole, false), Ok(Some("abc".to_owned())));
        for end in head.len()..whole.len() - 4 {
            assert_eq!(body(&whole[..end], false), Ok(None), "{end}");
        }
        assert_eq!(body(&format!("{head}-1\r\nab"), true), Err(NotHttp));
        assert_eq!(body(&format!("{head}ffffffffffffffff\r\nab"), true), Err(NotHttp));
    }

    #[test]
    fn what_no_server_should_write_is_left_out() {
        let response = "HTTP/1.1 200 OK\r\nno colon here\r\nContent-Length : 2\r\n\r\nab";
        assert_eq!(body(response, false), Ok(Some("ab".to_owned())));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..256), length: u64, has_ended: bool, chunked: bool,
        ) {
            let framing =
                if chunked { "Transfer-Encoding: chunked".to_owned() } else { format!("Content-Length: {length}") };
            let framed = [format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n").as_bytes(), &bytes].concat();
            for response in [&bytes, &framed] {
                if let Ok(Some(found)) = parse_response(response, has_ended) {
                    prop_assert!(found.body.len() <= response.len());
                }
            }
        }
    }
}
