//! One host with the node program on it.

use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use serde_json::Value;
pub use testbed_lab::executable;
use testbed_lab::{Host, Process};

use crate::cni::Plugin;

/// Environment variables of glibc's allocator, as in `deploy/`.
pub(crate) const ALLOCATOR: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "2"), ("MALLOC_MMAP_THRESHOLD_", "131072"), ("MALLOC_TRIM_THRESHOLD_", "131072")];

/// A node of the world.
#[derive(Debug)]
pub struct Node {
    /// Name of its Node object.
    pub name: String,
    /// Name of its site.
    pub site: String,
    /// The machine.
    pub host: Host,
    /// Directory of the node: socket, key, log, kubeconfig.
    pub directory: PathBuf,
    /// More arguments of the node program.
    pub arguments: Vec<String>,
    /// More environment variables of the node program, from its next start on.
    pub environment: Vec<(&'static str, String)>,
    /// Time by which the clock of the node program is ahead from its next start on (`faketime -f`, such as `+1h`).
    pub clock_ahead: Option<&'static str>,
    /// Whether [`Node::set_clock`] sets the clock of the node program while it runs, from its next start on.
    pub has_own_clock: bool,
    /// Whether the machine has no IPv4.
    pub is_ipv6_only: bool,
    program: Option<Process>,
    starts: u32,
}

impl Node {
    /// A node that runs nothing yet.
    pub fn new(name: &str, site: &str, host: Host, directory: PathBuf) -> Self {
        Self {
            name: name.to_owned(),
            site: site.to_owned(),
            host,
            directory,
            arguments: Vec::new(),
            environment: Vec::new(),
            clock_ahead: None,
            has_own_clock: false,
            is_ipv6_only: false,
            program: None,
            starts: 0,
        }
    }

    /// Addresses of the machine, IPv4 first.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let ipv4 = (!self.is_ipv6_only).then(|| IpAddr::from(self.host.address()));
        ipv4.into_iter().chain(self.host.address6().map(IpAddr::from)).collect()
    }

    /// The address others on the Internet see.
    pub fn public_address(&self) -> Ipv4Addr {
        self.host.public_address()
    }

