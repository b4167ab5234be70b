//! An Internet in network namespaces, for tests and the demo.
//!
//! A [`Lab`] owns one Internet (203.0.113.0/24 and 2001:db8::/32) and the sites attached to it: public ones, and ones
//! behind a router with any kind of NAT ([`Nat`]) and any private range, also the same range twice. Every uplink is a
//! routed point-to-point link, as providers do it, so a small uplink MTU is answered by ICMP and no two sites look
//! as if they shared a LAN. Faults are switches that work while traffic flows: loss, a blackholed UDP port, firewalls,
//! a cable pulled, a mapping lost, an address changed.
//!
//! It is not a simulator: packets run through the kernel of the machine, so there is no control of time. [`Lab::delay`] makes the way
//! between sites longer, [`Lab::delay_with`] also slower.
//!
//! Everything is reached by handle. Namespaces have no name in the file system; each is held by a small process that
//! ends, and kills whatever runs in its namespace, when its owner drops the lab, panics, or is killed by SIGKILL. So
//! labs of parallel tests and processes never meet.
//!
//! ```no_run
//! use testbed_lab::{Lab, Nat};
//!
//! # fn main() -> anyhow::Result<()> {
//! let lab = Lab::new()?;
//! let cloud = lab.public_site("cloud").host("cloud-1")?;
//! let home = lab.nat_site("home", Nat::PortRestricted, "192.168.1.0/24".parse()?)?;
//! let host = home.host("home-1")?;
//! host.shell(&format!("ping -c 1 {}", cloud.address()))?;
//! home.router().rebind()?;
//! println!("to inspect it: {}", host.enter_command());
//! # Ok(())
//! # }
//! ```
//!
//! Input: what a test asks for. Output: namespaces, set up by the programs `ip`, `nft`, `conntrack` and `sh`; needs root.

mod delay;
pub mod discovery;
mod dns;
mod faults;
mod host;
mod internet;
mod lab;
mod namespace;
mod nat;
mod nat64;
mod place;
mod process;
mod programs;
mod progress;
pub mod relay;
mod router;
mod site;
pub mod traffic;

pub use delay::{Delay, SlowLink};
pub use dns::Dns;
pub use faults::Faults;
pub use host::{Host, HostOptions};
pub use lab::Lab;
pub use namespace::Namespace;
pub use nat::Nat;
pub use nat64::Nat64;
pub use place::{ForeignNetwork, Place};
pub use process::Process;
pub use programs::{eventually, executable};
pub use progress::Progress;
pub use router::Router;
pub use site::{Ipv6, NatSite, PublicSite, SiteOptions};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A panic in one test thread must not keep the others from cleaning up, so poison is ignored.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
