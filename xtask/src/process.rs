//! Runs one program in a process group of its own, with a time limit.

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
/// How long output may go on after its group was killed.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the outcome of a program is unknown.
#[derive(Debug)]
pub(crate) enum Error {
    /// It was killed, with its group.
    Hung(Duration),
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
            Self::Hung(limit) => {
                write!(
                    formatter,
                    "hung: it was killed after {:.1} s; its output is above",
                    limit.as_secs_f64()
                )
            }
            Self::Io(error) => write!(formatter, "cannot be run: {error}"),
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

/// Runs the command, hands over each line of its standard output, and says whether it succeeded. Nothing of its process
/// group is left afterwards.
pub(crate) fn run(
    command: &mut Command,
    limit: Duration,
    mut each_line: impl FnMut(&str),
) -> Result<bool, Error> {
    let deadline = Instant::now() + limit;
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
    let lines = lines_of(&mut child);
    let mut in_time = true;
    while in_time && !has_ended(&child)? {
        in_time = Instant::now() < deadline;
        match lines.recv_timeout(POLL_INTERVAL) {
            Ok(line) => each_line(&line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL_INTERVAL),
        }
    }
    // The child was not waited for yet, so its id, which is the group's, belongs to no other process.
    let _ = killpg(id(&child), Signal::SIGKILL);
    let status = child.wait()?;
    let deadline = Instant::now() + OUTPUT_TIMEOUT;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => each_line(&line),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => return Err(Error::OutputHeld),
        }
    }
    if in_time { Ok(status.success()) } else { Err(Error::Hung(limit)) }
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
mod unit {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = dies_with_us(Path::new("/bin/sh"));
        command.args(["-c", script]);
        command
    }

    /// What it came to, and what it wrote.
    fn run_script(script: &str, limit: Duration) -> (Result<bool, Error>, Vec<String>) {
        let mut lines = Vec::new();
        let outcome = run(&mut shell(script), limit, |line| lines.push(line.to_owned()));
        (outcome, lines)
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
        assert!(matches!(outcome, Ok(false)), "{outcome:?}");
        assert_eq!(lines, ["one", "\u{fffd}two", "", "last"]);
        assert!(matches!(run_script("true", LONG).0, Ok(true)));
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_its_children_and_its_output_is_kept() {
        let (outcome, lines) = run_script("echo working; sleep 1000 & echo $!; wait", Duration::from_secs(2));
        assert!(matches!(outcome, Err(Error::Hung(_))), "{outcome:?}");
        assert_eq!(lines[0], "working");
        assert_dies(&lines[1]);
    }

    #[test]
    fn endless_output_does_not_stretch_the_limit() {
        let (outcome, lines) = run_script("yes", Duration::from_secs(1));
        assert!(matches!(outcome, Err(Error::Hung(_))), "{outcome:?}");
        assert!(!lines.is_empty());
    }

    #[test]
    fn children_do_not_outlive_a_program_that_ended() {
        let (outcome, lines) = run_script("sleep 1000 & echo $!", LONG);
        assert!(matches!(outcome, Ok(true)), "{outcome:?}");
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
    fn a_program_that_does_not_exist_fails() {
        let mut command = Command::new("/nonexistent/program");
        assert!(matches!(run(&mut command, LONG, |_| {}), Err(Error::Io(_))));
    }
}
