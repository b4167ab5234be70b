//! Segmentation and receive offload of the TUN interface (`IFF_VNET_HDR`, Documentation/networking/tuntap.rst), without I/O.
//!
//! A packet that the kernel gives in one read may be up to 64 KiB long: it still is to be cut into segments, and its checksum to be
//! completed. [`split()`] does both. In the other direction [`Merger`] joins consecutive packets of a flow, so that the kernel's network
//! stack is passed once for all of them. Each read and each write begins with a [`VnetHeader`], which says how.
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

/// See [`crate::split_read`].
pub(crate) fn split_read(read: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut read = read.to_vec();
    let (header, packet) = read.split_first_chunk_mut()?;
    let mut split = split(&VnetHeader::read(header), packet).ok()?;
    let next = || {
        let mut packet = Vec::with_capacity(split.max_length());
        split.append_next(&mut packet).then_some(packet)
    };
    Some(std::iter::from_fn(next).collect())
}

/// See [`crate::join_packets`].
pub(crate) fn join_packets(packets: &[Vec<u8>], udp: bool) -> Vec<Vec<u8>> {
    let mut merger = Merger::new(udp);
    let mut buffer = packets.concat();
    let mut start = 0_usize;
    for packet in packets {
        let end = start.saturating_add(packet.len());
        merger.push(&buffer, start..end);
        start = end;
    }
    merger.finish(&mut buffer);
    let write = |frame: Frame<'_>| {
        let parts = frame.parts.iter().filter_map(|part| buffer.get(part.clone()));
        std::iter::once(&frame.header[..]).chain(parts).flatten().copied().collect()
    };
    merger.frames().map(write).collect()
}

/// The value of a checksum field after one of the words it covers has changed from `before` to `after` (RFC 1624, equation 3).
pub(crate) fn sum_changed(checksum: u16, before: u16, after: u16) -> u16 {
    checksum::Sum::default().plus_word(!checksum).minus_word(before).plus_word(after).checksum()
}
