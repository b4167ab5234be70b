//! Heads of HTTP/1 messages, and responses to requests on connections of their own (RFC 9112): metadata services and gateways.

use httparse::{EMPTY_HEADER, Header, ParserConfig, Status, parse_chunk_size};

/// Longest head of a message, in bytes.
pub const MAX_HEAD: usize = 8 << 10;
/// Most headers that are read.
const MAX_HEADERS: usize = 64;

/// A whole response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// Status code of the response.
    pub status: u16,
    /// Body of the response, chunks put together.
    pub body: Vec<u8>,
}

/// The text is no HTTP response, or ends too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is no HTTP response")]
pub struct NotHttp;

/// Reason why bytes do not begin with a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The bytes are not HTTP.
    #[error("it is not HTTP")]
    NotHttp,
    /// The head has more bytes than [`MAX_HEAD`], or more than 64 headers.
    #[error("the head is too long")]
    TooLong,
}

/// Headers of a message.
#[derive(Debug)]
pub struct Headers<'a>([Header<'a>; MAX_HEADERS]);

impl<'a> Headers<'a> {
    /// Values of all headers with this name.
    pub fn values(&self, name: &str) -> impl Iterator<Item = &'a str> {
        let of_name = self.0.iter().filter(move |header| header.name.eq_ignore_ascii_case(name));
        of_name.filter_map(|header| std::str::from_utf8(header.value).ok()).map(str::trim)
    }

    /// Value of the first header with this name.
    pub fn value(&self, name: &str) -> Option<&'a str> {
        self.values(name).next()
    }

    /// Whether a header with this name, a list, has this token; case does not count.
    pub fn has_token(&self, name: &str, token: &str) -> bool {
        self.values(name)
            .flat_map(|value| value.split(','))
            .any(|part| part.trim().eq_ignore_ascii_case(token))
    }
}

/// Head of a request.
#[derive(Debug)]
pub struct RequestHead<'a> {
    /// Method, as the client writes it.
    pub method: &'a str,
    /// Path and query.
    pub path: &'a str,
    /// Length in bytes: a body begins behind them.
    pub length: usize,
    /// Headers.
    pub headers: Headers<'a>,
}

impl<'a> RequestHead<'a> {
    /// Parses the beginning of these bytes; `None` while a part is missing.
    ///
    /// # Errors
    /// See [`HeadError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Option<Self>, HeadError> {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let Some(length) = limited(request.parse(bytes), bytes)? else { return Ok(None) };
        let (method, path) = (request.method.unwrap_or_default(), request.path.unwrap_or_default());
        Ok(Some(Self { method, path, length, headers: Headers(headers) }))
    }
}

/// Head of a response.
#[derive(Debug)]
pub struct ResponseHead<'a> {
    /// Status code.
    pub status: u16,
    /// Length in bytes: a body begins behind them.
    pub length: usize,
    /// Headers.
    pub headers: Headers<'a>,
}

impl<'a> ResponseHead<'a> {
    /// Parses the beginning of these bytes; `None` while a part is missing.
    ///
    /// # Errors
    /// See [`HeadError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Option<Self>, HeadError> {
        let (parsed, head) = Self::parse_with(&ParserConfig::default(), bytes);
        Ok(limited(parsed, bytes)?.map(|length| Self { length, ..head }))
    }

    /// Parses the beginning of these bytes, of any length; `None` while a part is missing. Gateways in homes write headers that no
    /// server should: those are left out.
    ///
    /// # Errors
    /// See [`NotHttp`].
    pub fn parse_lenient(bytes: &'a [u8]) -> Result<Option<Self>, NotHttp> {
        let mut config = ParserConfig::default();
        config
            .allow_spaces_after_header_name_in_responses(true)
            .allow_obsolete_multiline_headers_in_responses(true)
            .ignore_invalid_headers_in_responses(true);
        match Self::parse_with(&config, bytes) {
            (Ok(Status::Complete(length)), head) => Ok(Some(Self { length, ..head })),
            (Ok(Status::Partial), _) => Ok(None),
            (Err(_), _) => Err(NotHttp),
        }
    }

    fn parse_with(config: &ParserConfig, bytes: &'a [u8]) -> (httparse::Result<usize>, Self) {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = config.parse_response(&mut response, bytes);
        let status = response.code.unwrap_or_default();
        (parsed, Self { status, length: 0, headers: Headers(headers) })
    }
}

/// Length of a head that was parsed, within [`MAX_HEAD`].
fn limited(parsed: httparse::Result<usize>, bytes: &[u8]) -> Result<Option<usize>, HeadError> {
    match parsed {
        Ok(Status::Complete(length)) if length <= MAX_HEAD => Ok(Some(length)),
        Ok(Status::Partial) if bytes.len() < MAX_HEAD => Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => Err(HeadError::TooLong),
        Err(_) => Err(HeadError::NotHttp),
    }
}

/// Reads what has come of a response, after which the connection `has_ended` or not; `None` while a part is missing.
///
/// # Errors
/// See [`NotHttp`].
pub fn parse_response(bytes: &[u8], has_ended: bool) -> Result<Option<Response>, NotHttp> {
    let incomplete = || if has_ended { Err(NotHttp) } else { Ok(None) };
    let Some(head) = ResponseHead::parse_lenient(bytes)? else { return incomplete() };
    let rest = bytes.get(head.length..).unwrap_or_default();
    let coding = head.headers.value("transfer-encoding");
    let is_chunked = coding.is_some_and(|coding| coding.to_ascii_lowercase().contains("chunked"));
    let body = if is_chunked {
        dechunked(rest)?
    } else if let Some(length) = head.headers.value("content-length") {
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

    #[test]
    fn heads_that_are_too_long_are_told_from_other_protocols() {
        let request = |headers: &str| format!("GET /a?b HTTP/1.1\r\n{headers}\r\n\r\n");
        let whole = request("Upgrade: h2c , WebSocket\r\nHost: x\r\nupgrade: y");
        let head = RequestHead::parse(whole.as_bytes()).unwrap().unwrap();
        assert_eq!((head.method, head.path, head.length), ("GET", "/a?b", whole.len()));
        assert!(head.headers.has_token("upgrade", "websocket") && head.headers.has_token("Upgrade", "Y"));
        assert_eq!((head.headers.value("HOST"), head.headers.value("cookie")), (Some("x"), None));
        for headers in [format!("X: {}", "y".repeat(MAX_HEAD)), ["X: y"; MAX_HEADERS + 1].join("\r\n")] {
            let whole = request(&headers);
            assert_eq!(RequestHead::parse(whole.as_bytes()).unwrap_err(), HeadError::TooLong);
            let response = whole.replace("GET /a?b HTTP/1.1", "HTTP/1.1 200 OK");
            assert_eq!(ResponseHead::parse(response.as_bytes()).unwrap_err(), HeadError::TooLong);
        }
        assert_eq!(RequestHead::parse(b"\x16\x03\x01\x02").unwrap_err(), HeadError::NotHttp);
        assert_eq!(ResponseHead::parse(b"SSH-2.0\r\n").unwrap_err(), HeadError::NotHttp);
        assert!(
            ResponseHead::parse(b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n").is_err(),
            "it is lenient on request"
        );
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
                let _ = (RequestHead::parse(response), ResponseHead::parse(response));
                if let Ok(Some(found)) = parse_response(response, has_ended) {
                    prop_assert!(found.body.len() <= response.len());
                }
            }
        }
    }
}
