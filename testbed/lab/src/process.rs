//! A program running in a host of the lab.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// Interval at which a waiting caller looks again.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A running program. Dropping it kills it with its children; those of a program that had already ended go with the lab.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    waited: bool,
    output: PathBuf,
}

impl Process {
    /// Starts `command` in a process group of its own, with both outputs in the file `output` (emptied first).
    pub(crate) fn start(host: &str, command: &mut Command, output: &Path) -> Result<Self> {
        let name = format!("{} in {host}", command.get_program().to_string_lossy());
        let file = File::create(output)
            .with_context(|| format!("cannot create {} for the output of {name}", output.display()))?;
        let errors = file.try_clone().with_context(|| format!("cannot share {}", output.display()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        // The command keeps its own copies of the files otherwise.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { name, child, waited: false, output: output.to_owned() })
    }

    /// Process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The file that receives standard output and standard error.
    pub fn output_path(&self) -> &Path {
        &self.output
    }

    /// Output that the process has written so far.
    ///
    /// # Errors
    /// The file has been removed.
    pub fn output(&self) -> Result<String> {
        let bytes =
            fs::read(&self.output).with_context(|| format!("cannot read the output of {}", self.name))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Exit status of the process; `None` while it runs.
    ///
    /// # Errors
    /// The kernel cannot say.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        let status =
            self.child.try_wait().with_context(|| format!("cannot ask for the state of {}", self.name))?;
        self.waited |= status.is_some();
        Ok(status)
    }

    /// Waits until its output contains `text`.
    ///
    /// # Errors
    /// It ended or `timeout` ran out before; the error holds the output.
    pub fn wait_for_output(&mut self, text: &str, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let ended = self.status()?;
            let output = self.output()?;
            if output.contains(text) {
                return Ok(());
            }
            if let Some(status) = ended {
                bail!("{} ended ({status}) before it wrote {text:?}; its output:\n{output}", self.name);
            }
            if start.elapsed() > timeout {
                bail!("{} did not write {text:?} within {timeout:?}; its output:\n{output}", self.name);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// `timeout` ran out.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.status()? {
                return Ok(status);
            }
            if start.elapsed() > timeout {
                bail!("{} still runs after {timeout:?}", self.name);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends a signal to the program itself, not to its children.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.status()? {
            bail!("cannot send {signal} to {}: it has ended ({status})", self.name);
        }
        kill(self.pid(), signal).with_context(|| format!("cannot send {signal} to {}", self.name))
    }

    /// Asks it to end (SIGTERM), and kills it and its children when `timeout` runs out.
    ///
    /// # Errors
    /// The kernel does not let us wait for it.
    pub fn stop(mut self, timeout: Duration) -> Result<ExitStatus> {
        if self.status()?.is_none() {
            let _ = kill(self.pid(), Signal::SIGTERM);
        }
        if let Ok(status) = self.wait(timeout) {
            return Ok(status);
        }
        self.kill_group();
        self.child.wait().with_context(|| format!("cannot wait for {}", self.name))
    }

    fn pid(&self) -> Pid {
        // The kernel's process ids fit in 22 bits.
        Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(i32::MAX))
    }

    /// Only while the leader has not been waited for: until then its id, and so the group's, cannot be given away.
    fn kill_group(&mut self) {
        if !self.waited {
            let _ = killpg(self.pid(), Signal::SIGKILL);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_group();
        let _ = self.child.wait();
    }
}
