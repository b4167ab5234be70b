//! A relay on the Internet, for nodes that do not reach each other.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{Host, Process, executable};

/// TCP port of the relay.
const PORT: u16 = 443;
/// The same without TLS, on the loopback.
const PLAIN_PORT: u16 = 8080;
/// The token of the relay.
pub const TOKEN: &str = "correct horse battery staple";
/// Name of the Secret with the token.
const SECRET: &str = "fairlead-relay";
/// Only bounds what would hang.
const TIMEOUT: Duration = Duration::from_secs(120);

/// `fairlead relay` with a certificate for its address or name.
#[derive(Debug)]
pub struct Relay {
    /// The machine.
    pub host: Host,
    /// As nodes know it.
    name: String,
    listen: String,
    has_tls: bool,
    directory: PathBuf,
    certificate: String,
    process: Option<Process>,
    /// Replicas beside the program, which then is not at [`PORT`] itself.
    replicas: Vec<Option<Process>>,
}

impl Relay {
    /// Starts it on a machine of its own. Its files and its log go to `directory`, which must not exist.
    ///
    /// # Errors
    /// As [`Relay::run`].
    pub fn start(host: Host, directory: PathBuf) -> Result<Self> {
        let address = host.address().to_string();
        Self::start_on(host, address.clone(), format!("{address}:{PORT}"), directory, true)
    }

    /// The same on all addresses of the machine, known by a name.
    ///
    /// # Errors
    /// As [`Relay::run`].
    pub fn start_named(host: Host, name: &str, directory: PathBuf) -> Result<Self> {
        Self::start_on(host, name.to_owned(), format!("[::]:{PORT}"), directory, true)
    }

    /// The same without TLS at [`Relay::listen_address`], for a proxy on the machine, which terminates TLS at the machine's address.
    ///
    /// # Errors
    /// As [`Relay::run`].
    pub fn start_without_tls(host: Host, directory: PathBuf) -> Result<Self> {
        let name = host.address().to_string();
        Self::start_on(host, name, format!("127.0.0.1:{PLAIN_PORT}"), directory, false)
    }

    fn start_on(host: Host, name: String, listen: String, directory: PathBuf, has_tls: bool) -> Result<Self> {
        fs::create_dir(&directory)?;
        let (certificate, key) = certificate(&name)?;
        fs::write(directory.join("tls.crt"), &certificate)?;
        fs::write(directory.join("tls.key"), key)?;
        fs::write(directory.join("tokens"), TOKEN)?;
        let (process, replicas) = (None, Vec::new());
        let mut relay = Self { host, name, listen, has_tls, directory, certificate, process, replicas };
        relay.run()?;
        Ok(relay)
    }

    /// Starts the program and waits until it serves.
    ///
    /// # Errors
    /// It is not built, or did not come up; its output is in the message.
    pub fn run(&mut self) -> Result<()> {
        let mut program = self.host.command(executable("fairlead")?)?;
        program.args(["relay", "--addr", &self.listen]);
        program.args(["--metrics-addr=127.0.0.1:9388", "--health-addr=127.0.0.1:9389", "--drain=2s"]);
        program.arg("--token-file").arg(self.directory.join("tokens"));
        if self.has_tls {
            program.arg("--tls-cert-file").arg(self.directory.join("tls.crt"));
            program.arg("--tls-private-key-file").arg(self.directory.join("tls.key"));
        } else {
            program.args(["--name", &self.name]);
        }
        let log = self.directory.join("log");
        let mut process = self.host.spawn(&mut program, log)?;
        process.wait_for_output("serving", TIMEOUT)?;
        self.process = Some(process);
        Ok(())
    }

