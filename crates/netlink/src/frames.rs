//! Whole Ethernet frames, sent by a link of this network namespace (`packet(7)`). Nothing is received.

use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::{Error, Result};

/// A socket that sends frames. It is of no protocol, so the kernel gives it none.
#[derive(Debug)]
pub struct FrameSocket(OwnedFd);

impl FrameSocket {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// No `CAP_NET_RAW`, or descriptors ran out.
    pub fn open() -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let opened = socket(AddressFamily::Packet, SockType::Raw, flags, None);
        opened.map(Self).map_err(|errno| Error::socket("socket", errno))
    }

    /// Sends one frame, which begins with its Ethernet header, by the link of this index.
    ///
    /// # Errors
    /// The link is gone or down, the frame is too long for it, or its queue is full.
    #[expect(unsafe_code, reason = "nix cannot make an address of a link")]
    pub fn send(&self, link: u32, frame: &[u8]) -> Result<()> {
        // SAFETY: all bytes zero is a value of this structure of integers.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_ifindex = link.cast_signed();
        address.sll_halen = 6;
        // SAFETY: frame and address outlive the call, and their sizes are passed.
        let sent = unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if sent < 0 { Err(Error::socket("send a frame", Errno::last())) } else { Ok(()) }
    }
}
