//! iperf3, which makes the traffic and counts what arrives.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::load::Load;

/// Payload of TCP or UDP that arrived at the other end of one transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Arrived {
    pub(crate) bytes: f64,
    pub(crate) bits_per_second: f64,
    /// Share of the datagrams that did not arrive; 0 for TCP.
    pub(crate) lost_percent: f64,
}

/// # Errors
/// It is not installed.
pub(super) fn check_installed() -> Result<()> {
    let status = Command::new("iperf3").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    ensure!(
        status.is_ok_and(|status| status.success()),
        "iperf3 is missing, which makes the traffic: install the Debian package iperf3 (`apt-get install iperf3`)"
    );
    Ok(())
}

/// A server for one transfer that reports when it listens. The next transfer has another one, which cannot be busy.
pub(super) fn server(address: &str) -> Command {
    let mut command = Command::new("iperf3");
    command.args(["--server", "--one-off", "--forceflush", "--bind", address]);
    command
}

/// One transfer to a server; its output is for [`parse`].
pub(super) fn client(address: &str, load: Load, seconds: u8) -> Command {
    let mut command = Command::new("iperf3");
    command.args([
        "--json",
        "--connect-timeout",
        "5000",
        "--client",
        address,
        "--time",
        &seconds.to_string(),
    ]);
    match load {
        Load::Tcp(streams) => command.args(["--parallel", &streams.to_string()]),
        Load::Udp(length) => command.args(["--udp", "--bitrate", "0", "--length", &length.to_string()]),
    };
    command
}

/// Reads the client's output.
///
/// # Errors
/// It is not what iperf3 3.12 writes after a transfer; its own error is passed on.
pub(crate) fn parse(output: &str) -> Result<Arrived> {
    #[derive(Deserialize)]
    struct Output {
        error: Option<String>,
        end: End,
    }
    #[derive(Deserialize)]
    struct End {
        sum_received: Option<Sum>,
    }
    #[derive(Deserialize)]
    struct Sum {
        bytes: f64,
        bits_per_second: f64,
        #[serde(default)]
        lost_percent: f64,
    }
    let output: Output = serde_json::from_str(output)
        .with_context(|| format!("iperf3 wrote something else than its JSON: {output:?}"))?;
    if let Some(error) = output.error {
        anyhow::bail!("iperf3: {error}");
    }
    let Sum { bytes, bits_per_second, lost_percent } =
        output.end.sum_received.context("iperf3 does not say what was received")?;
    Ok(Arrived { bytes, bits_per_second, lost_percent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_received_counts() {
        let output = r#"{"start": {"version": "iperf 3.12"}, "intervals": [], "end": {
            "sum_sent": {"bytes": 130000000, "bits_per_second": 1.04e9, "retransmits": 3},
            "sum_received": {"seconds": 1.0, "bytes": 125000000, "bits_per_second": 1000000000.0, "sender": true}}}"#;
        let arrived = Arrived { bytes: 1.25e8, bits_per_second: 1e9, lost_percent: 0.0 };
        assert_eq!(parse(output).unwrap(), arrived);
    }

    #[test]
    fn datagrams_that_did_not_arrive_do_not_count() {
        let output = r#"{"end": {
            "sum": {"bytes": 240000000, "bits_per_second": 1.92e9, "lost_percent": 60.5, "sender": true},
            "sum_received": {"seconds": 1.0, "bytes": 95000000, "bits_per_second": 7.6e8,
                "lost_packets": 121, "packets": 200, "lost_percent": 60.5, "sender": false}}}"#;
        let arrived = Arrived { bytes: 9.5e7, bits_per_second: 7.6e8, lost_percent: 60.5 };
        assert_eq!(parse(output).unwrap(), arrived);
    }

    #[test]
    fn its_own_error_is_passed_on() {
        let error = parse(r#"{"start": {}, "end": {}, "error": "unable to connect to server"}"#).unwrap_err();
        assert_eq!(error.to_string(), "iperf3: unable to connect to server");
    }

    #[test]
    fn anything_else_is_an_error() {
        for output in
            ["", "iperf3: error", "{}", r#"{"end": {}}"#, r#"{"end": {"sum_received": {"bytes": 1}}}"#]
        {
            assert!(parse(output).is_err(), "{output}");
        }
    }
}
