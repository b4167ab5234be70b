//! One transfer by iperf3, and the CPU time that the whole machine spends meanwhile: forwarding belongs to no process.

use std::fmt;

use anyhow::{Context, Result, ensure};
use fairlead_address::IpFamily;
use serde::Deserialize;

use crate::cpu::busy_seconds;
use crate::tunnel::iperf;

/// Kind of traffic that is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// Over so many connections at once.
    Tcp(u8),
    /// As many datagrams of 1,200 bytes as the sender can make.
    Udp,
}

/// A kind of transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) family: IpFamily,
    pub(crate) load: Load,
}

impl fmt::Display for Flow {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = if self.family == IpFamily::V4 { "IPv4" } else { "IPv6" };
        match self.load {
            Load::Tcp(streams) => write!(out, "TCP over {family}, streams: {streams}"),
            Load::Udp => write!(out, "UDP over {family}, 1,200 bytes"),
        }
    }
}

/// Payload that arrived in one transfer, and the processor time that it cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    pub(crate) bytes: f64,
    pub(crate) bits_per_second: f64,
    pub(crate) cpu_seconds: f64,
}

impl Sample {
    pub(crate) fn gigabits_per_second(&self) -> f64 {
        self.bits_per_second / 1e9
    }

    pub(crate) fn megabytes_per_cpu_second(&self) -> f64 {
        self.bytes / 1e6 / self.cpu_seconds
    }

    pub(crate) fn cpu_seconds_per_gigabyte(&self) -> f64 {
        self.cpu_seconds / (self.bytes / 1e9)
    }
}

/// A shell script that sends to a server for so many seconds; its output is for [`parse`].
pub(crate) fn script(flow: Flow, server: &str, seconds: usize) -> String {
    let load = match flow.load {
        Load::Tcp(streams) => format!("--parallel {streams}"),
        Load::Udp => "--udp --bitrate 0 --length 1200".to_owned(),
    };
    // iperf3 exits with 1 on an error that its JSON tells.
    format!(
        "head -n 1 /proc/stat\n\
         timeout {} iperf3 --json --connect-timeout 5000 --client {server} --time {seconds} {load} || true\n\
         echo\nhead -n 1 /proc/stat",
        seconds.saturating_add(15)
    )
}

/// Reads the output of a [`script`].
///
/// # Errors
/// It is something else, or nothing arrived.
pub(crate) fn parse(output: &str) -> Result<Sample> {
    let output = output.trim();
    let (before, rest) = output.split_once('\n').context("the script printed too little")?;
    let (json, after) = rest.rsplit_once('\n').context("the script printed too little")?;
    let (bytes, bits_per_second) = arrived(json)?;
    ensure!(bytes > 0.0, "nothing arrived");
    let cpu_seconds = busy_seconds(after)? - busy_seconds(before)?;
    ensure!(cpu_seconds > 0.0, "the transfer was too short to measure its CPU time");
    Ok(Sample { bytes, bits_per_second, cpu_seconds })
}

fn arrived(json: &str) -> Result<(f64, f64)> {
    #[derive(Deserialize)]
    struct Output {
        end: End,
    }
    #[derive(Deserialize)]
    struct End {
        /// Only of UDP: of what was sent, so much is lost.
        sum: Option<Sum>,
    }
    #[derive(Deserialize)]
    struct Sum {
        bytes: f64,
        bits_per_second: f64,
        lost_percent: Option<f64>,
    }
    let datagrams = serde_json::from_str::<Output>(json).ok().and_then(|output| output.end.sum);
    if let Some(Sum { bytes, bits_per_second, lost_percent: Some(lost) }) = datagrams {
        let share = 1.0 - lost / 100.0;
        return Ok((bytes * share, bits_per_second * share));
    }
    let arrived = iperf::parse(json)?;
    Ok((arrived.bytes, arrived.bits_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "cpu  100 0 200 5000 7 0 50 9 0 0";
    const AFTER: &str = "cpu  150 0 250 9000 8 0 150 9 0 0";

    fn parsed(json: &str) -> Result<Sample> {
        parse(&format!("{BEFORE}\n{json}\n\n{AFTER}\n"))
    }

    #[test]
    fn what_arrived_is_divided_by_the_time_of_all_processors() {
        let json = "{\"end\": {\"sum_received\": {\n\"bytes\": 4e8, \"bits_per_second\": 3.2e9}}}";
        let sample = parsed(json).unwrap();
        assert_eq!(sample, Sample { bytes: 4e8, bits_per_second: 3.2e9, cpu_seconds: 2.0 });
        assert_eq!((sample.gigabits_per_second(), sample.megabytes_per_cpu_second()), (3.2, 200.0));
        assert!((sample.cpu_seconds_per_gigabyte() - 5.0).abs() < 1e-9);
    }

    #[test]
    fn lost_datagrams_do_not_count() {
        let json = r#"{"end": {"sum": {"bytes": 4e8, "bits_per_second": 3.2e9, "lost_percent": 25}}}"#;
        assert_eq!(parsed(json).unwrap(), Sample { bytes: 3e8, bits_per_second: 2.4e9, cpu_seconds: 2.0 });
    }

    #[test]
    fn failures_are_errors() {
        let busy = r#"{"end": {}, "error": "the server is busy running a test. try again later"}"#;
        assert!(parsed(busy).unwrap_err().to_string().contains("busy"));
        for json in ["", "{}", r#"{"end": {"sum": {"bytes": 0, "bits_per_second": 0, "lost_percent": 0}}}"#] {
            assert!(parsed(json).is_err(), "{json}");
        }
        assert!(parse("").is_err() && parse("cpu 1\n{}\ncpu 2").is_err());
    }
}
