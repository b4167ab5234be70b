//! Asks a gateway what it has to do.

use std::net::IpAddr;

use fairlead_wire::http::Response;

use super::order::Load;
use crate::egress::pods;

/// Load that the gateway reports; `None` without a usable answer.
pub(super) async fn load(address: IpAddr, port: u16) -> Option<Load> {
    of_answer(&pods::ask(address, port, "/load").await?)
}

/// Load in an answer; `None` unless the status is 200 and the body parses.
pub(super) fn of_answer(answer: &Response) -> Option<Load> {
    if answer.status != 200 {
        return None;
    }
    serde_json::from_slice(&answer.body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_or_does_not_count() {
        let read = |answer: &[u8]| of_answer(&pods::parse(answer)?);
        let body = r#"{"connections":7,"clients":2,"draining":true}"#;
        let answer =
            |status: &str| format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n\r\n{body}");
        let expected = Load { connections: Some(7), draining: true, clock_error_seconds: None };
        assert_eq!(read(answer("200 OK").as_bytes()), Some(expected));
        assert_eq!(read(answer("404 Not Found").as_bytes()), None);
        assert_eq!(read(b"HTTP/1.1 200 OK\r\n\r\n{\"connections\":null}"), Some(Load::default()));
        let wrong = read(b"HTTP/1.1 200 OK\r\n\r\n{\"connections\":1,\"clockErrorSeconds\":-3600}").unwrap();
        assert_eq!(wrong.clock_error_seconds, Some(-3600));
        for text in
            ["", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n{\"connections\":-1}", "\r\n\r\n{}"]
        {
            assert_eq!(read(text.as_bytes()), None, "{text}");
        }
    }
}
