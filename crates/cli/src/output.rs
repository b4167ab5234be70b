//! Formatting shared by the commands that print tables.

use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use clap::ValueEnum;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use jiff::Timestamp;
use serde_json::Value;

/// Format of an answer: a table (the default), a table with more columns, or data for scripts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[expect(missing_docs, reason = "clap would print them as the help of each value")]
pub enum Output {
    #[default]
    Table,
    Wide,
    Json,
    Yaml,
}

/// Renders data in the format that was asked for; `table` is told whether it is to be wide.
///
/// # Errors
/// The data cannot be written as YAML.
pub fn render(
    output: Output,
    data: impl FnOnce() -> Value,
    table: impl FnOnce(bool) -> String,
) -> anyhow::Result<String> {
    Ok(match output {
        Output::Json => format!("{:#}\n", data()),
        Output::Table => table(false),
        Output::Wide => table(true),
        Output::Yaml => serde_saphyr::to_string(&data()).context("cannot write YAML")?,
    })
}

/// Unix time of now in seconds.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Time given as Unix time in seconds, as RFC 3339 has it; milliseconds count.
pub fn time(seconds: f64) -> String {
    let at = Timestamp::from_millisecond((seconds * 1000.0).round() as i64);
    at.map_or_else(|_| "<invalid>".to_owned(), |at| format!("{at:.3}"))
}

/// Round-trip time given in seconds, in milliseconds.
pub fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1000.0)
}

/// Table without borders, as kubectl prints them.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header);
    table
}

/// Age given in seconds, as kubectl prints it (apimachinery, `duration.HumanDuration`): two units while the second one matters.
pub fn age(seconds: i64) -> String {
    let (minutes, hours) = (seconds / 60, seconds / 3_600);
    let (days, years) = (hours / 24, hours / 24 / 365);
    let two = |large: i64, unit: char, small: i64, small_unit: char| match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit}{small}{small_unit}"),
    };
    match seconds {
        ..-1 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        _ if minutes < 2 => format!("{seconds}s"),
        _ if minutes < 10 => two(minutes, 'm', seconds % 60, 's'),
        _ if hours < 3 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, 'h', minutes % 60, 'm'),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 8 => two(days, 'd', hours % 24, 'h'),
        _ if years < 2 => format!("{days}d"),
        _ if years < 8 => two(years, 'y', days % 365, 'd'),
        _ => format!("{years}y"),
    }
}

/// Text, or a dash for an empty one, so that every column has a word.
pub fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// Byte count with a binary unit: `1.5 MiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

/// Prints an answer to stdout.
pub fn print(text: &str) {
    // A closed pipe (`| head`) is not a failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Prints why the program failed to stderr.
pub fn error(message: &str) {
    // A closed stderr leaves no place to report to.
    let _ = writeln!(std::io::stderr(), "error: {message}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_have_binary_units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    fn times_have_milliseconds() {
        assert_eq!(time(1_060.5), "1970-01-01T00:17:40.500Z");
        assert_eq!(time(f64::MAX), "<invalid>");
    }

    #[test]
    fn every_format_has_the_same_data() {
        let data = || serde_json::json!({ "node": "a", "peers": [1, 2] });
        let render = |output| super::render(output, data, |wide| format!("wide: {wide}")).unwrap();
        assert_eq!(
            (render(Output::Table).as_str(), render(Output::Wide).as_str()),
            ("wide: false", "wide: true")
        );
        let json: Value = serde_json::from_str(&render(Output::Json)).unwrap();
        let yaml: Value = serde_saphyr::from_str(&render(Output::Yaml)).unwrap();
        assert_eq!((&json, &yaml), (&data(), &data()));
    }

    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;

    /// The boundaries of apimachinery's own test (`TestHumanDurationBoundaries`), in whole seconds.
    #[test]
    fn ages_are_formatted_as_by_kubectl() {
        for (seconds, text) in [
            (-2, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (70, "70s"),
            (2 * MINUTE - 1, "119s"),
            (2 * MINUTE, "2m"),
            (2 * MINUTE + 1, "2m1s"),
            (2 * MINUTE + 30, "2m30s"),
            (10 * MINUTE - 1, "9m59s"),
            (10 * MINUTE + 1, "10m"),
            (120 * MINUTE, "120m"),
            (3 * HOUR - 1, "179m"),
            (3 * HOUR, "3h"),
            (3 * HOUR + 5 * MINUTE, "3h5m"),
            (8 * HOUR - 1, "7h59m"),
            (8 * HOUR + 59 * MINUTE, "8h"),
            (2 * DAY - 1, "47h"),
            (2 * DAY, "2d"),
            (2 * DAY + 4 * HOUR, "2d4h"),
            (8 * DAY - 1, "7d23h"),
            (8 * DAY + 23 * HOUR, "8d"),
            (2 * YEAR - 1, "729d"),
            (2 * YEAR + 23 * HOUR, "2y"),
            (2 * YEAR + DAY, "2y1d"),
            (8 * YEAR - 1, "7y364d"),
            (8 * YEAR + 364 * DAY, "8y"),
        ] {
            assert_eq!(age(seconds), text, "{seconds} s");
        }
    }
}
