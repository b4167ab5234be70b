//! `struct virtio_net_hdr` (include/uapi/linux/virtio_net.h; virtio 1.2, section 5.1.6), as a TUN interface uses it.

/// Bytes of the header without the number of merged buffers, the default of `TUNSETVNETHDRSZ`.
pub(crate) const LENGTH: usize = 10;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the checksum field holds only the sum of the pseudo-header; what covers everything from
/// `checksum_start` to the end is still to be computed.
pub(crate) const NEEDS_CHECKSUM: u8 = 1;

/// `VIRTIO_NET_HDR_GSO_NONE`: the packet is not to be cut.
pub(crate) const GSO_NONE: u8 = 0;
/// `VIRTIO_NET_HDR_GSO_TCPV4`: TCP over IPv4.
pub(crate) const GSO_TCPV4: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_TCPV6`: TCP over IPv6.
pub(crate) const GSO_TCPV6: u8 = 4;
/// `VIRTIO_NET_HDR_GSO_UDP_L4`: UDP over IPv4 or IPv6; each segment is a datagram of its own.
pub(crate) const GSO_UDP_L4: u8 = 5;
/// `VIRTIO_NET_HDR_GSO_ECN`: a bit beside a TCP type. The first segment has CWR (RFC 3168).
pub(crate) const GSO_ECN: u8 = 0x80;

/// `struct virtio_net_hdr`: what is still to be done with the packet behind it. By default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct VnetHeader {
    /// [`NEEDS_CHECKSUM`]; others are of no use to a reader or writer of a TUN.
    pub(crate) flags: u8,
    /// One of the `GSO_` types, perhaps with [`GSO_ECN`].
    pub(crate) gso_type: u8,
    /// Bytes of all headers of the packet. In what is read only a hint: the kernel may give what lies in one piece of memory.
    pub(crate) header_length: u16,
    /// Bytes of payload in each segment; the last one may have fewer.
    pub(crate) segment_size: u16,
    /// Offset in the packet from which on the checksum covers it: where the transport header begins.
    pub(crate) checksum_start: u16,
    /// Offset of the checksum field behind `checksum_start`.
    pub(crate) checksum_offset: u16,
}

impl VnetHeader {
    /// Reads the header, whose fields are of the byte order of this host (`TUNSETVNETLE` and `TUNSETVNETBE` were not set).
    pub(crate) fn read(bytes: &[u8; LENGTH]) -> Self {
        let [flags, gso_type, h0, h1, s0, s1, c0, c1, o0, o1] = *bytes;
        Self {
            flags,
            gso_type,
            header_length: u16::from_ne_bytes([h0, h1]),
            segment_size: u16::from_ne_bytes([s0, s1]),
            checksum_start: u16::from_ne_bytes([c0, c1]),
            checksum_offset: u16::from_ne_bytes([o0, o1]),
        }
    }

    /// The header as the kernel takes it; see [`Self::read`].
    pub(crate) fn write(&self) -> [u8; LENGTH] {
        let [h0, h1] = self.header_length.to_ne_bytes();
        let [s0, s1] = self.segment_size.to_ne_bytes();
        let [c0, c1] = self.checksum_start.to_ne_bytes();
        let [o0, o1] = self.checksum_offset.to_ne_bytes();
        [self.flags, self.gso_type, h0, h1, s0, s1, c0, c1, o0, o1]
    }
}
