//! A discovery server on the Internet, through which nodes find each other.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{Host, Process, executable};

/// TCP port of the server.
const PORT: u16 = 3000;
/// Only bounds what would hang.
const TIMEOUT: Duration = Duration::from_secs(120);

/// `fairlead discovery` with a certificate for its address. What it accepts is in a file.
#[derive(Debug)]
pub struct Discovery {
    host: Host,
    directory: PathBuf,
    certificate: String,
    process: Option<Process>,
}

impl Discovery {
    /// Starts it on a machine of its own, for this list of clusters and affiliates. Its files and its log go to `directory`, which
    /// must not exist.
    ///
    /// # Errors
    /// As [`Discovery::run`].
    pub fn start(host: Host, directory: PathBuf, admission: &str) -> Result<Self> {
        fs::create_dir(&directory)?;
        let made = rcgen::generate_simple_self_signed([host.address().to_string()])?;
        let certificate = made.cert.pem();
        fs::write(directory.join("tls.crt"), &certificate)?;
        fs::write(directory.join("tls.key"), made.signing_key.serialize_pem())?;
        let mut server = Self { host, directory, certificate, process: None };
        server.admit(admission)?;
        server.run()?;
        Ok(server)
    }

    /// Starts the program and waits until it serves. It remembers nothing of an earlier run.
    ///
    /// # Errors
    /// It is not built, or did not come up; its output is in the message.
    pub fn run(&mut self) -> Result<()> {
        let mut program = self.host.command(executable("fairlead")?)?;
        program.args(["discovery", &format!("--addr={}:{PORT}", self.host.address())]);
        program.args(["--metrics-addr=127.0.0.1:9390", "--health-addr=127.0.0.1:9391"]);
        for (option, file) in [
            ("--tls-cert-file", "tls.crt"),
            ("--tls-private-key-file", "tls.key"),
            ("--admission-file", "admission"),
        ] {
            program.arg(option).arg(self.directory.join(file));
        }
        let mut process = self.host.spawn(&mut program, self.directory.join("log"))?;
        process.wait_for_output("serving", TIMEOUT)?;
        self.process = Some(process);
        Ok(())
    }

    /// Has a program take the place of the server that lies to nodes, by this word (`testbed-liar`). The certificate stays, what was
    /// published does not.
    ///
    /// # Errors
    /// As [`Discovery::run`].
    pub fn replace_by_liar(&mut self, word: &str) -> Result<()> {
        self.kill()?;
        self.lie(word)?;
        let mut program = self.host.command(executable("testbed-liar")?)?;
        program.arg(format!("{}:{PORT}", self.host.address()));
        program.args(["tls.crt", "tls.key", "word"].map(|file| self.directory.join(file)));
        let mut process = self.host.spawn(&mut program, self.directory.join("log-liar"))?;
        process.wait_for_output("serving", TIMEOUT)?;
        self.process = Some(process);
        Ok(())
    }

    /// Has the liar tell something else.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn lie(&self, word: &str) -> Result<()> {
        let (file, new) = (self.directory.join("word"), self.directory.join("word.new"));
        fs::write(&new, word)?;
        Ok(fs::rename(new, file)?)
    }

    /// Kills the program with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self) -> Result<()> {
        let mut process = self.process.take().context("the discovery server does not run")?;
        process.signal(Signal::SIGKILL)?;
        process.wait(TIMEOUT).map(drop)
    }

    /// Replaces the list of clusters and affiliates that it accepts.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn admit(&self, admission: &str) -> Result<()> {
        let (file, new) = (self.directory.join("admission"), self.directory.join("admission.new"));
        fs::write(&new, admission)?;
        Ok(fs::rename(new, file)?)
    }

    /// `spec.discovery` of the mesh.
    pub fn spec(&self) -> Value {
        json!({
            "endpoints": [format!("https://{}:{PORT}", self.host.address())],
            "caBundle": STANDARD.encode(&self.certificate),
        })
    }
}
