//! Segmentation and receive offload of the TUN interface (`IFF_VNET_HDR`, Documentation/networking/tuntap.rst), without I/O.
//!
//! What the kernel gives in one read may be a packet of up to 64 KiB that still is to be cut into segments, and whose checksum is
//! still to be completed: [`split()`] does both. In the other direction [`Merger`] joins consecutive packets of a flow, so that the
//! kernel's network stack is passed once for all of them. Each read and each write begins with a [`VnetHeader`], which says how.
//!
//! Both follow the kernel's own code for the same work: `net/ipv4/{af_inet,tcp_offload,udp_offload}.c`, `net/ipv6/ip6_offload.c`
//! and `include/linux/virtio_net.h`. Splitting a packet that was joined gives the packets that it was joined from.

mod checksum;
mod header;
mod layout;
mod merge;
mod split;
#[cfg(test)]
mod tests;

pub(crate) use header::{LENGTH as HEADER_LENGTH, VnetHeader};
pub(crate) use merge::{Frame, MAX_SEGMENTS, Merger};
pub(crate) use split::{Split, split};

/// The value of a checksum field after one of the words it covers has changed from `before` to `after` (RFC 1624, equation 3).
pub(crate) fn sum_changed(checksum: u16, before: u16, after: u16) -> u16 {
    checksum::Sum::default().plus_word(!checksum).minus_word(before).plus_word(after).checksum()
}
