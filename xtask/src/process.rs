//! Runs one program in a process group of its own, under the eyes of its caller.

use std::fmt;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time for which output may go on after its group was killed.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason why the outcome of a program is unknown.
#[derive(Debug)]
pub(crate) enum Error {
    /// The caller gave it up: it was killed, with its group.
    Killed,
    Io(io::Error),
    /// A process that left its group still has its output open.
    OutputHeld,
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(formatter, "cannot be run: {error}"),
            Self::Killed => write!(formatter, "was killed; its output is above"),
            Self::OutputHeld => {
                write!(formatter, "has ended, but a process that it started still holds its output")
            }
        }
    }
}

/// The command of a program that the kernel kills when we die. A process group of its own does not get the terminal's
/// signals.
pub(crate) fn dies_with_us(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// End of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Whether it exited with 0.
    pub(crate) success: bool,
    /// Processor time of the program and of those of its descendants that were waited for.
    pub(crate) cpu: Duration,
}

/// Runs the command and hands over each line of its standard output. `watch` is also called without a line, many times a
/// second, and ends the program by returning false. Nothing of its process group is left afterwards.
pub(crate) fn run(
    command: &mut Command,
    mut watch: impl FnMut(Option<&str>) -> bool,
) -> Result<Ended, Error> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
    let lines = lines_of(&mut child);
    let mut go_on = true;
    while go_on && !has_ended(&child)? {
        match lines.recv_timeout(POLL_INTERVAL) {
            Ok(line) => drop(watch(Some(&line))),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL_INTERVAL),
        }
        go_on = watch(None);
    }
    // The child was not waited for yet, so its id, which is the group's, belongs to no other process.
    let cpu = processor_time(&child);
    let _ = killpg(id(&child), Signal::SIGKILL);
    let status = child.wait()?;
    let deadline = Instant::now() + OUTPUT_TIMEOUT;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => drop(watch(Some(&line))),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => return Err(Error::OutputHeld),
        }
    }
    if go_on { Ok(Ended { success: status.success(), cpu }) } else { Err(Error::Killed) }
}

/// `utime`, `stime`, `cutime` and `cstime` of proc_pid_stat(5); zero if they cannot be read. Linux shows all processes the
/// same `USER_HZ`, 100.
fn processor_time(child: &Child) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // The name, in parentheses, may have spaces; the state after it is field 3, utime field 14.
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ')).into_iter().flatten();
    let ticks: u64 = fields.skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks.saturating_mul(10))
}

/// Processor time that all programs of the machine have used since it started; zero if it cannot be read.
pub(crate) fn machine_time() -> Duration {
    busy(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// `user`, `nice`, `system`, `irq` and `softirq` of all processors in proc_stat(5), whose unit is that of [`processor_time`].
fn busy(stat: &str) -> Duration {
    let fields = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    // Of the fields, idle and iowait are the fourth and fifth; the steal of a hypervisor and later ones are no time of programs here.
    let of_programs = |number: usize| matches!(number, 0..=2 | 5..=6);
    let fields = fields.split_ascii_whitespace().enumerate().filter(|(number, _)| of_programs(*number));
    let ticks: u64 = fields.filter_map(|(_, field)| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks.saturating_mul(10))
}

/// The lines of its output, which end when all who have it open are gone.
fn lines_of(child: &mut Child) -> Receiver<String> {
    let (sender, receiver) = channel();
    if let Some(output) = child.stdout.take() {
        thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut line = Vec::new();
            // Bytes that are no UTF-8 must not end the reading.
            while output.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned();
                line.clear();
                if sender.send(text).is_err() {
                    return;
                }
            }
        });
    }
    receiver
}

/// Whether it has ended; it stays a zombie.
fn has_ended(child: &Child) -> io::Result<bool> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    Ok(waitid(Id::Pid(id(child)), flags)? != WaitStatus::StillAlive)
}

