//! Fairlead's netlink: requests to the kernel, in batches, with the kernel's own error texts.
//!
//! * [`Socket`]: one blocking netlink socket, in the network namespace of the thread that opens it. Requests are
//!   sent in batches and acknowledged; errors carry the kernel's extended message and the caller's description.
//! * [`netns`]: files of network namespaces, and running a closure inside one.
//! * [`route`]: links, addresses, routes and rules (`rtnetlink(7)`).
//! * [`frames`]: whole Ethernet frames, sent by a link (`packet(7)`).
//! * [`conntrack`]: tracked connections (`linux/netfilter/nfnetlink_conntrack.h`).
//! * [`nftables`]: tables, chains, sets and rules (`linux/netfilter/nf_tables.h`).
//! * [`replies`]: the decoders alone, for bytes of another origin.
//! * [`wireguard`]: the kernel's WireGuard (`linux/wireguard.h`).
//! * [`xtables`]: the forward chain of iptables-legacy, which is no netlink; only read.
//!
//! It decides nothing: `dataplane` compares the actual with the desired state and passes the difference down. Calls block
//! for microseconds; there is no async here. Every message that changes something is counted ([`changes_sent`]), so
//! that tests and metrics can show that an unchanged state sends nothing.
//!
//! The socket is our own and blocks; messages of `rtnetlink(7)` are those of `netlink-packet-route`. A batch of nftables is one
//! `send` of up to 4 MB (100,000 prefixes), for which the send buffer has to exceed `net.core.wmem_max`; an error has to say which
//! message of the batch failed, with the kernel's extended text; and adding a pod must not wait for a runtime. `rtnetlink` is
//! asynchronous and returns bare errnos unless its socket is set up and the TLVs are parsed by hand. `netlink-sys` or `neli` would
//! replace the system calls of [`Socket`], not its batches and dumps, nor the encoders of nftables and WireGuard.

pub mod conntrack;
mod error;
pub mod frames;
pub mod netns;
pub mod nftables;
pub mod replies;
pub mod route;
mod socket;
pub mod wireguard;
pub mod xtables;

pub use error::{Error, Result};
pub use socket::{Family, Message, Reply, Socket, changes_sent};
