//! Proxies of other makers on the lab's Internet, through which nodes reach a relay: squid, and nginx before a relay that has no TLS.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed_lab::relay::Relay;
use testbed_lab::{Host, Process};

use crate::World;

/// Only bounds what would hang.
const TIMEOUT: Duration = Duration::from_secs(60);
/// squid's usual port.
const SQUID_PORT: u16 = 3128;
const USER: &str = "node";
/// The password that [`Squid`] knows.
pub const PASSWORD: &str = "secret";
/// The same, as `openssl passwd -apr1` writes it.
const PASSWORDS: &str = "node:$apr1$fairlead$t6vvlCQ7SxpycJ3UcbhX50\n";
/// Asks for a password, and makes tunnels only.
const SQUID: &str = "\
http_port PORT
auth_param basic program /usr/lib/squid/basic_ncsa_auth DIRECTORY/passwords
acl known proxy_auth REQUIRED
http_access allow CONNECT known
http_access deny all
access_log stdio:DIRECTORY/access.log
cache_log DIRECTORY/cache.log
pid_filename none
coredump_dir DIRECTORY
cache deny all
cache_mem 1 MB
dns_nameservers 127.0.0.1
max_filedescriptors 1024
shutdown_lifetime 0 seconds
visible_hostname proxy
";
/// As docs/relay.md advises.
const NGINX: &str = "\
daemon off;
pid DIRECTORY/nginx.pid;
error_log stderr;
user root;
worker_processes 1;
events { worker_connections 256; }
http {
  access_log DIRECTORY/access.log;
  client_body_temp_path DIRECTORY/client;
  fastcgi_temp_path DIRECTORY/fastcgi;
  proxy_temp_path DIRECTORY/proxy;
  scgi_temp_path DIRECTORY/scgi;
  uwsgi_temp_path DIRECTORY/uwsgi;
  server {
    listen 443 ssl;
    ssl_certificate DIRECTORY/tls.crt;
    ssl_certificate_key DIRECTORY/tls.key;
    ssl_protocols TLSv1.3;
    location /relay {
      proxy_pass http://UPSTREAM;
      proxy_http_version 1.1;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection upgrade;
      proxy_read_timeout 5m;
    }
  }
}
";

/// squid, an HTTP proxy that makes tunnels (CONNECT) for one user.
pub struct Squid {
    /// Machine of the proxy.
    pub host: Host,
    // It is not root's, so the files have a directory of their own.
    directory: TempDir,
    process: Process,
}

impl Squid {
    /// Starts it on a machine of its own.
    ///
    /// # Errors
    /// It is not installed, or does not come up.
    pub fn start(world: &World) -> Result<Self> {
        let host = world.lab().public_site("internet").host("squid")?;
        let directory = tempfile::Builder::new().prefix("fairlead-squid-").tempdir()?;
        let path = directory.path().display().to_string();
        fs::write(directory.path().join("passwords"), PASSWORDS)?;
        let configuration = SQUID.replace("DIRECTORY", &path).replace("PORT", &SQUID_PORT.to_string());
        fs::write(directory.path().join("squid.conf"), configuration)?;
        host.shell(&format!("chown -R proxy:proxy {path}"))?;
        let process = squid(&host, directory.path())?;
        Ok(Self { host, directory, process })
    }

    /// Kills it with SIGKILL and starts it again after `away`.
    ///
    /// # Errors
    /// It did not run, or does not come up.
    pub fn restart(&mut self, away: Duration) -> Result<()> {
        self.process.signal(Signal::SIGKILL)?;
        self.process.wait(TIMEOUT)?;
        std::thread::sleep(away);
        self.process = squid(&self.host, self.directory.path())?;
        Ok(())
    }

    /// Value of `HTTPS_PROXY` for a node that uses the proxy.
    pub fn url(&self, password: &str) -> String {
        format!("http://{USER}:{password}@{}:{SQUID_PORT}", self.host.address())
    }

    /// The rules of a router that lets its LAN reach nothing but the proxy, and some other addresses.
    pub fn only_way(&self, others: &str) -> String {
        format!(
            "table ip testproxy {{\nchain forward {{\ntype filter hook forward priority -10\n\
             iifname lan ip daddr {} tcp dport {SQUID_PORT} accept\niifname lan ip daddr {{ {others} }} accept\n\
             iifname lan drop\n}}\n}}",
            self.host.address()
        )
    }

    /// Log of tunnels that have ended.
    ///
    /// # Errors
    /// There is no log.
    pub fn log(&self) -> Result<String> {
        read(&self.directory.path().join("access.log"))
    }
}

/// nginx, which terminates TLS for a relay that speaks WebSocket without it.
pub struct Nginx {
    /// The relay on the same machine, which listens on the loopback alone.
    pub relay: Relay,
    certificate: String,
    directory: PathBuf,
    _process: Process,
}

impl Nginx {
    /// Starts both on a machine of their own.
    ///
    /// # Errors
    /// A program is missing, or does not come up.
    pub fn start(world: &World) -> Result<Self> {
        let host = world.lab().public_site("internet").host("nginx")?;
        let relay = Relay::start_without_tls(host.clone(), world.directory().join("relay-without-tls"))?;
        let directory = world.directory().join("nginx");
        fs::create_dir(&directory)?;
        let (certificate, key) = testbed_lab::relay::certificate(&host.address().to_string())?;
        fs::write(directory.join("tls.crt"), &certificate)?;
        fs::write(directory.join("tls.key"), key)?;
        let path = directory.display().to_string();
        let configuration = NGINX.replace("DIRECTORY", &path).replace("UPSTREAM", relay.listen_address());
        fs::write(directory.join("nginx.conf"), configuration)?;
        let mut command = Command::new("/usr/sbin/nginx");
        command.args(["-e", "stderr", "-c"]).arg(directory.join("nginx.conf"));
        let mut process = host.spawn(&mut command, directory.join("output"))?;
        testbed_lab::eventually(TIMEOUT, || {
            let ended = process.status()?;
            ensure!(ended.is_none(), "nginx ended: {}", process.output()?);
            host.shell("ss -Htln sport = :443 | grep -q .").context("nginx does not listen").map(drop)
        })?;
        Ok(Self { relay, certificate, directory, _process: process })
    }

    /// `spec.relay` of the mesh.
    pub fn spec(&self) -> Value {
        let mut spec = self.relay.spec("auto");
        if let Some(external) = spec.get_mut("external").and_then(Value::as_object_mut) {
            external.insert("endpoint".to_owned(), json!(format!("wss://{}", self.relay.host.address())));
            external.insert("caBundle".to_owned(), json!(STANDARD.encode(&self.certificate)));
        }
        spec
    }

    /// Log of connections that have ended.
    ///
    /// # Errors
    /// There is no log.
    pub fn log(&self) -> Result<String> {
        read(&self.directory.join("access.log"))
    }
}

fn squid(host: &Host, directory: &Path) -> Result<Process> {
    let mut command = Command::new("/usr/sbin/squid");
    command.args(["-N", "-d", "1", "-f"]).arg(directory.join("squid.conf"));
    let mut process = host.spawn(&mut command, directory.join("output"))?;
    process.wait_for_output("Accepting HTTP Socket connections", TIMEOUT)?;
    Ok(process)
}

fn read(log: &Path) -> Result<String> {
    fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))
}
