//! A machine with an address in the lab.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use anyhow::Result;

use crate::internet::Attachment;
use crate::lock;
use crate::namespace::Namespace;
use crate::router::Router;
use crate::site::NatSite;

/// Options of a host behind a router; by default the lab chooses.
#[derive(Debug, Clone, Default)]
pub struct HostOptions {
    /// IPv4 address; must be in the LAN's range and free.
    pub address: Option<Ipv4Addr>,
    /// MTU of its link, bytes of an IP packet.
    pub mtu: Option<u32>,
}

/// A machine of the lab: a [`Namespace`] with an address and a cable that can be pulled. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Host {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    namespace: Namespace,
    uplink: Mutex<Uplink>,
}

/// Link of the host, and the router behind which it is.
#[derive(Debug)]
struct Uplink {
    attachment: Attachment,
    router: Option<Router>,
}

impl Host {
    /// Configures the attachment inside, plus `more` lines of `ip -batch`.
    pub(crate) fn new(
        namespace: Namespace,
        attachment: Attachment,
        router: Option<Router>,
        more: &str,
    ) -> Result<Self> {
        namespace.ip(&format!("{}{more}", attachment.inside))?;
        let uplink = Mutex::new(Uplink { attachment, router });
        Ok(Self { inner: Arc::new(Inner { namespace, uplink }) })
    }

    /// IPv4 address of the host: public, or that on its LAN. Of a router: that on its `wan`.
    pub fn address(&self) -> Ipv4Addr {
        lock(&self.inner.uplink).attachment.address
    }

    /// IPv6 address of the host, if it has one.
    pub fn address6(&self) -> Option<Ipv6Addr> {
        lock(&self.inner.uplink).attachment.address6
    }

    /// The IPv4 address its packets carry on the Internet.
    pub fn public_address(&self) -> Ipv4Addr {
        match self.router() {
            Some(router) => router.public_address_for(self.address()),
            None => self.address(),
        }
    }

    /// The router it is behind, if it is.
    pub fn router(&self) -> Option<Router> {
        lock(&self.inner.uplink).router.clone()
    }

    /// Moves it to another site, as a machine that changes networks: its interface goes away with addresses and routes, and a new
    /// `eth0` comes up there, with the next free address. Its address at the old site stays taken.
    ///
    /// # Errors
    /// The lab has ended, the LAN of the site is full, or this is a router, which has no `eth0`.
    pub fn roam(&self, site: &NatSite) -> Result<()> {
        let mut uplink = lock(&self.inner.uplink);
        self.ip("link del eth0\n")?;
        let (attachment, router) = site.attach(self, &HostOptions::default())?;
        self.ip(&attachment.inside)?;
        *uplink = Uplink { attachment, router: Some(router) };
        Ok(())
    }

    /// Pulls its cable (of a router: the uplink). Addresses and routes inside stay, as on a real machine.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn partition(&self) -> Result<()> {
        lock(&self.inner.uplink).attachment.pull()
    }

    /// Plugs the cable in again.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn heal(&self) -> Result<()> {
        lock(&self.inner.uplink).attachment.plug()
    }

    /// Lets `change` work on the cable.
    pub(crate) fn with_attachment<T>(&self, change: impl FnOnce(&mut Attachment) -> T) -> T {
        change(&mut lock(&self.inner.uplink).attachment)
    }
}

impl Deref for Host {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.inner.namespace
    }
}
