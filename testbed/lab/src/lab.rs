//! The lab itself: who owns everything.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ipnet::Ipv4Net;

use crate::delay::{Delay, SlowLink};
use crate::internet::Internet;
use crate::lock;
use crate::namespace::Namespace;
use crate::nat::Nat;
use crate::site::{NatSite, PublicSite, SiteOptions};

/// An Internet with sites. Dropping it ends every namespace and every process in them.
#[derive(Debug)]
pub struct Lab {
    shared: Arc<Shared>,
}

/// State of the lab that sites need to add hosts later.
#[derive(Debug)]
pub(crate) struct Shared {
    pub internet: Arc<Internet>,
    registry: Arc<Registry>,
}

/// All namespaces of one lab; `None` when the lab has ended.
#[derive(Debug)]
struct Registry(Mutex<Option<Vec<Namespace>>>);

impl Registry {
    fn namespace(&self, name: &str) -> Result<Namespace> {
        let valid = !name.is_empty() && name.len() <= 63 && name.bytes().all(is_host_name_byte);
        ensure!(valid, "{name:?} is no host name: 1 to 63 letters, digits and dashes");
        ensure!(lock(&self.0).is_some(), "cannot create {name}: its lab has ended");
        let namespace = Namespace::new(name)?;
        if let Some(all) = &mut *lock(&self.0) {
            all.push(namespace.clone());
            return Ok(namespace);
        }
        Namespace::destroy_all(&[namespace]);
        bail!("cannot create {name}: its lab ended meanwhile")
    }

    fn destroy(&self) {
        let all = lock(&self.0).take().unwrap_or_default();
        Namespace::destroy_all(&all);
    }
}

impl Drop for Registry {
    /// Also when making the lab failed before it finished.
    fn drop(&mut self) {
        self.destroy();
    }
}

fn is_host_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-'
}

impl Shared {
    pub(crate) fn namespace(&self, name: &str) -> Result<Namespace> {
        self.registry.namespace(name)
    }
}

impl Lab {
    /// Makes an Internet without sites.
    ///
    /// # Errors
    /// Not root, or `ip` is not installed.
    pub fn new() -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "the lab makes network namespaces: run it as root");
        // Every namespace mounts something private here, so the directory must exist outside.
        fs::create_dir_all("/run/wireguard").context("cannot create /run/wireguard")?;
        let registry = Arc::new(Registry(Mutex::new(Some(Vec::new()))));
        let internet = Arc::new(Internet::new(registry.namespace("internet")?)?);
        Ok(Self { shared: Arc::new(Shared { internet, registry }) })
    }

    /// The namespace that routes between all uplinks: a good place for `tcpdump -i any`.
    pub fn internet(&self) -> &Namespace {
        self.shared.internet.namespace()
    }

    /// Makes each packet between sites take so much longer, in each direction, until the handle is dropped.
    ///
    /// # Errors
    /// The kernel has no TUN devices.
    pub fn delay(&self, one_way: Duration) -> Result<Delay> {
        self.delay_with(one_way, &[])
    }

    /// The same with links that are slow.
    ///
    /// # Errors
    /// As [`Lab::delay`].
    pub fn delay_with(&self, one_way: Duration, slow: &[SlowLink]) -> Result<Delay> {
        Delay::start(self.internet(), one_way, slow).context("cannot delay packets on the Internet")
    }

    /// A site whose hosts have public IPv4 addresses.
    pub fn public_site(&self, name: &str) -> PublicSite {
        PublicSite::new(&self.shared, name, false)
    }

    /// A site whose hosts have public IPv4 and IPv6 addresses.
    pub fn dual_stack_site(&self, name: &str) -> PublicSite {
        PublicSite::new(&self.shared, name, true)
    }

    /// A site behind a router, IPv4 only.
    ///
    /// # Errors
    /// A program for the set-up is missing or fails; the error has its words.
    pub fn nat_site(&self, name: &str, nat: Nat, lan: Ipv4Net) -> Result<NatSite> {
        self.site(name, SiteOptions::new(nat, lan))
    }

    /// A site behind a router, with choices.
    ///
    /// # Errors
    /// As [`Lab::nat_site`]; or the choices contradict each other.
    pub fn site(&self, name: &str, options: SiteOptions) -> Result<NatSite> {
        NatSite::new(&self.shared, name, options).with_context(|| format!("cannot create the site {name}"))
    }

    /// A carrier whose customers share its public address: sites made with [`SiteOptions::behind`].
    ///
    /// # Errors
    /// As [`Lab::nat_site`].
    pub fn carrier(&self, name: &str) -> Result<NatSite> {
        NatSite::carrier(&self.shared, name).with_context(|| format!("cannot create the carrier {name}"))
    }

    /// A namespace with nothing but `lo`, attached to nothing: a pod before its network is made.
    ///
    /// # Errors
    /// As [`Lab::new`].
    pub fn bare_namespace(&self, name: &str) -> Result<Namespace> {
        self.shared.namespace(name)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Hosts and sites may outlive the lab as values; their namespaces do not.
        self.shared.registry.destroy();
    }
}
