//! Queries of `/connections` of a gateway: who used an address and port outside.

use std::net::IpAddr;

use jiff::Timestamp;
use percent_encoding::percent_decode_str;

/// Longest query in bytes.
const MAX_QUERY: usize = 500;

/// An address and port outside, and a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// The source that was seen outside.
    pub outside: (IpAddr, u16),
    /// Time of use, in milliseconds since 1970; `None` if the query has none.
    pub at: Option<i64>,
}

/// Reads `address=ADDRESS&port=PORT`, and `at=TIME` (RFC 3339).
///
/// # Errors
/// Reason why it is no such query, in words.
pub fn parse(text: &str) -> Result<Query, String> {
    if text.len() > MAX_QUERY {
        return Err("the query is too long".to_owned());
    }
    let (mut address, mut port, mut at) = (None, None, None);
    for part in text.split('&').filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let value = percent_decode_str(value).decode_utf8().map_err(|_| format!("{name} is not UTF-8"))?;
        let invalid = |what: &str| format!("{name} is no {what}: '{value}'");
        match name {
            "address" => address = Some(value.parse::<IpAddr>().map_err(|_| invalid("IP address"))?),
            "port" => port = Some(value.parse::<u16>().map_err(|_| invalid("port"))?),
            "at" => {
                let time: Timestamp =
                    value.parse().map_err(|_| invalid("time as in 2026-01-31T12:00:00Z"))?;
                at = Some(time.as_millisecond());
            }
            _ => {
                return Err(format!("there is no parameter {name}; give address, port and, if you like, at"));
            }
        }
    }
    let outside = address.zip(port).ok_or("give address=ADDRESS and port=PORT")?;
    Ok(Query { outside: (outside.0.to_canonical(), outside.1), at })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_query_has_an_address_and_a_port_and_may_have_a_time() {
        let query = parse("address=192.0.2.1&port=40000").unwrap();
        assert_eq!(query, Query { outside: ([192, 0, 2, 1].into(), 40_000), at: None });
        let query = parse("port=1&at=1970-01-01T00%3A00%3A02Z&address=2001%3Adb8%3A%3A1").unwrap();
        assert_eq!((query.at, query.outside.0.is_ipv6()), (Some(2_000), true));
        for (text, part) in [
            ("", "give address"),
            ("address=192.0.2.1", "give address"),
            ("address=x&port=1", "address is no IP address: 'x'"),
            ("address=192.0.2.1&port=70000", "port is no port"),
            ("address=192.0.2.1&port=1&at=noon", "at is no time"),
            ("address=192.0.2.1&port=1&from=2", "no parameter from"),
        ] {
            assert!(parse(text).unwrap_err().contains(part), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_query_or_refused(text in ".{0,200}") {
            let _ = parse(&text);
        }
    }
}
