//! The published client and server of the Sidero discovery protocol, as judges of Fairlead's server and client.
//!
//! `judge/` beside this crate is a Go module around `github.com/siderolabs/discovery-client`, pinned with its sums. It is built
//! once per content into the cache of all test beds, and needs Go. Members come and go as JSON: [`Judge`] writes what one
//! publishes and reads what it finds. `service/` pins `github.com/siderolabs/discovery-service`, which [`OtherServer`] runs as it is.
//! Not here: any of the protocol.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use testbed_cache::{Fnv1a, Shelf, progress};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Bounds a test that hangs.
const LIMIT: Duration = Duration::from_secs(30);

/// A member of a cluster that is judged. It is killed when dropped, and its entry then expires.
#[derive(Debug)]
pub struct Judge {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    found: Value,
}

impl Judge {
    /// Starts a member. Nothing is published yet.
    ///
    /// # Errors
    /// The program cannot be built or run.
    pub fn start(
        server: &str,
        cluster: &str,
        secret: [u8; 32],
        id: &str,
        ttl: Duration,
    ) -> anyhow::Result<Self> {
        let secret: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut child = Command::new(program()?)
            .args([server, cluster, &secret, id, &format!("{}ms", ttl.as_millis())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot run the judge")?;
        let input = child.stdin.take().context("the judge has no input")?;
        let output = child.stdout.take().context("the judge has no output")?;
        Ok(Self { child, input, output: BufReader::new(output).lines(), found: Value::Null })
    }

    /// Publishes a member, or deletes it with `null`.
    ///
    /// # Errors
    /// The judge has ended.
    pub async fn publish(&mut self, member: &Value) -> anyhow::Result<()> {
        self.input.write_all(format!("{member}\n").as_bytes()).await.context("the judge has ended")
    }

    /// Waits until what it finds is as wanted, and returns that.
    ///
    /// # Errors
    /// That does not happen within half a minute, or the judge has ended.
    pub async fn until(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let wanted = async {
            while !is(&self.found) {
                let Some(line) = self.output.next_line().await? else {
                    bail!("the judge has ended: {:?}", self.child.wait().await?);
                };
                self.found = serde_json::from_str(&line)?;
            }
            Ok(())
        };
        match tokio::time::timeout(LIMIT, wanted).await {
            Ok(outcome) => outcome?,
            Err(_) => bail!("the judge does not find {what}, but {}", self.found),
        }
        Ok(self.found.clone())
    }
}

/// The published server of the protocol, without TLS on a port of loopback. It is killed when dropped.
#[derive(Debug)]
pub struct OtherServer {
    _child: Child,
    /// Address at which it listens.
    pub address: SocketAddr,
}

impl OtherServer {
    /// Starts a server that looks once a second for what has expired, and waits until it listens.
    ///
    /// # Errors
    /// The program cannot be built or run, or does not listen within half a minute.
    pub async fn start() -> anyhow::Result<Self> {
        let package = "github.com/siderolabs/discovery-service/cmd/discovery-service";
        let program = built("service", &["go.mod", "go.sum"], package)?;
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let child = Command::new(program)
            .arg(format!("-addr={address}"))
            .args(["-landing-addr=", "-metrics-addr=", "-snapshots-enabled=false", "-gc-interval=1s"])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("cannot run the server")?;
        let listens = async {
            while TcpStream::connect(address).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LIMIT, listens).await.context("the server does not listen")?;
        Ok(Self { _child: child, address })
    }
}

/// The judge's program, built first if need be; `judge/main.go` says how it is run.
///
/// # Errors
/// Go is missing, or the module cannot be built.
pub fn program() -> anyhow::Result<PathBuf> {
    built("judge", &["go.mod", "go.sum", "main.go"], ".")
}

/// Builds a package of the Go module in a directory of this crate that has these files.
fn built(module: &str, files: &[&str], package: &str) -> anyhow::Result<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(module);
    let mut hash = Fnv1a::default();
    for file in files {
        hash.add(&std::fs::read(directory.join(file)).with_context(|| format!("cannot read {file}"))?);
    }
    let shelf = Shelf::new(&format!("discovery-{module}-{:016x}", hash.value()))?;
    shelf.file(module, |path| {
        progress(&format!("building the {module} of the Sidero discovery protocol"));
        let status = std::process::Command::new("go")
            .args(["build", "-trimpath", "-o"])
            .arg(path)
            .arg(package)
            .current_dir(&directory)
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly -buildvcs=false")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .context("cannot run `go`: install Go 1.26 or newer")?;
        ensure!(status.success(), "building the {module} failed ({status}); the messages are above");
        Ok(())
    })
}
