//! A site's router and the switches that change its behaviour while traffic flows.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ipnet::{Ipv4Net, Ipv6Net};

use crate::host::Host;
use crate::internet::{Attachment, Internet, cable};
use crate::lock;
use crate::namespace::Namespace;
use crate::nat::{Nat, Rules};

/// The router of a site: a [`Host`] with a `wan` and a `lan` side. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Router {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    host: Host,
    /// `None` behind a carrier.
    internet: Option<Arc<Internet>>,
    lan6: Option<Ipv6Net>,
    rules: Mutex<Rules>,
}

/// The first address of a LAN is its router's.
fn lan_gateway(lan: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(lan.network()).saturating_add(1))
}

fn lan_gateway6(lan6: Ipv6Net) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(lan6.network()).saturating_add(1))
}

impl Router {
    /// `host` is attached upstream by its `wan`; the LAN side and the rules are made here.
    pub(crate) fn new(
        host: Host,
        internet: Option<Arc<Internet>>,
        lan6: Option<Ipv6Net>,
        rules: Rules,
    ) -> Result<Self> {
        let lan = rules.lan;
        // A bridge without a fixed address takes its lowest port's, and changes it under the hosts' feet.
        let mut lines = format!(
            "link add lan address 02:00:00:00:00:01 type bridge mcast_snooping 0\nlink set lan up\n\
             addr add {}/{} dev lan\n",
            lan_gateway(lan),
            lan.prefix_len()
        );
        if let Some(lan6) = lan6 {
            lines += &format!("addr add {}/{} dev lan nodad\n", lan_gateway6(lan6), lan6.prefix_len());
        }
        host.ip(&lines)?;
        keep_rules_off_bridges(&host)?;
        let router = Self { inner: Arc::new(Inner { host, internet, lan6, rules: Mutex::new(rules) }) };
        router.apply(&lock(&router.inner.rules))?;
        Ok(router)
    }

    /// The kind of NAT it does.
    pub fn nat(&self) -> Nat {
        lock(&self.inner.rules).nat
    }

    /// The LAN's IPv4 range.
    pub fn lan(&self) -> Ipv4Net {
        lock(&self.inner.rules).lan
    }

    /// The LAN's IPv6 prefix, if it has one.
    pub fn lan6(&self) -> Option<Ipv6Net> {
        self.inner.lan6
    }

    /// Address of the router on the LAN: the hosts' gateway.
    pub fn lan_address(&self) -> Ipv4Addr {
        lan_gateway(self.lan())
    }

    /// The IPv4 address that packets of a host at `inside` carry on the Internet.
    pub(crate) fn public_address_for(&self, inside: Ipv4Addr) -> Ipv4Addr {
        let rules = lock(&self.inner.rules);
        let own = rules.one_to_one.iter().find(|(host, _)| *host == inside).map(|(_, public)| *public);
        match rules.nat {
            Nat::None => inside,
            _ => own.unwrap_or_else(|| self.inner.host.public_address()),
        }
    }

    /// Lifetime of a UDP mapping without traffic, in whole seconds, at least one.
    ///
    /// # Errors
    /// The lab has ended, or `life` is shorter than a second.
    pub fn set_mapping_life(&self, life: Duration) -> Result<()> {
        ensure!(
            life.as_secs() >= 1,
            "a mapping life of {life:?} is too short: the kernel counts whole seconds"
        );
        self.change(|rules| rules.mapping_life = life)?;
        let seconds = life.as_secs().to_string();
        self.set_sysctls(&[
            ("net/netfilter/nf_conntrack_udp_timeout", &seconds),
            ("net/netfilter/nf_conntrack_udp_timeout_stream", &seconds),
        ])
    }

    /// Loses all mappings, as a router that restarts; UDP then leaves from other external ports.
    ///
    /// A port pool draws again from the same few ports and may draw the same one.
    ///
    /// # Errors
    /// The lab has ended, or this kind of NAT has no ports to change.
    pub fn rebind(&self) -> Result<()> {
        let nat = self.nat();
        ensure!(nat.has_ports(), "{nat:?} of {} has no ports to change: use change_address", self.name());
        self.change(|rules| rules.generation = rules.generation.wrapping_add(1))?;
        self.lose_mappings()
    }

    /// Loses all mappings, but keeps choosing external ports as before.
    ///
    /// # Errors
    /// The lab has ended, or `conntrack` fails.
    pub fn lose_mappings(&self) -> Result<()> {
        self.nft(Rules::forget())?;
        self.shell("conntrack -F").context("cannot flush connection tracking").map(drop)
    }

