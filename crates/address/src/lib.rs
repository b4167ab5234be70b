//! Arithmetic on IP addresses and prefixes, for every crate that decides about them.
//!
//! * [`DualStack`]: one value per address family, at most.
//! * [`IntervalSet`], [`PrefixSet`]: sets of addresses as sorted intervals; union, difference, overlap, and the fewest
//!   prefixes that cover them.
//! * [`InterfaceId`]: the second half of an IPv6 address.
//! * [`Endpoint`]: an address or a DNS name, with a port.
//! * [`AddressFilter`]: ordered lists of prefixes that say which addresses count.
//! * [`is_private`], [`is_reachable`], [`unusable`]: the special-purpose addresses of RFC 6890.
//! * [`Nat64Prefix`]: IPv4 addresses inside IPv6 addresses, for networks that translate between both.
//!
//! A leaf: it uses no other crate of Fairlead, does no I/O and resolves no names. Kubernetes fields are parsed in
//! `fairlead-api`; which address or prefix is whose is decided in `fairlead-ipam` and `fairlead-topology`.

mod class;
mod dual_stack;
mod endpoint;
mod family;
mod filter;
mod interface_id;
mod interval;
mod nat64;
mod prefix;

pub use class::{UnusablePrefix, canonical, is_private, is_reachable, unusable, usable_parts};
pub use dual_stack::{DualStack, DualStackAddrs, DualStackNets};
pub use endpoint::{Endpoint, InvalidEndpoint};
pub use family::IpFamily;
pub use filter::{AddressFilter, EndpointFilters, FilterEntry, InvalidFilterEntry};
pub use interface_id::{InterfaceId, InvalidInterfaceId};
pub use interval::{Interval, IntervalSet};
pub use nat64::{IPV4_ONLY_NAME, InvalidNat64Prefix, Nat64, Nat64Prefix, without_nat64};
pub use prefix::{PrefixSet, is_host, octets, overlap};
