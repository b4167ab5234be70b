//! Sites: where hosts are.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use ipnet::{Ipv4Net, Ipv6Net};

use crate::host::{Host, HostOptions};
use crate::internet::{Attachment, FORWARDING, Uplink, routed_prefix6};
use crate::lab::Shared;
use crate::lock;
use crate::namespace::Namespace;
use crate::nat::{Nat, Rules, USUAL_LIFE};
use crate::router::Router;

/// Hosts whose address the lab chooses begin at this offset of the LAN.
const FIRST_HOST: u32 = 10;

/// Kind of IPv6 that a site has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Ipv6 {
    /// None.
    #[default]
    Off,
    /// A unique local prefix (RFC 4193) on the LAN, routed nowhere.
    Local(Ipv6Net),
    /// Public addresses: a routed /64 behind a router, which guards it with a stateful firewall.
    Global,
}

/// A site behind a router, before it is made.
#[derive(Debug, Clone)]
pub struct SiteOptions {
    /// Translation of IPv4 by the router.
    pub nat: Nat,
    /// The LAN's range; two sites may have the same. Public (as 198.51.100.0/24) if `nat` is [`Nat::None`].
    pub lan: Ipv4Net,
    /// The LAN's IPv6.
    pub ipv6: Ipv6,
    /// MTU of the uplink, bytes of an IP packet; 1500 if `None`.
    pub uplink_mtu: Option<u32>,
    /// The carrier (see [`crate::Lab::carrier`]) whose customer this is, rather than of the Internet directly.
    pub behind: Option<NatSite>,
}

impl SiteOptions {
    /// IPv4 only, full MTU, directly on the Internet.
    pub fn new(nat: Nat, lan: Ipv4Net) -> Self {
        Self { nat, lan, ipv6: Ipv6::Off, uplink_mtu: None, behind: None }
    }
}

/// A site whose hosts have public addresses and an uplink each. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PublicSite {
    shared: Arc<Shared>,
    name: Arc<str>,
    ipv6: bool,
}

impl PublicSite {
    pub(crate) fn new(shared: &Arc<Shared>, name: &str, ipv6: bool) -> Self {
        Self { shared: Arc::clone(shared), name: name.into(), ipv6 }
    }

    /// Name of the site.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a host with the interface `eth0`.
    ///
    /// # Errors
    /// The lab has ended, or its Internet is full.
    pub fn host(&self, name: &str) -> Result<Host> {
        self.host_with(name, &HostOptions::default())
    }

    /// Adds a host with choices. The lab chooses public addresses, so an address is an error.
    ///
    /// # Errors
    /// As [`PublicSite::host`].
    pub fn host_with(&self, name: &str, options: &HostOptions) -> Result<Host> {
        ensure!(options.address.is_none(), "cannot choose the public address of {name}: the lab chooses it");
        let namespace = self.shared.namespace(name)?;
        let uplink = Uplink { interface: "eth0", ipv6: self.ipv6, mtu: options.mtu, routed: None };
        let attachment = self.shared.internet.attach(&namespace, &uplink)?;
        Host::new(namespace, attachment, None, "")
    }
}

/// A site behind a router. Cheap to clone.
#[derive(Debug, Clone)]
pub struct NatSite {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    name: String,
    router: Router,
    next: Mutex<u32>,
}