    /// Starts replicas in place of the program, behind an address that leads each connection to the next of them, as a load
    /// balancer does.
    ///
    /// # Errors
    /// As [`Relay::run`].
    pub fn run_replicas(&mut self, count: u16) -> Result<()> {
        self.process = None;
        let ports: Vec<String> = (0..count).map(|number| format!("{number} : {}", 4430 + number)).collect();
        let rules = format!(
            "table ip testbalancer {{\nchain prerouting {{\ntype nat hook prerouting priority dstnat\n\
             tcp dport {PORT} redirect to : numgen inc mod {count} map {{ {} }}\n}}\n}}",
            ports.join(", ")
        );
        self.host.shell(&format!("nft -f - <<'END'\n{rules}\nEND"))?;
        for number in 0..count {
            let mut program = self.replica(number, count)?;
            let log = self.directory.join(format!("log-{number}"));
            let mut process = self.host.spawn(&mut program, log)?;
            process.wait_for_output("serving", TIMEOUT)?;
            self.replicas.push(Some(process));
        }
        Ok(())
    }

    fn replica(&self, number: u16, count: u16) -> Result<Command> {
        let mut program = self.host.command(executable("fairlead")?)?;
        program.args([
            "relay",
            "--drain=2s",
            "--stun-addr=[::]:0",
            "--udp-ports=0",
            "--health-addr=127.0.0.1:0",
        ]);
        program.arg(format!("--addr=[::]:{}", 4430 + number));
        program.arg(format!("--metrics-addr=127.0.0.1:{}", 9400 + number));
        program.arg(format!("--replica-addr=127.0.0.1:{}", 3480 + number));
        program.args((0..count).map(|other| format!("--replica=127.0.0.1:{}", 3480 + other)));
        program.arg(format!("--replica-name={}", self.name));
        for (option, file) in [
            ("--replica-ca-file", "tls.crt"),
            ("--tls-cert-file", "tls.crt"),
            ("--tls-private-key-file", "tls.key"),
            ("--token-file", "tokens"),
        ] {
            program.arg(option).arg(self.directory.join(file));
        }
        Ok(program)
    }

    /// A number of a replica, as its metrics have it; `None` if it does not run.
    ///
    /// # Errors
    /// It has no such number.
    pub fn replica_metric(&self, number: u16, name: &str) -> Result<Option<u64>> {
        if self.replicas.get(usize::from(number)).is_none_or(Option::is_none) {
            return Ok(None);
        }
        let text = self.host.shell(&format!("curl -sS http://127.0.0.1:{}/metrics", 9400 + number))?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.with_context(|| format!("replica {number} has no metric {name}"))?;
        Ok(Some(value.parse()?))
    }

    /// Kills a replica with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_replica(&mut self, number: u16) -> Result<()> {
        let process = self.replicas.get_mut(usize::from(number)).and_then(Option::take);
        let mut process = process.context("the replica does not run")?;
        process.signal(Signal::SIGKILL)?;
        process.wait(TIMEOUT).map(drop)
    }

    /// Output of the program; empty if it was not started, or cannot be read.
    pub fn output(&self) -> String {
        self.process.as_ref().and_then(|process| process.output().ok()).unwrap_or_default()
    }

    /// Kills the program with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self) -> Result<()> {
        let mut process = self.process.take().context("the relay does not run")?;
        process.signal(Signal::SIGKILL)?;
        process.wait(TIMEOUT).map(drop)
    }

    /// Address and port where the program listens, as its option `--addr` has them.
    pub fn listen_address(&self) -> &str {
        &self.listen
    }

    /// Address or name of the relay, and port.
    pub fn address(&self) -> String {
        format!("{}:{PORT}", self.name)
    }

    /// `spec.relay` of the mesh.
    pub fn spec(&self, mode: &str) -> Value {
        json!({
            "mode": mode, "provider": "external",
            "external": {
                "endpoint": self.address(),
                "caBundle": STANDARD.encode(&self.certificate),
                "authSecretRef": { "name": SECRET },
            },
        })
    }

    /// The Secret with a token that [`Relay::spec`] names; [`TOKEN`] is the right one.
    pub fn secret(token: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": SECRET, "namespace": "kube-system" },
            "stringData": { "token": token },
        })
    }
}

/// A certificate for a name or an address that is its own authority, and its private key, in PEM.
///
/// # Errors
/// It is neither a name nor an address.
pub fn certificate(name: &str) -> Result<(String, String)> {
    let made = rcgen::generate_simple_self_signed([name.to_owned()])?;
    Ok((made.cert.pem(), made.signing_key.serialize_pem()))
}
