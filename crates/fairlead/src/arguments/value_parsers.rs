//! Parsers of values that several commands take.

use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;

/// `:9384` is every address, as in Coil's manifests.
pub(crate) fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') { format!("[::]{text}") } else { text.to_owned() };
    full.parse().map_err(|_| format!("{text:?} is not ADDRESS:PORT or :PORT"))
}

/// Go durations (`time.ParseDuration`) such as `1h30m` or `1.5s`, and in addition the unit `d` for days.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
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

/// A time as RFC 3339 has it.
pub(crate) fn at(text: &str) -> Result<Timestamp, String> {
    text.parse().map_err(|_| "a time as in 2026-01-31T12:00:00Z".to_owned())
}
