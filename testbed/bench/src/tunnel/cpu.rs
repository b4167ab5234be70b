//! CPU time of a process, as the kernel counts it.

use std::fs;

use anyhow::{Context, Result};

/// `USER_HZ` (`asm-generic/param.h`): the unit of times in `/proc`, the same on every architecture we support.
const TICKS_PER_SECOND: f64 = 100.0;
/// Positions of `utime` and `stime` behind the command's name in `/proc/PID/stat` (proc_pid_stat(5): 14 and 15, of
/// which the first two are the process id and the name).
const TIMES: std::ops::Range<usize> = 11..13;

/// Seconds that a process and all its threads have spent so far, in user space and in the kernel.
///
/// # Errors
/// The process is gone.
pub(super) fn seconds_of(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}: has it ended?"))?;
    parse(&text).with_context(|| format!("no CPU times in {path}: {text:?}"))
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
    fn this_process_has_times() {
        assert!(seconds_of(std::process::id()).unwrap() >= 0.0);
    }
}
