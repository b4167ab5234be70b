//! A DNS server whose records change (dnsmasq).

use std::fmt::Write as _;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::Signal;

use crate::host::Host;
use crate::process::Process;

/// Longest time until the server is up on a busy machine.
const START: Duration = Duration::from_secs(60);

/// Knows the names that it is told, and says of all others below `example` (RFC 2606) that they do not exist. Dropping it ends it.
#[derive(Debug)]
pub struct Dns {
    directory: PathBuf,
    process: Process,
}

impl Dns {
    /// Starts it on a machine of its own, without records. Its files go to `directory`, which must not exist.
    ///
    /// # Errors
    /// dnsmasq is not installed or does not start.
    pub fn start(host: &Host, directory: PathBuf) -> Result<Self> {
        fs::create_dir(&directory)?;
        let address = host.address();
        fs::write(directory.join("resolv.conf"), format!("nameserver {address}\n"))?;
        fs::write(directory.join("hosts"), "")?;
        let mut dnsmasq = Command::new("dnsmasq");
        dnsmasq.args(["--keep-in-foreground", "--no-resolv", "--no-hosts", "--conf-file=/dev/null"]);
        dnsmasq.args(["--user=root", "--local=/example/", "--bind-interfaces", "--except-interface=lo"]);
        dnsmasq.args(["--log-facility=-", "--log-queries", &format!("--listen-address={address}")]);
        dnsmasq.arg(format!("--addn-hosts={}", directory.join("hosts").display()));
        dnsmasq.arg(format!("--pid-file={}", directory.join("dnsmasq.pid").display()));
        let mut process = host.spawn(&mut dnsmasq, directory.join("log"))?;
        // Before that, a signal would end it.
        process.wait_for_output("started, version", START)?;
        Ok(Self { directory, process })
    }

    /// Replaces all records. Their TTL is zero, so a resolver that asks again gets the new ones.
    ///
    /// # Errors
    /// The file system refuses, or dnsmasq has ended.
    pub fn set(&mut self, records: &[(&str, IpAddr)]) -> Result<()> {
        let mut hosts = String::new();
        for (name, address) in records {
            writeln!(hosts, "{address} {name}")?;
        }
        fs::write(self.directory.join("hosts"), hosts)?;
        // It reads its files again.
        self.process.signal(Signal::SIGHUP)
    }

    /// Lets a machine use it, from now on.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn serve(&self, host: &Host) -> Result<()> {
        let resolv_conf = self.directory.join("resolv.conf");
        host.shell(&format!("mount --bind {} /etc/resolv.conf", resolv_conf.display())).map(drop)
    }
}
