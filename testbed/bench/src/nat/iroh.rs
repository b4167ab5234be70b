//! Two endpoints of iroh on hosts beside the nodes, and iroh's relay.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fairlead_demo::World;
use fairlead_demo::nat_matrix::Place;
use rcgen::{CertificateParams, KeyPair};
use testbed_lab::{Host, Process};

use super::Outcome;
use crate::peers::{cargo, shelf};

const FILES: &[&[u8]] = &[
    include_bytes!("../../peers/iroh-nat/Cargo.toml"),
    include_bytes!("../../peers/iroh-nat/Cargo.lock"),
    include_bytes!("../../peers/iroh-nat/src/main.rs"),
];
const TIMEOUT: Duration = Duration::from_secs(30);

/// The relay, and what is needed for endpoints.
pub(super) struct Iroh {
    program: PathBuf,
    certificate: PathBuf,
    /// As endpoints know it.
    address: String,
    /// Beside the nodes, by their names: the mesh of a node leads what is for others into its own tunnel.
    hosts: BTreeMap<String, Host>,
    _relay: Process,
    _host: Host,
}

/// A program that ends with this.
struct Endpoint {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Iroh {
    pub(super) fn start(world: &World) -> Result<Self> {
        let shelf = shelf("iroh-nat", FILES)?;
        let program = shelf.file("iroh-nat-bench", |path| cargo("iroh-nat", path))?;
        let host = world.lab().public_site("internet").host("iroh-relay")?;
        let [certificate, key] = ["iroh.crt", "iroh.key"].map(|name| world.directory().join(name));
        let made = KeyPair::generate()?;
        let names = vec![host.address().to_string()];
        fs::write(&certificate, CertificateParams::new(names)?.self_signed(&made)?.pem())?;
        fs::write(&key, made.serialize_pem())?;
        let address = format!("{}:443", host.address());
        let mut command = host.command(&program)?;
        command.args(["serve", &address]).arg(&certificate).arg(&key);
        let mut relay = host.spawn(&mut command, world.directory().join("iroh-relay.log"))?;
        relay.wait_for_output("serving", TIMEOUT)?;
        let mut hosts = BTreeMap::new();
        for node in &world.nodes {
            let site = world.sites.iter().find(|site| site.name() == node.site).context("no such site")?;
            hosts.insert(node.name.clone(), site.host(&format!("{}-iroh", node.name))?);
        }
        Ok(Self { program, certificate, address, hosts, _relay: relay, _host: host })
    }

    /// One connects to the other.
    pub(super) fn measure(&self, one: &Place, other: &Place) -> Result<Outcome> {
        let mut listening = self.endpoint(other, "listen")?;
        let mut connecting = self.endpoint(one, "connect")?;
        let id = listening.line()?;
        ensure!(connecting.line()? == "ready", "the endpoint is not ready");
        let input = connecting.child.stdin.as_mut().context("the endpoint has no input")?;
        writeln!(input, "{id}").context("the endpoint reads nothing")?;
        let answer = connecting.line()?;
        let time = |word: Option<&str>| -> Result<Option<Duration>> {
            let word = word.with_context(|| format!("the endpoint printed {answer:?}"))?;
            let milliseconds = if word == "-" { None } else { Some(word.parse::<f64>()?) };
            Ok(milliseconds.map(|milliseconds| Duration::from_secs_f64(milliseconds / 1000.0)))
        };
        let mut words = answer.split_whitespace();
        Ok(Outcome { answer: time(words.next())?, direct: time(words.next())? })
    }

    fn endpoint(&self, place: &Place, role: &str) -> Result<Endpoint> {
        let host = self.hosts.get(place.node).context("no such host")?;
        let mut command: Command = host.command(&self.program)?;
        command.args([role, &self.address]).env("SSL_CERT_FILE", &self.certificate);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("the endpoint has no output")?);
        Ok(Endpoint { child, lines })
    }
}

impl Endpoint {
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let length = self.lines.read_line(&mut line).context("cannot read what the endpoint prints")?;
        ensure!(length > 0, "the endpoint has ended; its messages are above");
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
