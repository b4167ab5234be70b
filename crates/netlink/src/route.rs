//! Links, addresses, routes, rules, neighbours and BPF classifiers (`rtnetlink(7)`).
//!
//! The vocabulary ([`Link`], [`Address`], [`Route`], [`Rule`]) is our own; the wire format comes from
//! `netlink-packet-route` and stays behind this module, because that library changes often. What is to be changed is
//! built as [`Message`](crate::Message)s, so that callers send many at once; what is there is read by [`RouteSocket`],
//! and [`Subscription`] reports when it changes.
//!
//! Reading takes from each kernel message only the attributes we know and skips the rest: an exotic route or device
//! of other software must not make a dump unreadable.

mod changes;
mod decode;
mod dumps;
mod exists;
mod filters;
mod proxies;
mod types;
mod watch;

pub use changes::{
    KIND_IFB, KIND_IP6TNL, KIND_IPIP, VethEnd, add_address, add_ifb, add_ip_tunnel, add_route, add_rule,
    add_veth, delete_address, delete_link, delete_neighbour, delete_route, delete_rule,
    disable_address_generation, permanent_neighbour, presumed_neighbour, replace_address, replace_route,
    set_alias, set_group, set_mtu, set_name, set_up,
};
pub use dumps::RouteSocket;
pub use exists::link_exists;
pub(crate) use filters::count_filters;
pub use filters::{BpfFilter, FilterHook, FilterPlace, add_clsact, delete_bpf_filter, set_bpf_filter};
pub use proxies::{Proxy, add_proxy, delete_proxy};
pub use types::{
    Address, AddressFlags, IpFamily, Link, LinkLayer, MacAddress, Mark, Netconf, NextHop, Route, RouteKind,
    Rule, Scope, TABLE_DEFAULT, TABLE_LOCAL, TABLE_MAIN, Transport, TunnelEnds,
};
pub(crate) use watch::count_changes;
pub use watch::{Change, ChangeSignal, Subscription};

#[cfg(test)]
mod tests;