    /// Socket of the node program.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("coild.sock")
    }

    /// Kubeconfig of the node's ServiceAccount.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    /// Log of the latest start of the node program.
    pub fn log(&self) -> PathBuf {
        self.directory.join(format!("node-{}.log", self.starts))
    }

    /// CNI plugin of this node.
    ///
    /// # Errors
    /// The plugin is not built.
    pub fn plugin(&self) -> anyhow::Result<Plugin> {
        Ok(Plugin { executable: executable("fairlead-cni")?, socket: self.socket(), host: self.host.clone() })
    }

    /// Starts the node program.
    ///
    /// # Errors
    /// It is not built or cannot be run.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.starts += 1;
        let mut command = self.host.command(executable("fairlead")?)?;
        command
            .args(["node", "--node-name", &self.name, "--socket"])
            .arg(self.socket())
            .arg("--state-dir")
            .arg(self.directory.join("state"))
            .args(&self.arguments)
            .envs(ALLOCATOR)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env("KUBECONFIG", self.kubeconfig())
            .env(
                "FAIRLEAD_LOG_LEVEL",
                std::env::var("FAIRLEAD_LOG_LEVEL").unwrap_or_else(|_| "debug".to_owned()),
            );
        if self.clock_ahead.is_some() || self.has_own_clock {
            // The wrapper `faketime` would be the process that is killed.
            command.env("LD_PRELOAD", faketime_library()?).env("DONT_FAKE_MONOTONIC", "1");
        }
        if let Some(ahead) = self.clock_ahead {
            command.env("FAKETIME", ahead);
        } else if self.has_own_clock {
            command.env("FAKETIME_TIMESTAMP_FILE", self.clock_file()).env("FAKETIME_NO_CACHE", "1");
        }
        self.program = Some(self.host.spawn(&mut command, self.log())?);
        Ok(())
    }

    /// Sets how far the wall clock of the node program is ahead (as `faketime -f`, such as `+1h`), from now on: [`Node::has_own_clock`].
    ///
    /// # Errors
    /// The file system refuses.
    pub fn set_clock(&self, ahead: &str) -> anyhow::Result<()> {
        // The program reads it whenever it asks for the time, and must never find half of it.
        let new = self.directory.join("clock.new");
        std::fs::write(&new, format!("{ahead}\n"))?;
        Ok(std::fs::rename(new, self.clock_file())?)
    }

    fn clock_file(&self) -> PathBuf {
        self.directory.join("clock")
    }

    /// Waits until the node program serves its socket.
    ///
    /// # Errors
    /// It ended, or did not come up; its log is in the message.
    pub fn wait_ready(&mut self, patience: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        // To connect costs nothing, unlike a program that asks.
        while UnixStream::connect(self.socket()).is_err() || self.status().is_err() {
            let ended = match &mut self.program {
                Some(program) => program.status()?,
                None => bail!("the node program of {} was not started", self.name),
            };
            if ended.is_some() || Instant::now() > deadline {
                bail!("the node program of {} is not up ({ended:?}):\n{}", self.name, tail(&self.log()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Kills the node program with SIGKILL, as a crash or the kernel's memory killer would.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let mut program =
            self.program.take().with_context(|| format!("{} runs no node program", self.name))?;
        program.signal(Signal::SIGKILL)?;
        program.wait(Duration::from_secs(5))?;
        Ok(())
    }

    /// Asks the node program to end, as its supervisor would.
    ///
    /// # Errors
    /// It does not run, or did not end in time.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        let mut program =
            self.program.take().with_context(|| format!("{} runs no node program", self.name))?;
        program.signal(Signal::SIGTERM)?;
        program.wait(Duration::from_secs(30))?;
        Ok(())
    }

    /// Replaces the node program as an upgrade does: the new one is started beside the old one, which ends when the new
    /// one waits for its turn.
    ///
    /// # Errors
    /// There is no old one, the new one cannot be run, or either does not do its part in time.
    pub fn upgrade(&mut self, patience: Duration) -> anyhow::Result<()> {
        let mut old = self.program.take().with_context(|| format!("{} runs no node program", self.name))?;
        self.start()?;
        let deadline = Instant::now() + patience;
        while !std::fs::read_to_string(self.log())?.contains("taking over when it ends") {
            if Instant::now() > deadline {
                bail!("the new program of {} does not wait for its turn:\n{}", self.name, tail(&self.log()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        old.signal(Signal::SIGTERM)?;
        old.wait(patience)?;
        self.wait_ready(patience)
    }

    /// Output of `fairlead status -o json` on this node.
    ///
    /// # Errors
    /// The node program does not answer.
    pub fn status(&self) -> anyhow::Result<Value> {
        Ok(self.ask(&["status"])?.1)
    }

    /// The exit code of a `fairlead` command on this node, and what it prints as JSON; null where it prints nothing.
    ///
    /// # Errors
    /// It cannot be run, or prints something else.
    pub fn ask(&self, command: &[&str]) -> anyhow::Result<(Option<i32>, Value)> {
        let mut program = self.host.command(executable("fairlead")?)?;
        program
            .args(["--log-level", "error"])
            .args(command)
            .args(["-o", "json", "--socket"])
            .arg(self.socket());
        let output = program.output()?;
        let said = || format!("{command:?} on {}: {}", self.name, String::from_utf8_lossy(&output.stderr));
        let printed = match output.stdout.is_empty() {
            true if command == ["status"] => bail!("{}", said()),
            true => Value::Null,
            false => serde_json::from_slice(&output.stdout).with_context(said)?,
        };
        Ok((output.status.code(), printed))
    }

    /// Process id of the node program.
    ///
    /// # Errors
    /// It does not run.
    pub fn process(&self) -> anyhow::Result<u32> {
        let program = self.program.as_ref().with_context(|| format!("{} runs no node program", self.name))?;
        Ok(program.id())
    }

    /// Resident memory of the node program in MiB.
    ///
    /// # Errors
    /// It does not run.
    pub fn resident_mib(&self) -> anyhow::Result<f64> {
        resident_mib(self.program()?)
    }

    /// Process ID of the node program.
    ///
    /// # Errors
    /// None runs.
    pub fn program_id(&self) -> anyhow::Result<u32> {
        Ok(self.program()?.id())
    }

    fn program(&self) -> anyhow::Result<&Process> {
        self.program.as_ref().with_context(|| format!("{} runs no node program", self.name))
    }
}

/// The library that shifts a program's clock, for programs with threads.
fn faketime_library() -> anyhow::Result<PathBuf> {
    let library = format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    if !Path::new(&library).exists() {
        bail!("{library} is missing: install the Debian package faketime (`cargo xtask setup`)");
    }
    Ok(library.into())
}

/// Resident memory of a program in MiB.
///
/// # Errors
/// It has ended.
pub fn resident_mib(program: &Process) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", program.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    Ok(kib / 1024.0)
}

/// The last lines of a file, for errors.
pub fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(30)..).unwrap_or_default().join("\n")
}
