//! Metrics of the process itself, under the names that client libraries of Prometheus share ("Writing client libraries",
//! section "Process metrics"), and of the build.

use std::fmt;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use crate::metrics::declare;

/// Clock ticks per second in `/proc` (`USER_HZ`), the same on every architecture that Rust's standard library supports.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

/// Declares `process_*` and `fairlead_build_info` in the registry of all metrics.
pub fn register_process(all: &mut Registry) {
    let help = "The version of the program; always 1";
    let build: Family<Build, Gauge> = declare(all.sub_registry_with_prefix("fairlead"), "build_info", help);
    build.get_or_create(&Build { version: env!("CARGO_PKG_VERSION") }).set(1);
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    all.sub_registry_with_prefix("process").register_collector(Box::new(Process { started }));
}

/// Reads `/proc/self` at each scrape. What cannot be read is left out.
#[derive(Debug)]
struct Process {
    /// Seconds since the epoch.
    started: f64,
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        if let Some(seconds) = read("stat").as_deref().and_then(cpu_seconds) {
            let cpu = ConstCounter::new(seconds);
            let help = "CPU time in user and system mode, in seconds.";
            cpu.encode(encoder.encode_descriptor("cpu_seconds", help, None, cpu.metric_type())?)?;
        }
        let status = read("status");
        let of_status = |field| status.as_deref().and_then(|status| kibibytes(status, field));
        let limits = read("limits");
        let descriptors = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64);
        for (name, help, value) in [
            ("max_fds", "Limit of open file descriptors.", limits.as_deref().and_then(max_descriptors)),
            ("open_fds", "Open file descriptors.", descriptors),
            ("resident_memory_bytes", "Resident memory in bytes.", of_status("VmRSS:")),
            (
                "start_time_seconds",
                "When the process started, in seconds since the epoch.",
                Some(self.started),
            ),
            ("virtual_memory_bytes", "Virtual memory in bytes.", of_status("VmSize:")),
        ] {
            let Some(value) = value else { continue };
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

fn read(name: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/self/{name}")).ok()
}

/// `utime` and `stime`, the 14th and 15th field of `/proc/PID/stat` (proc_pid_stat(5)). The second, the program's name, may
/// contain blanks.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let mut fields = behind_name.split_whitespace().skip(11);
    let user = fields.next()?.parse::<f64>().ok()?;
    let system = fields.next()?.parse::<f64>().ok()?;
    Some((user + system) / TICKS_PER_SECOND)
}

/// A size of `/proc/PID/status` (proc_pid_status(5)) in bytes.
fn kibibytes(status: &str, field: &str) -> Option<f64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(rest.trim().strip_suffix(" kB")?.parse::<f64>().ok()? * 1024.0)
}

/// The soft limit in `/proc/PID/limits` (proc_pid_limits(5)).
fn max_descriptors(limits: &str) -> Option<f64> {
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::metrics::{Exposition, text};

    #[test]
    fn a_scrape_has_every_metric_of_this_process() {
        let mut registry = Registry::default();
        register_process(&mut registry);
        // Some processor time, which has a resolution of 10 ms.
        let start = std::time::Instant::now();
        while start.elapsed() < std::time::Duration::from_millis(50) {}
        let text = text(&registry, Exposition::Text);
        let values: BTreeMap<&str, f64> = text
            .lines()
            .filter_map(|line| line.strip_prefix("process_")?.split_once(' '))
            .map(|(name, value)| (name, value.parse().unwrap()))
            .collect();
        let names: Vec<&str> = values.keys().copied().collect();
        let expected = [
            "cpu_seconds_total",
            "max_fds",
            "open_fds",
            "resident_memory_bytes",
            "start_time_seconds",
            "virtual_memory_bytes",
        ];
        assert_eq!(names, expected, "{text}");
        assert!(values.values().all(|value| *value > 0.0), "{text}");
        assert!(values["resident_memory_bytes"] < values["virtual_memory_bytes"], "{text}");
        assert!(text.contains("fairlead_build_info{version=\""), "{text}");
    }

    #[test]
    fn the_name_of_a_program_may_contain_anything() {
        let stat = "1 (a) R 9) S 1 1 1 0 -1 4 0 0 0 0 250 50 0 0 20 0 1 0 100 1 1";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!((cpu_seconds(""), cpu_seconds("1 (a) S 1")), (None, None));
    }
}
