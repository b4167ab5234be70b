//! Source addresses of Egresses: which ones the controller permits, in which slots, and the objects by which gateways hold them.
//!
//! The i-th IPv4 address and the i-th IPv6 address of `spec.sourceAddresses` are slot i, which keeps its number also when an address is
//! refused. A slot's Lease says which addresses it has: they are the Egress's as long as that is there, and [`REUSE`] longer.

mod objects;
mod permission;
mod plan;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::IpFamily;
use fairlead_api::resources::{EgressSourceAddress, EgressSpec, EgressStatus};

pub use objects::{
    ANNOTATION_ADDRESSES, ANNOTATION_MEMBER_PREFIX, ANNOTATION_SUCCESSOR, ROLE, SlotLease, addresses_of,
    asking_to_leave, gone_members, is_ours, lease_patch, leases, members_lease, role, role_binding,
    slot_lease, slot_of, source_lease,
};
pub use permission::{Claimed, Ranges, Refusal, permit};
pub use plan::{Plan, Resting, plan};

/// Time for which an address rests after the Lease that had it is gone: a gateway that hears of nothing any more stops its use within that.
pub const REUSE: Duration = Duration::from_secs(3);

/// The addresses of each slot, as they are listed. Texts that are no address are left out.
pub fn slots(listed: &[String]) -> Vec<Vec<IpAddr>> {
    let addresses: Vec<IpAddr> = listed.iter().filter_map(|text| text.parse().ok()).collect();
    let of = |family| addresses.iter().copied().filter(move |it| IpFamily::of(*it) == family);
    let (mut ipv4, mut ipv6) = (of(IpFamily::V4), of(IpFamily::V6));
    let next = || {
        let slot: Vec<IpAddr> = ipv4.next().into_iter().chain(ipv6.next()).collect();
        (!slot.is_empty()).then_some(slot)
    };
    std::iter::from_fn(next).collect()
}

/// The slots that the controller permits; `None` if the Egress asks for no source address. It may ask and have none: then no gateway may
/// send anything.
pub fn permitted(spec: &EgressSpec, status: Option<&EgressStatus>) -> Option<Vec<Vec<IpAddr>>> {
    spec.source_addresses.as_ref().filter(|listed| !listed.is_empty())?;
    let slots = status.map(|status| status.source_addresses.as_slice()).unwrap_or_default();
    Some(slots.iter().map(|slot| parsed(&slot.addresses)).collect())
}

fn parsed(texts: &[String]) -> Vec<IpAddr> {
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// Slots as the status lists them, each with the gateway pod that holds it.
pub fn status(slots: &[Vec<IpAddr>], holders: &[Option<String>]) -> Vec<EgressSourceAddress> {
    let holders = holders.iter().cloned().chain(std::iter::repeat(None));
    let slot = |(addresses, gateway): (&Vec<IpAddr>, Option<String>)| EgressSourceAddress {
        addresses: addresses.iter().map(ToString::to_string).collect(),
        gateway: gateway.filter(|_| !addresses.is_empty()),
    };
    slots.iter().zip(holders).map(slot).collect()
}
