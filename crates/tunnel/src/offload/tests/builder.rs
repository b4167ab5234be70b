//! Builds packets field by field, with all checksums, without anything of the code that is tested.

use proptest::prelude::*;

use super::reference::slow_sum;

/// A packet of TCP or UDP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) v6: bool,
    pub(super) tcp: bool,
    /// The last byte of the source address.
    pub(super) host: u8,
    pub(super) port: u16,
    pub(super) payload: Vec<u8>,
    pub(super) sequence: u32,
    pub(super) acknowledgment: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
    pub(super) urgent: u16,
    /// Options of TCP, a multiple of four bytes.
    pub(super) options: Vec<u8>,
    pub(super) id: u16,
    /// The flags and the offset of a fragment.
    pub(super) fragment: u16,
    pub(super) ttl: u8,
    /// Type of service, or traffic class.
    pub(super) service: u8,
    pub(super) flow_label: u16,
    /// IPv4 options, or an IPv6 extension header.
    pub(super) extension: bool,
    /// Number that is added to the transport checksum.
    pub(super) damage: u16,
}

pub(super) const DONT_FRAGMENT: u16 = 0x4000;
pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const PSH: u8 = 8;
pub(super) const ACK: u8 = 16;
pub(super) const URG: u8 = 32;
pub(super) const ECE: u8 = 64;
pub(super) const CWR: u8 = 128;

impl Spec {
    pub(super) fn new(v6: bool, tcp: bool, length: usize) -> Self {
        Self {
            v6,
            tcp,
            host: 1,
            port: 5000,
            payload: (0..length).map(|at| (at * 7 + at / 256) as u8).collect(),
            sequence: 0xffff_f000,
            acknowledgment: 77,
            flags: ACK,
            window: 500,
            urgent: 0,
            options: if tcp { vec![1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2] } else { vec![] },
            id: 0xfffe,
            fragment: 0,
            ttl: 64,
            service: 0,
            flow_label: 9,
            extension: false,
            damage: 0,
        }
    }

    /// A datagram or segment that follows this one at once, of as many bytes.
    pub(super) fn next(&self) -> Self {
        let sequence = self.sequence.wrapping_add(self.payload.len() as u32);
        Self { sequence, id: self.id.wrapping_add(1), ..self.clone() }
    }

    /// This one and those that follow it.
    pub(super) fn train(&self, count: usize) -> Vec<Self> {
        std::iter::successors(Some(self.clone()), |spec| Some(spec.next())).take(count).collect()
    }

    pub(super) fn addresses(&self) -> Vec<u8> {
        let [mut source, mut destination] = [[0; 16]; 2];
        (source[0], source[15], destination[0], destination[15]) = (0xfd, self.host, 0xfd, 200);
        let start = if self.v6 { 0 } else { 12 };
        [&source[start..], &destination[start..]].concat()
    }

    pub(super) fn protocol(&self) -> u8 {
        if self.tcp { 6 } else { 17 }
    }

    /// Bytes before the TCP or UDP header.
    pub(super) fn ip_header(&self) -> usize {
        let length = if self.v6 { 40 } else { 20 };
        length + if self.extension { 8 } else { 0 }
    }

    /// Bytes of all headers.
    pub(super) fn headers(&self) -> usize {
        self.ip_header() + if self.tcp { 20 + self.options.len() } else { 8 }
    }

    /// Offset of the transport checksum.
    pub(super) fn checksum_at(&self) -> usize {
        self.ip_header() + if self.tcp { 16 } else { 6 }
    }

    /// The sum of the pseudo-header, with the length.
    pub(super) fn pseudo_sum(&self) -> u16 {
        let length = (self.build_transport().len() as u32).to_be_bytes();
        slow_sum(&[self.addresses(), vec![0, self.protocol()], length.to_vec()].concat())
    }

    /// With all checksums.
    pub(super) fn build(&self) -> Vec<u8> {
        let mut packet = [self.build_ip(), self.build_transport()].concat();
        let pseudo = self.pseudo_sum();
        let sum = slow_sum(&[&pseudo.to_be_bytes(), &packet[self.ip_header()..]].concat());
        let checksum = if !self.tcp && sum == 0xffff { 0xffff } else { !sum };
        let at = self.checksum_at();
        packet[at..at + 2].copy_from_slice(&checksum.wrapping_add(self.damage).to_be_bytes());
        packet
    }

    /// As the kernel leaves it to an offload: with the sum of the pseudo-header instead of the checksum.
    pub(super) fn build_partial(&self) -> Vec<u8> {
        let mut packet = self.build();
        let at = self.checksum_at();
        packet[at..at + 2].copy_from_slice(&self.pseudo_sum().to_be_bytes());
        packet
    }

    fn build_ip(&self) -> Vec<u8> {
        let length = self.build_transport().len() + self.ip_header();
        let [length_v4, length_v6] = [length as u16, length.saturating_sub(40) as u16].map(u16::to_be_bytes);
        let [id, fragment, label] = [self.id, self.fragment, self.flow_label].map(u16::to_be_bytes);
        let mut header = if self.v6 {
            let next = if self.extension { 60 } else { self.protocol() };
            let [service_high, service_low] = [self.service >> 4, self.service << 4];
            let start = [0x60 | service_high, service_low, label[0], label[1], length_v6[0], length_v6[1]];
            [&start[..], &[next, self.ttl]].concat()
        } else {
            let words = (self.ip_header() / 4) as u8;
            let start = [0x40 | words, self.service, length_v4[0], length_v4[1]];
            [&start[..], &id, &fragment, &[self.ttl, self.protocol(), 0, 0]].concat()
        };
        header.extend(self.addresses());
        match (self.extension, self.v6) {
            (false, _) => {}
            (true, true) => header.extend([self.protocol(), 0, 1, 4, 0, 0, 0, 0]),
            (true, false) => header.extend([1; 8]),
        }
        if !self.v6 {
            let checksum = !slow_sum(&header);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        header
    }

    /// Without its checksum.
    fn build_transport(&self) -> Vec<u8> {
        let mut transport = [self.port.to_be_bytes(), 443_u16.to_be_bytes()].concat();
        if self.tcp {
            transport.extend(self.sequence.to_be_bytes());
            transport.extend(self.acknowledgment.to_be_bytes());
            transport.extend([((5 + self.options.len() / 4) as u8) << 4, self.flags]);
            transport.extend(self.window.to_be_bytes());
            transport.extend([0, 0]);
            transport.extend(self.urgent.to_be_bytes());
            transport.extend(&self.options);
        } else {
            transport.extend(((8 + self.payload.len()) as u16).to_be_bytes());
            transport.extend([0, 0]);
        }
        transport.extend(&self.payload);
        transport
    }
}

/// One of a few flows, with any content.
pub(super) fn any_spec() -> impl Strategy<Value = Spec> {
    let kind = (any::<bool>(), any::<bool>(), 0..2_u8, 0..2_u16, any::<bool>());
    let content = (prop::collection::vec(any::<u8>(), 0..40), any::<u32>(), any::<u16>(), 0..4_usize);
    (kind, content).prop_map(|((v6, tcp, host, port, dont_fragment), (payload, sequence, id, options))| {
        Spec {
            host,
            port: 5000 + port,
            payload,
            sequence,
            id,
            options: if tcp { vec![1; options * 4] } else { vec![] },
            fragment: if dont_fragment { DONT_FRAGMENT } else { 0 },
            ..Spec::new(v6, tcp, 0)
        }
    })
}
