//! Tunnel links: ifb links whose packets the programs encapsulate, and on which decapsulated packets arrive.

use std::net::IpAddr;

use fairlead_address::IpFamily;
use fairlead_api::fou;
use fairlead_api::names::IPV6_MIN_MTU;
use fairlead_netlink::Message;
use fairlead_netlink::route::{
    KIND_IFB, Link, RouteSocket, add_ifb, delete_link, disable_address_generation, set_mtu, set_up,
};

use crate::{Error, Result};

const WITHOUT_IFB: &str = "the kernel has no ifb links (CONFIG_IFB, module ifb)";

/// The name of the tunnel link to a peer, as Coil v2 forms it.
pub fn link_name(peer: IpAddr) -> String {
    fou::link_name(peer.to_canonical())
}

/// The MTU of a tunnel link of a family, in bytes, by that of the uplink.
pub fn link_mtu(family: IpFamily, uplink: u32) -> u32 {
    uplink.saturating_sub(fou::overhead(family))
}

/// Makes the tunnel link to a peer what it should be and returns its index; sends nothing if it is already.
pub(crate) fn ready(socket: &mut RouteSocket, uplink: &Link, peer: IpAddr) -> Result<u32> {
    let name = link_name(peer);
    let family = IpFamily::of(peer.to_canonical());
    let mtu = link_mtu(family, uplink.mtu);
    if family == IpFamily::V6 && mtu < IPV6_MIN_MTU {
        let reason = format!(
            "the MTU of {} is {}, and IPv6 in a tunnel needs at least {}",
            uplink.name,
            uplink.mtu,
            IPV6_MIN_MTU.saturating_add(fou::overhead(family))
        );
        return Err(Error::invalid(format!("add the tunnel link {name}"), reason));
    }
    let mut found = socket.link_by_name(&name)?;
    if let Some(other) = found.as_ref().filter(|link| link.kind.as_deref() != Some(KIND_IFB)) {
        let kind = other.kind.as_deref().unwrap_or("hardware");
        let reason = format!("a link of this name and of type {kind} exists; delete it");
        return Err(Error::invalid(format!("add the tunnel link {name}"), reason));
    }
    // Packets are addressed to the uplink's link-layer address, and an ifb link gets its own at its creation only.
    if let Some(outdated) = found.take_if(|link| link.mac != uplink.mac) {
        socket.apply(&[delete_link(outdated.index)])?;
    }
    let link = match found {
        Some(link) => link,
        None => create(socket, uplink, &name, mtu)?,
    };
    socket.apply(&corrections(&link, mtu))?;
    Ok(link.index)
}

fn create(socket: &mut RouteSocket, uplink: &Link, name: &str, mtu: u32) -> Result<Link> {
    let added = socket.apply(&[add_ifb(name, uplink.mac, mtu)]);
    added.map_err(|error| Error::netlink(error, WITHOUT_IFB))?;
    let missing = || Error::invalid(format!("add the tunnel link {name}"), "it vanished; try again");
    let link = socket.link_by_name(name)?.ok_or_else(missing)?;
    // A link-local address would only cause packets that no tunnel carries. A kernel without IPv6 has none.
    match socket.apply(&[disable_address_generation(link.index)]) {
        Err(error) if !error.is_unsupported() => Err(error.into()),
        _ => Ok(link),
    }
}

/// Messages that correct the MTU of a link and set it up, where needed.
fn corrections(link: &Link, mtu: u32) -> Vec<Message> {
    let mut messages = Vec::new();
    if link.mtu != mtu {
        messages.push(set_mtu(link.index, mtu));
    }
    if !link.up {
        messages.push(set_up(link.index, true));
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_coil() {
        let name = |text: &str| link_name(text.parse().unwrap());
        assert_eq!(name("10.68.12.49"), "fou4_0a440c31");
        assert_eq!(name("::ffff:10.68.12.49"), "fou4_0a440c31");
        // printf fd000068000000000000000000000049 | xxd -r -p | sha1sum
        assert_eq!(name("fd00:68::49"), "fou6_0d34716a");
    }

    #[test]
    fn a_link_leaves_room_for_the_outer_headers() {
        assert_eq!(IpFamily::BOTH.map(|family| link_mtu(family, 1450)), [1422, 1402]);
        assert_eq!(link_mtu(IpFamily::V6, 20), 0);
    }
}
