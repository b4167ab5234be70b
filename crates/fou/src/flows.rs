//! The flows for which a gateway was chosen, read from the bytes of the map.

use std::net::{IpAddr, Ipv6Addr};

use crate::layout::{ChoiceBytes, FlowBytes};

/// A flow and its gateway. Where all flows of a client go to one gateway (`Service::by_client`), the client has an entry, too: its
/// destination is unspecified, and ports and protocol are 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// The service address the client sends to.
    pub service: IpAddr,
    /// Inner source.
    pub source: IpAddr,
    /// Inner destination.
    pub destination: IpAddr,
    /// Inner source port; 0 for protocols without ports and for fragments.
    pub source_port: u16,
    /// Inner destination port; 0 for protocols without ports and for fragments.
    pub destination_port: u16,
    /// Inner protocol number.
    pub protocol: u8,
    /// Address of the gateway that packets of the flow go to.
    pub gateway: IpAddr,
}

/// Reads `struct flow` and `struct choice`; `None` if the protocol is no protocol number.
pub(crate) fn read(flow: &FlowBytes, choice: &ChoiceBytes) -> Option<Flow> {
    let (service, rest) = take_address(flow)?;
    let (source, rest) = take_address(rest)?;
    let (destination, rest) = take_address(rest)?;
    let (source_port, rest) = rest.split_first_chunk()?;
    let (destination_port, rest) = rest.split_first_chunk()?;
    let protocol = u32::from_ne_bytes(rest.try_into().ok()?);
    Some(Flow {
        service,
        source,
        destination,
        source_port: u16::from_be_bytes(*source_port),
        destination_port: u16::from_be_bytes(*destination_port),
        protocol: protocol.try_into().ok()?,
        gateway: take_address(choice)?.0,
    })
}

fn take_address(bytes: &[u8]) -> Option<(IpAddr, &[u8])> {
    let (address, rest) = bytes.split_first_chunk::<16>()?;
    Some((IpAddr::V6(Ipv6Addr::from(*address)).to_canonical(), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::address;

    #[test]
    fn a_flow_is_read_back() {
        let [service, source, destination, gateway] =
            ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"].map(|text| text.parse::<IpAddr>().unwrap());
        let mut flow = [0; 56];
        for (place, ip) in flow.chunks_exact_mut(16).zip([service, source, destination]) {
            place.copy_from_slice(&address(ip));
        }
        flow[48..52].copy_from_slice(&[0x30, 0x39, 0, 80]);
        flow[52..].copy_from_slice(&6u32.to_ne_bytes());
        let mut choice = [0; 24];
        choice[..16].copy_from_slice(&address(gateway));
        let expected = Flow {
            service,
            source,
            destination,
            source_port: 12345,
            destination_port: 80,
            protocol: 6,
            gateway,
        };
        assert_eq!(read(&flow, &choice), Some(expected));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(flow: [u8; 32], more: [u8; 24], choice: [u8; 24]) {
            let mut bytes = [0; 56];
            bytes[..32].copy_from_slice(&flow);
            bytes[32..].copy_from_slice(&more);
            let _ = read(&bytes, &choice);
        }
    }
}