    /// Moves the router to another public IPv4 address, as some providers do every night; the mappings are lost.
    ///
    /// # Errors
    /// The lab has ended or full, or the router is behind a carrier.
    pub fn change_address(&self) -> Result<Ipv4Addr> {
        let Some(internet) = &self.inner.internet else {
            bail!("{} is behind a carrier, whose router has the public address", self.name());
        };
        let (old, new) = self.inner.host.with_attachment(|attachment| {
            let old = attachment.address;
            internet.renumber(attachment).map(|new| (old, new))
        })?;
        self.ip(&format!("addr add {new}/32 dev wan\naddr del {old}/32 dev wan\n"))?;
        self.change(|rules| rules.wan = new)?;
        self.lose_mappings()?;
        Ok(new)
    }

    /// Switches the stateful IPv6 firewall, which is on at first: only answers get in.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn set_ipv6_firewall(&self, on: bool) -> Result<()> {
        self.change(|rules| rules.ipv6_firewall = on)
    }

    /// Whether an address of the LAN is taken.
    pub(crate) fn has_host(&self, address: Ipv4Addr) -> bool {
        lock(&self.inner.rules).hosts.contains(&address)
    }

    /// Makes a port of the LAN for a namespace, which will have `address` there.
    pub(crate) fn attach(
        &self,
        namespace: &Namespace,
        interface: &str,
        address: Ipv4Addr,
        mtu: Option<u32>,
    ) -> Result<Attachment> {
        let (lan, index) = {
            let rules = lock(&self.inner.rules);
            ensure!(lan_contains_host(rules.lan, address), "{address} is no host address of {}", rules.lan);
            let taken = rules.hosts.contains(&address);
            ensure!(!taken, "{address} is taken already in the LAN {} of {}", rules.lan, self.name());
            (rules.lan, rules.hosts.len())
        };
        let port = format!("h{index}");
        let lines = cable(&port, interface, namespace.holder_pid(), mtu);
        self.ip(&format!("{lines}link set {port} master lan up\n"))
            .with_context(|| format!("cannot attach {} to the LAN of {}", namespace.name(), self.name()))?;
        self.admit(address)?;
        let mut inside = format!(
            "link set {interface} up\naddr add {address}/{} dev {interface}\nroute add default via {} dev {interface}\n",
            lan.prefix_len(),
            lan_gateway(lan)
        );
        // The last digits are those of the IPv4 address, for the reader's sake.
        let offset = u32::from(address).saturating_sub(u32::from(lan.network()));
        let address6 = self
            .inner
            .lan6
            .map(|lan6| Ipv6Addr::from(u128::from(lan6.network()).saturating_add(u128::from(offset))));
        if let (Some(address6), Some(lan6)) = (address6, self.inner.lan6) {
            inside += &format!(
                "addr add {address6}/{} dev {interface} nodad\nroute add default via {} dev {interface}\n",
                lan6.prefix_len(),
                lan_gateway6(lan6)
            );
        }
        Ok(Attachment {
            switch: Namespace::clone(self),
            port,
            restore: Vec::new(),
            inside,
            address,
            address6,
        })
    }

    /// Lets the rules know a new host.
    fn admit(&self, address: Ipv4Addr) -> Result<()> {
        let public = match (&self.inner.internet, self.nat()) {
            (Some(internet), Nat::OneToOne) => {
                let public = crate::internet::public_address(internet.allocate()?);
                self.inner.host.with_attachment(|attachment| internet.route_also(attachment, public))?;
                Some((address, public))
            }
            _ => None,
        };
        self.change(|rules| {
            rules.hosts.push(address);
            rules.one_to_one.extend(public);
        })
    }

    fn change(&self, change: impl FnOnce(&mut Rules)) -> Result<()> {
        let mut rules = lock(&self.inner.rules);
        let mut changed = rules.clone();
        change(&mut changed);
        if changed.render() != rules.render() {
            self.apply(&changed)?;
        }
        *rules = changed;
        Ok(())
    }

    fn apply(&self, rules: &Rules) -> Result<()> {
        self.nft(&rules.render()).with_context(|| format!("cannot set the rules of {}", self.name()))
    }
}

/// Keeps frames between two hosts of the LAN from the router's rules and its losses, which they would pass where the module `br_netfilter`
/// is loaded (for Kubernetes, often).
fn keep_rules_off_bridges(router: &Namespace) -> Result<()> {
    router.run(|| {
        let switches = ["arptables", "iptables", "ip6tables"]
            .map(|table| format!("/proc/sys/net/bridge/bridge-nf-call-{table}"));
        switches
            .iter()
            .filter(|path| Path::new(path).exists())
            .try_for_each(|path| fs::write(path, "0").with_context(|| format!("cannot write 0 to {path}")))
    })?
}

/// Not the network's, the router's or the broadcast address.
fn lan_contains_host(lan: Ipv4Net, address: Ipv4Addr) -> bool {
    lan.contains(&address)
        && address != lan.network()
        && address != lan.broadcast()
        && address != lan_gateway(lan)
}

impl Deref for Router {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.inner.host
    }
}
