//! CPU time of the machine, and CPU time and memory of processes, as the kernel counts them.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail};

/// `USER_HZ` (`asm-generic/param.h`): the unit of times in `/proc`, the same on every architecture we support.
const TICKS_PER_SECOND: f64 = 100.0;
/// Positions of `utime` and `stime` behind the command's name in `/proc/PID/stat` (proc_pid_stat(5): 14 and 15, of
/// which the first two are the process id and the name).
const TIMES: std::ops::Range<usize> = 11..13;

/// Seconds that all processors of the machine have worked so far: forwarding belongs to no process.
///
/// # Errors
/// `/proc` cannot be read.
pub(crate) fn machine_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    busy_seconds(text.lines().next().unwrap_or_default())
}

/// All times of the first line of `/proc/stat` (proc(5)) but idle, I/O wait and what other machines took, in seconds.
///
/// # Errors
/// The text is another line.
pub(crate) fn busy_seconds(line: &str) -> Result<f64> {
    let times = line.split_ascii_whitespace().skip(1).map(|time| time.parse::<u32>().map(f64::from));
    let times: Vec<f64> =
        times.collect::<Result<_, _>>().with_context(|| format!("no CPU times: {line:?}"))?;
    let [user, nice, system, _, _, irq, softirq, ..] = times.as_slice() else {
        bail!("too few CPU times: {line:?}");
    };
    Ok((user + nice + system + irq + softirq) / TICKS_PER_SECOND)
}

/// Seconds that a process and all its threads have spent so far, in user space and in the kernel.
///
/// # Errors
/// The process is gone.
pub(crate) fn seconds_of(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}: has it ended?"))?;
    parse(&text).with_context(|| format!("no CPU times in {path}: {text:?}"))
}

/// MiB of memory that a process has (`VmRSS`, proc_pid_status(5)).
///
/// # Errors
/// The process is gone.
pub(crate) fn resident_mib(process: u32) -> Result<f64> {
    mib_of(process, "VmRSS:")
}

/// MiB of memory that a process had at most (`VmHWM`, proc_pid_status(5)).
///
/// # Errors
/// The process is gone.
pub(crate) fn peak_mib(process: u32) -> Result<f64> {
    mib_of(process, "VmHWM:")
}

fn mib_of(process: u32, field: &str) -> Result<f64> {
    let path = format!("/proc/{process}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib: Option<f64> = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    Ok(kib.with_context(|| format!("no {field} in {path}"))? / 1024.0)
}

/// The processes with one of these names that this one has started, directly or not.
///
/// # Errors
/// `/proc` cannot be read.
pub(crate) fn descendants(names: &[&str]) -> Result<Vec<u32>> {
    let mut processes = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("cannot list processes")? {
        let Some(id) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // One that has ended meanwhile is none.
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        if let Some((name, parent)) = name_and_parent(&stat) {
            processes.insert(id, (name.to_owned(), parent));
        }
    }
    let parent = |id: &u32| processes.get(id).map(|(_, parent)| *parent);
    let is_ours =
        |id: u32| std::iter::successors(parent(&id), parent).any(|ancestor| ancestor == std::process::id());
    let named = processes.iter().filter(|(_, (name, _))| names.contains(&name.as_str()));
    Ok(named.map(|(id, _)| *id).filter(|id| is_ours(*id)).collect())
}

/// Fields 2 and 4 of proc_pid_stat(5).
fn name_and_parent(stat: &str) -> Option<(&str, u32)> {
    let (name, fields) = stat.rsplit_once(") ")?;
    Some((name.split_once('(')?.1, fields.split_ascii_whitespace().nth(1)?.parse().ok()?))
}

fn parse(stat: &str) -> Option<f64> {
    // The name is in brackets and may hold anything, brackets too.
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    let ticks = fields.get(TIMES)?.iter().map(|field| field.parse::<u32>().ok());
    let sum: f64 = ticks.map(|ticks| ticks.map(f64::from)).sum::<Option<f64>>()?;
    Some(sum / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_system_time_are_added_whatever_the_name() {
        let rest = "S 1 7 7 0 -1 4194304 100 0 0 0 250 125 9999 9999 20 0 5 0 300 1000 200";
        assert_eq!(parse(&format!("42 (fairlead-bench) {rest}")), Some(3.75));
        assert_eq!(parse(&format!("42 (a) b) (c 1 2) {rest}")), Some(3.75));
    }

    #[test]
    fn what_is_no_stat_has_no_times() {
        for text in ["", "42 (x", "42 (x) S 1 2", "42 (x) S 1 7 7 0 -1 4194304 100 0 0 0 two 1 2"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_process_has_a_name_and_a_parent() {
        assert_eq!(name_and_parent("42 (a) b) (c) S 7 7 7"), Some(("a) b) (c", 7)));
        assert_eq!((name_and_parent(""), name_and_parent("42 (x) S")), (None, None));
        assert!(descendants(&["no such program"]).unwrap().is_empty());
    }

    #[test]
    fn this_process_and_the_machine_have_times() {
        assert!(seconds_of(std::process::id()).unwrap() >= 0.0);
        assert!(machine_seconds().unwrap() > 0.0);
    }
}
