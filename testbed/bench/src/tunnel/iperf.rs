//! iperf3, which makes the traffic and counts what arrives.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Seconds of one transfer.
const SECONDS: &str = "1";

/// What arrived at the other end of one transfer: payload of TCP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Arrived {
    pub(crate) bytes: f64,
    pub(crate) bits_per_second: f64,
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

/// A server for any number of transfers that reports when it listens.
pub(super) fn server(address: &str) -> Command {
    let mut command = Command::new("iperf3");
    command.args(["--server", "--forceflush", "--bind", address]);
    command
}

/// One transfer to a server; its output is for [`parse`].
pub(super) fn client(address: &str, streams: u8) -> Command {
    let mut command = Command::new("iperf3");
    command.args(["--json", "--client", address, "--time", SECONDS, "--parallel", &streams.to_string()]);
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
    }
    let output: Output = serde_json::from_str(output)
        .with_context(|| format!("iperf3 wrote something else than its JSON: {output:?}"))?;
    if let Some(error) = output.error {
        anyhow::bail!("iperf3: {error}");
    }
    let Sum { bytes, bits_per_second } =
        output.end.sum_received.context("iperf3 does not say what was received")?;
    Ok(Arrived { bytes, bits_per_second })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_received_counts() {
        let output = r#"{"start": {"version": "iperf 3.12"}, "intervals": [], "end": {
            "sum_sent": {"bytes": 130000000, "bits_per_second": 1.04e9, "retransmits": 3},
            "sum_received": {"seconds": 1.0, "bytes": 125000000, "bits_per_second": 1000000000.0, "sender": true}}}"#;
        assert_eq!(parse(output).unwrap(), Arrived { bytes: 1.25e8, bits_per_second: 1e9 });
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