fn id(child: &Child) -> Pid {
    // The kernel's process ids fit in 22 bits.
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = dies_with_us(Path::new("/bin/sh"));
        command.args(["-c", script]);
        command
    }

    /// End of a script within a limit, and its output.
    fn run_script(script: &str, limit: Duration) -> (Result<Ended, Error>, Vec<String>) {
        let mut lines = Vec::new();
        let deadline = Instant::now() + limit;
        let outcome = run(&mut shell(script), |line| {
            lines.extend(line.map(str::to_owned));
            Instant::now() < deadline
        });
        (outcome, lines)
    }

    fn ends_with(outcome: &Result<Ended, Error>, success: bool) -> bool {
        outcome.as_ref().is_ok_and(|ended| ended.success == success)
    }

    /// Waits for the end of a process that was killed; what init has not waited for yet is dead as well.
    fn assert_dies(process: &str) {
        let stat = || std::fs::read_to_string(format!("/proc/{process}/stat"));
        let deadline = Instant::now() + LONG;
        while stat().is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(Instant::now() < deadline, "process {process} is still there");
            thread::sleep(POLL_INTERVAL);
        }
    }

    #[test]
    fn output_comes_line_by_line_up_to_the_last_one() {
        let (outcome, lines) = run_script(r"printf 'one\n\377two\n\nlast'; exit 3", LONG);
        assert!(ends_with(&outcome, false), "{outcome:?}");
        assert_eq!(lines, ["one", "\u{fffd}two", "", "last"]);
        assert!(ends_with(&run_script("true", LONG).0, true));
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_its_children_and_its_output_is_kept() {
        let (outcome, lines) = run_script("echo working; sleep 1000 & echo $!; wait", Duration::from_secs(2));
        assert!(matches!(outcome, Err(Error::Killed)), "{outcome:?}");
        assert_eq!(lines[0], "working");
        assert_dies(&lines[1]);
    }

    #[test]
    fn endless_output_does_not_stretch_the_limit() {
        let (outcome, lines) = run_script("yes", Duration::from_secs(1));
        assert!(matches!(outcome, Err(Error::Killed)), "{outcome:?}");
        assert!(!lines.is_empty());
    }

    #[test]
    fn children_do_not_outlive_a_program_that_ended() {
        let (outcome, lines) = run_script("sleep 1000 & echo $!", LONG);
        assert!(ends_with(&outcome, true), "{outcome:?}");
        assert_dies(&lines[0]);
    }

    #[test]
    fn output_that_a_process_outside_the_group_holds_is_an_error() {
        let escape = r#"trap 'exit 0' USR1
            setsid sh -c 'echo $$; kill -USR1 $0; exec sleep 1000' $$ &
            while :; do sleep 0.1; done"#;
        let (outcome, lines) = run_script(escape, LONG);
        assert!(matches!(outcome, Err(Error::OutputHeld)), "{outcome:?}");
        let escaped = Pid::from_raw(lines[0].parse().unwrap());
        nix::sys::signal::kill(escaped, Signal::SIGKILL).unwrap();
    }

    #[test]
    fn the_processor_time_of_children_counts() {
        let (outcome, _) = run_script("sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'", LONG);
        assert!(outcome.as_ref().is_ok_and(|ended| ended.cpu > Duration::from_millis(50)), "{outcome:?}");
    }

    #[test]
    fn the_time_of_the_machine_is_that_of_all_processors_without_waiting() {
        let stat = "cpu  100 20 30 90000 8000 4 5 700 60 0\ncpu0 50 10 15 45000 4000 2 2 350 30 0\n";
        assert_eq!(busy(stat), Duration::from_millis(1590));
        assert_eq!(busy(""), Duration::ZERO);
        assert!(machine_time() > Duration::ZERO);
    }

    #[test]
    fn a_program_that_does_not_exist_fails() {
        let mut command = Command::new("/nonexistent/program");
        assert!(matches!(run(&mut command, |_| true), Err(Error::Io(_))));
    }
}