impl NatSite {
    pub(crate) fn new(shared: &Arc<Shared>, name: &str, options: SiteOptions) -> Result<Self> {
        let SiteOptions { nat, lan, ipv6, uplink_mtu, behind } = options;
        let carrier = match (behind, nat) {
            (None, Nat::Cgnat) => Some(Self::carrier(shared, &format!("{name}-carrier"))?),
            (behind, _) => behind,
        };
        let direct = carrier.is_none();
        ensure!(
            direct || (ipv6 != Ipv6::Global && nat != Nat::None && nat != Nat::OneToOne),
            "a carrier gives {name} neither global IPv6 nor public IPv4 addresses"
        );
        let namespace = shared.namespace(&format!("{name}-router"))?;
        namespace.set_sysctls(FORWARDING)?;
        let (attachment, number) = if let Some(carrier) = &carrier {
            let address = carrier.next_address()?;
            (carrier.inner.router.attach(&namespace, "wan", address, uplink_mtu)?, None)
        } else {
            let routed = (nat == Nat::None).then_some(lan);
            let uplink = Uplink { interface: "wan", ipv6: ipv6 == Ipv6::Global, mtu: uplink_mtu, routed };
            let attachment = shared.internet.attach(&namespace, &uplink)?;
            let number = attachment.address.octets()[3];
            (attachment, Some(number))
        };
        let lan6 = match (ipv6, number) {
            (Ipv6::Local(prefix), _) => Some(prefix),
            (Ipv6::Global, Some(number)) => Some(routed_prefix6(number)),
            _ => None,
        };
        let rules = Rules {
            nat,
            wan: attachment.address,
            lan,
            hosts: Vec::new(),
            one_to_one: Vec::new(),
            mapping_life: USUAL_LIFE,
            generation: 0,
            ipv6_firewall: true,
        };
        let upstream = carrier.map(|carrier| carrier.inner.router.clone());
        let host = Host::new(namespace, attachment, upstream, "")?;
        let internet = direct.then(|| Arc::clone(&shared.internet));
        let router = Router::new(host, internet, lan6, rules)?;
        let shared = Arc::clone(shared);
        Ok(Self {
            inner: Arc::new(Inner { shared, name: name.to_owned(), router, next: Mutex::new(FIRST_HOST) }),
        })
    }

    /// A carrier that translates for its customers, whose routers live in 100.64.0.0/10 (RFC 6598).
    pub(crate) fn carrier(shared: &Arc<Shared>, name: &str) -> Result<Self> {
        let range = Ipv4Net::new_assert(Ipv4Addr::new(100, 64, 0, 0), 10);
        Self::new(shared, name, SiteOptions::new(Nat::PortRestricted, range))
    }

    /// Name of the site.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Router of the site.
    pub fn router(&self) -> &Router {
        &self.inner.router
    }

    /// Adds a host with the interface `eth0` and the next free address of the LAN.
    ///
    /// # Errors
    /// The lab has ended, or the LAN is full.
    pub fn host(&self, name: &str) -> Result<Host> {
        self.host_with(name, &HostOptions::default())
    }

    /// Adds a host with choices.
    ///
    /// # Errors
    /// As [`NatSite::host`]; or the address is taken, or not one of the LAN's hosts.
    pub fn host_with(&self, name: &str, options: &HostOptions) -> Result<Host> {
        let namespace = self.inner.shared.namespace(name)?;
        let (attachment, router) = self.attach(&namespace, options)?;
        Host::new(namespace, attachment, Some(router), "")
    }

    /// Makes a port of the LAN for the `eth0` of a namespace.
    pub(crate) fn attach(
        &self,
        namespace: &Namespace,
        options: &HostOptions,
    ) -> Result<(Attachment, Router)> {
        let address = match options.address {
            Some(address) => address,
            None => self.next_address()?,
        };
        let router = &self.inner.router;
        let attachment = router.attach(namespace, "eth0", address, options.mtu).with_context(|| {
            format!("cannot add the host {} to the site {}", namespace.name(), self.name())
        })?;
        Ok((attachment, router.clone()))
    }

    fn next_address(&self) -> Result<Ipv4Addr> {
        let lan = self.inner.router.lan();
        let mut next = lock(&self.inner.next);
        loop {
            let address = Ipv4Addr::from(u32::from(lan.network()).saturating_add(*next));
            ensure!(lan.contains(&address) && address < lan.broadcast(), "the LAN {lan} is full");
            *next = next.saturating_add(1);
            if !self.inner.router.has_host(address) {
                return Ok(address);
            }
        }
    }
}
