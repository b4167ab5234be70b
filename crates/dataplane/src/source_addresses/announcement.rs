//! Frames that tell the hosts of a network that an address is here: a gratuitous ARP request (RFC 5227, section 2.3) or an unsolicited
//! neighbour advertisement (RFC 4861, section 7.2.6). Hosts that know the address take the new link-layer address from it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fairlead_netlink::Result;
use fairlead_netlink::frames::FrameSocket;
use fairlead_netlink::route::MacAddress;
use fairlead_tunnel::checksum;

use super::Uplink;

/// `ETH_P_ARP`, `ETH_P_IPV6` (`linux/if_ether.h`).
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_IPV6: u16 = 0x86dd;
/// Ethernet, IPv4, lengths of their addresses, request (RFC 826).
const ARP_REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
/// `ff02::1`, and where Ethernet has it (RFC 2464, section 7).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: MacAddress = MacAddress([0x33, 0x33, 0, 0, 0, 1]);
const BROADCAST: MacAddress = MacAddress([0xff; 6]);
/// `IPPROTO_ICMPV6`; neighbour advertisement; its flags Router and Override; option "target link-layer address" of 8 bytes.
const ICMPV6: u8 = 58;
const ADVERTISEMENT: u8 = 136;
const ROUTER_AND_OVERRIDE: u8 = 0xa0;
const TARGET_LINK_LAYER: [u8; 2] = [2, 1];

/// Sends one frame for an address by an uplink.
///
/// # Errors
/// The link is gone or down.
pub fn announce(uplink: &Uplink, address: IpAddr) -> Result<()> {
    FrameSocket::open()?.send(uplink.link, &announcement(uplink, address))
}

/// The frame.
pub fn announcement(uplink: &Uplink, address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => gratuitous_arp(uplink.mac, address),
        IpAddr::V6(address) => advertisement(uplink, address),
    }
}

fn ethernet(to: MacAddress, from: MacAddress, kind: u16) -> Vec<u8> {
    [&to.0[..], &from.0, &kind.to_be_bytes()].concat()
}

fn gratuitous_arp(mac: MacAddress, address: Ipv4Addr) -> Vec<u8> {
    let header = ethernet(BROADCAST, mac, ETHERTYPE_ARP);
    let unknown = [0; 6];
    [&header[..], &ARP_REQUEST, &mac.0, &address.octets(), &unknown, &address.octets()].concat()
}

fn advertisement(uplink: &Uplink, address: Ipv6Addr) -> Vec<u8> {
    let source = uplink.link_local.unwrap_or(address);
    let message = |checksum: u16| {
        let [high, low] = checksum.to_be_bytes();
        let header = [ADVERTISEMENT, 0, high, low, ROUTER_AND_OVERRIDE, 0, 0, 0];
        [&header[..], &address.octets(), &TARGET_LINK_LAYER, &uplink.mac.0].concat()
    };
    let unsummed = message(0);
    let length = u16::try_from(unsummed.len()).unwrap_or_default();
    let pseudo_header =
        [&source.octets()[..], &ALL_NODES.octets(), &u32::from(length).to_be_bytes(), &[0, 0, 0, ICMPV6]];
    let sum = checksum(&[&pseudo_header.concat()[..], &unsummed].concat());
    // Version 6, no traffic class or flow label; the hop limit shows that no router forwarded it.
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([ICMPV6, 255]);
    let header = ethernet(ALL_NODES_MAC, uplink.mac, ETHERTYPE_IPV6);
    [&header[..], &packet, &source.octets(), &ALL_NODES.octets(), &message(sum)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uplink(link_local: Option<&str>) -> Uplink {
        Uplink {
            link: 2,
            name: "eth0".to_owned(),
            mac: MacAddress([2, 0, 0, 0, 0, 7]),
            link_local: link_local.map(|text| text.parse().unwrap()),
        }
    }

    #[test]
    fn a_gratuitous_arp_request_has_the_address_as_sender_and_target() {
        let frame = announcement(&uplink(None), "192.0.2.40".parse().unwrap());
        let expected =
            "ffffffffffff 020000000007 0806 0001 0800 06 04 0001 020000000007 c0000228 000000000000 c0000228";
        let hex: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected.replace(' ', ""));
    }

    #[test]
    fn an_advertisement_sums_to_zero_and_comes_from_the_link() {
        for (link_local, source) in [(Some("fe80::7"), "fe80::7"), (None, "2001:db8::40")] {
            let frame = announcement(&uplink(link_local), "2001:db8::40".parse().unwrap());
            assert_eq!(frame.len(), 14 + 40 + 32);
            let source: Ipv6Addr = source.parse().unwrap();
            assert_eq!(frame[22..38], source.octets());
            assert_eq!((frame[14 + 7], frame[54], frame[58]), (255, 136, 0xa0));
            let pseudo = [&frame[22..54], &32_u32.to_be_bytes(), &[0, 0, 0, 58]].concat();
            assert_eq!(checksum(&[&pseudo[..], &frame[54..]].concat()), 0);
        }
    }
}
