//! Whether a link exists, without waiting for the kernel's lock of links.

use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// Function that the library's macro makes.
mod ioctl {
    use nix::libc;

    nix::ioctl_readwrite_bad!(name_of_index, libc::SIOCGIFNAME, libc::ifreq);
}

/// Whether the calling thread's network namespace has a link of that index. Unlike a netlink request, this takes no
/// lock (`SIOCGIFNAME`, `netdevice(7)`), so it is answered also while the kernel is busy with links. If the request itself
/// fails, the link counts as present.
#[expect(unsafe_code, reason = "ioctl is a system call on raw structures")]
pub fn link_exists(index: u32) -> bool {
    let Ok(index) = i32::try_from(index) else { return false };
    // Sockets of every family take this request.
    let Ok(any) = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None) else {
        return true;
    };
    // SAFETY: `ifreq` is plain data for which zeroes are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_ifindex = index;
    // SAFETY: the descriptor is open, and the kernel reads and writes only within the `ifreq`.
    let answer = unsafe { ioctl::name_of_index(any.as_raw_fd(), &raw mut request) };
    answer != Err(Errno::ENODEV)
}
