//! A network without IPv4: the router of a site translates (tayga), and its DNS server says so (dnsmasq).

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use ipnet::Ipv6Net;

use crate::host::Host;
use crate::process::Process;
use crate::router::Router;
use crate::site::NatSite;

/// The prefix of the NAT64, routed nowhere else (documentation prefix, RFC 3849).
const PREFIX: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x2001, 0xdb8, 0x64, 0, 0, 0, 0, 0), 96);
/// tayga gives each IPv6 host one of these addresses, which the router then translates as those of its LAN.
const POOL: &str = "192.168.255.0/24";
const POOL_ADDRESS: &str = "192.168.255.1";

/// NAT64 and DNS64 of a site. Dropping it ends both.
#[derive(Debug)]
pub struct Nat64 {
    site: NatSite,
    resolv_conf: PathBuf,
    _translator: Process,
    _dns: Process,
}

impl Nat64 {
    /// Starts both on the router of a site, which must have IPv6. Their files go to `directory`. Without `has_dns64` the DNS server
    /// knows nothing, and hosts do not learn the prefix.
    ///
    /// # Errors
    /// A program is not installed or does not start, or the site has no IPv6.
    pub fn start(site: &NatSite, directory: &Path, has_dns64: bool) -> Result<Self> {
        let router = site.router();
        let lan6 = router.lan6().with_context(|| format!("the site {} has no IPv6", site.name()))?;
        let resolver = Ipv6Addr::from_bits(lan6.network().to_bits() | 1);
        let resolv_conf = directory.join("resolv.conf");
        fs::write(&resolv_conf, format!("nameserver {resolver}\n"))?;
        Ok(Self {
            site: site.clone(),
            resolv_conf,
            _translator: translator(router, directory)?,
            _dns: dns(router, resolver, has_dns64, directory)?,
        })
    }

    /// The prefix.
    pub fn prefix(&self) -> Ipv6Net {
        PREFIX
    }

    /// The address that is translated to an IPv4 address.
    pub fn address_of(&self, address: Ipv4Addr) -> Ipv6Addr {
        embedded(address)
    }

    /// Adds a host without IPv4.
    ///
    /// # Errors
    /// As [`NatSite::host`].
    pub fn host(&self, name: &str) -> Result<Host> {
        let host = self.site.host(name)?;
        let resolv_conf = self.resolv_conf.display();
        host.shell(&format!("ip -4 addr flush dev eth0; mount --bind {resolv_conf} /etc/resolv.conf"))?;
        Ok(host)
    }
}

fn embedded(address: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits(PREFIX.network().to_bits() | u128::from(address.to_bits()))
}

fn translator(router: &Router, directory: &Path) -> Result<Process> {
    let configuration = directory.join("tayga.conf");
    let data = directory.display();
    fs::write(
        &configuration,
        format!(
            "tun-device nat64\nipv4-addr {POOL_ADDRESS}\nprefix {PREFIX}\ndynamic-pool {POOL}\ndata-dir {data}\n"
        ),
    )?;
    let conf = configuration.display();
    router.shell(&format!(
        "tayga --mktun -c {conf} >/dev/null; ip link set nat64 up; ip route add {POOL} dev nat64; \
         ip -6 route add {PREFIX} dev nat64"
    ))?;
    let mut tayga = Command::new("tayga");
    tayga.arg("--nodetach").arg("-c").arg(&configuration);
    router.spawn(&mut tayga, directory.join("tayga.log"))
}

/// Answers with the addresses that a DNS64 makes of those of `ipv4only.arpa` (RFC 7050, section 8), and nothing else.
fn dns(router: &Router, address: Ipv6Addr, has_dns64: bool, directory: &Path) -> Result<Process> {
    let mut dnsmasq = Command::new("dnsmasq");
    dnsmasq.args([
        "--keep-in-foreground",
        "--no-resolv",
        "--no-hosts",
        "--conf-file=/dev/null",
        "--user=root",
    ]);
    dnsmasq.args(["--bind-interfaces", "--except-interface=lo", "--log-facility=-", "--log-queries"]);
    dnsmasq.arg(format!("--listen-address={address}"));
    dnsmasq.arg(format!("--pid-file={}", directory.join("dnsmasq.pid").display()));
    for last in [170, 171].into_iter().filter(|_| has_dns64) {
        let ipv4 = Ipv4Addr::new(192, 0, 0, last);
        dnsmasq.arg(format!("--host-record=ipv4only.arpa,{ipv4},{}", embedded(ipv4)));
    }
    router.spawn(&mut dnsmasq, directory.join("dnsmasq.log"))
}
