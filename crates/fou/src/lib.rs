//! Foo-over-UDP tunnels between the pods of an egress gateway and its clients, and the choice of a gateway for each flow.
//!
//! The kernel's modules fou, ipip and ip6_tunnel do the same on kernels that have them, and both understand each other:
//! IPv4 in IPv4 and IPv6 in IPv6 behind a UDP header (`FOU_ENCAP_DIRECT`, `linux/fou.h`). Here two tc classifiers
//! (`bpf/fou.bpf.c`) encapsulate and decapsulate; a tunnel is an ifb link with the name that Coil v2 would give it.
//!
//! * [`Tunnels`]: the programs at an uplink, their maps, and the tunnel links, in one network namespace.
//! * [`Programs`]: the programs before they are attached, which may be loaded ahead.
//! * [`TunnelLink`], [`Peer`], [`Service`](fairlead_api::fou::Service): what the maps hold. Callers pass the whole desired state; what differs is changed.
//! * [`Counter`], [`Counters`], [`Flow`]: what the programs report.
//!
//! The kernel holds everything: filters, programs and maps stay when the process ends, and the next one adopts them by the
//! filters of the uplink. Nothing is pinned. It decides no policy: which pods are gateways or clients, and what may leave, is
//! the caller's. Routes, rules and masquerading are the caller's, too.
//!
//! A process that cannot adopt loads programs with maps of its own, fills them, and replaces the earlier ones ([`Tunnels::load`],
//! [`Tunnels::attach`]).
//!
//! Loading needs `CAP_BPF` and `CAP_NET_ADMIN`; adopting needs `CAP_SYS_ADMIN`, since the kernel opens programs by ID for no
//! other capability. The kernel needs `CONFIG_BPF_SYSCALL`, `CONFIG_NET_CLS_BPF`, `CONFIG_NET_SCH_INGRESS` and `CONFIG_IFB`.

mod counters;
mod difference;
mod error;
mod flows;
mod kernel;
mod layout;
mod links;
mod tunnels;

pub use counters::{ClientTraffic, Counter, Counters};
pub use error::{Error, Result};
pub use flows::Flow;
pub use layout::{MAX_ALLOWED, MAX_CLIENTS, MAX_ORIGINS, Peer, Settings, TunnelLink};
pub use links::{link_mtu, link_name};
pub use tunnels::{Programs, Tunnels, is_own_filter};

#[cfg(test)]
mod tests;
