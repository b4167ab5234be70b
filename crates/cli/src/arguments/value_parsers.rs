//! Parsers of values that several commands take.

use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;

/// Parses an address to listen on; `:9384` is every address, as in Coil's manifests.
///
/// # Errors
/// The text is neither `ADDRESS:PORT` nor `:PORT`.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') { format!("[::]{text}") } else { text.to_owned() };
    full.parse().map_err(|_| format!("{text:?} is not ADDRESS:PORT or :PORT"))
}

/// Parses a duration as Go does (`time.ParseDuration`), such as `1h30m` or `1.5s`, and in addition the unit `d` for days.
///
/// # Errors
/// The text is no duration, or one of zero.
pub fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration such as 300ms, 45s, 5m, 1h30m or 90d");
    let mut seconds = 0.0_f64;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(invalid)?;
        let (number, tail) = rest.split_at_checked(end).ok_or_else(invalid)?;
        let units = [
            ("ns", 1e-9),
            ("us", 1e-6),
            ("ms", 1e-3),
            ("s", 1.0),
            ("m", 60.0),
            ("h", 3600.0),
            ("d", 86_400.0),
        ];
        let unit = units.into_iter().find_map(|(name, size)| Some((tail.strip_prefix(name)?, size)));
        let (tail, size) = unit.ok_or_else(invalid)?;
        seconds += number.parse::<f64>().map_err(|_| invalid())? * size;
        rest = tail;
    }
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(invalid()),
    }
}

/// Parses a time as RFC 3339 has it.
///
/// # Errors
/// The text is none.
pub fn at(text: &str) -> Result<Timestamp, String> {
    text.parse().map_err(|_| "a time as in 2026-01-31T12:00:00Z".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_a_host_listen_on_all() {
        assert_eq!(listen_address(":9384").unwrap().to_string(), "[::]:9384");
        assert_eq!(listen_address("127.0.0.1:1").unwrap().to_string(), "127.0.0.1:1");
        assert!(listen_address("9384").is_err());
    }

    #[test]
    fn durations_are_parsed_as_go_parses_them() {
        for (text, milliseconds) in
            [("300ms", 300), ("45s", 45_000), ("1h30m", 5_400_000), ("1.5s", 1_500), ("90d", 7_776_000_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for invalid in ["", "5", "m", "0s", "-5m", "5m3", "1w", "5 m", "1e400h", "..s"] {
            assert!(duration(invalid).is_err(), "{invalid}");
        }
    }
}
