//! The TUN interface: `linux/if_tun.h`, Documentation/networking/tuntap.rst.
//!
//! With each packet goes a [`VnetHeader`], so that the kernel need not cut large packets and complete checksums before it hands them
//! over, and takes large ones: [`crate::offload`] does both. A kernel that offers less is served without.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::errno::Errno;
use nix::libc;
use socket2::{Domain, Socket, Type};

use crate::Error;
use crate::offload::{Frame, HEADER_LENGTH};

mod ioctl {
    use nix::libc;

    nix::ioctl_write_ptr_bad!(tun_set_interface, libc::TUNSETIFF, libc::ifreq);
    nix::ioctl_write_int_bad!(tun_set_persist, libc::TUNSETPERSIST);
    nix::ioctl_write_int_bad!(tun_set_offload, libc::TUNSETOFFLOAD);
    nix::ioctl_write_ptr_bad!(tun_set_header_length, libc::TUNSETVNETHDRSZ, libc::c_int);
    nix::ioctl_write_ptr_bad!(set_mtu, libc::SIOCSIFMTU, libc::ifreq);
    nix::ioctl_write_ptr_bad!(set_queue_length, super::SIOCSIFTXQLEN, libc::ifreq);
}

/// `linux/sockios.h`.
const SIOCSIFTXQLEN: libc::c_int = 0x8943;
/// Packets that the kernel keeps while this process does not read: as many as for its own WireGuard devices (`DEFAULT_TX_QUEUE_LEN`),
/// where the default of a TUN is 500. A node program that shares a processor with much else does not read for up to 2.6 s while it is
/// upgraded, and what does not fit is lost.
const QUEUE_LENGTH: libc::c_int = 1_000;

/// Buffers of one write: a header and the parts of a packet.
const MAX_PARTS: usize = 1 + crate::offload::MAX_SEGMENTS;
/// Offloads of TCP that the kernel may leave to this process: `TUN_F_CSUM`, `TUN_F_TSO4` and `TUN_F_TSO6`.
const TCP_OFFLOADS: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
/// `TUN_F_USO4` and `TUN_F_USO6`, since Linux 6.2.
const UDP_OFFLOADS: libc::c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// Offloads that an interface was agreed to carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Offloads {
    /// Packets have no header. So it is only with an interface that another process has attached.
    #[default]
    None,
    /// Each packet has a header of [`HEADER_LENGTH`] bytes before it. Large packets of TCP may be written.
    Header,
    /// Large packets of UDP are read as well, and may be written.
    HeaderAndUdp,
}

impl Offloads {
    /// Whether each packet has a header of [`HEADER_LENGTH`] bytes before it.
    pub(crate) fn has_header(self) -> bool {
        self != Self::None
    }
}

/// An attached TUN interface. Dropping it leaves the interface, its addresses and its routes.
pub(crate) struct Tun {
    file: File,
    name: String,
    offloads: Offloads,
}

impl Tun {
    /// Attaches to the interface `name` (checked by the caller), creating it if there is none, and sets its MTU.
    pub(crate) fn open(name: &str, mtu: u16) -> Result<Self, Error> {
        let mut tun = Self { file: open_tun()?, name: name.to_owned(), offloads: Offloads::default() };
        let failed = |errno: Errno| Error::AttachTun { name: name.to_owned(), source: errno.into() };
        match tun.attach(libc::IFF_VNET_HDR) {
            Ok(_) => {
                tun.operate("setting the length of packet headers", || tun.set_header_length())?;
                tun.offloads = tun.agree_on_offloads()?;
            }
            // Not every kernel that calls itself Linux has headers.
            Err(Errno::EINVAL) => {
                tun.attach(0).map_err(failed)?;
                tracing::info!(interface = name, "the kernel offers no offloads for TUN interfaces");
            }
            Err(errno) => return Err(failed(errno)),
        }
        tun.operate("making it persistent", || tun.set_persist(true))?;
        tun.operate("setting the MTU", || tun.set_mtu(mtu))?;
        tun.operate("setting the length of its queue", || tun.set_queue_length())?;
        Ok(tun)
    }

    /// Adopts the attached descriptor of another process for the interface `name`, and sets its MTU. The length of its queue stays: to
    /// change it loses packets (`dev_qdisc_change_tx_queue_len` replaces what holds them). `has_header`: it was attached with
    /// headers before its packets, which cannot be changed while it is.
    pub(crate) fn adopt(
        name: &str,
        (descriptor, has_header): (OwnedFd, bool),
        mtu: u16,
    ) -> Result<Self, Error> {
        let mut tun = Self { file: descriptor.into(), name: name.to_owned(), offloads: Offloads::default() };
        if has_header {
            tun.offloads = tun.agree_on_offloads()?;
        }
        tun.operate("setting the MTU", || tun.set_mtu(mtu))?;
        Ok(tun)
    }

    /// Offloads that the kernel agreed to.
    pub(crate) fn offloads(&self) -> Offloads {
        self.offloads
    }

    /// Asks for all, then for less.
    fn agree_on_offloads(&self) -> Result<Offloads, Error> {
        for (offloads, features) in
            [(Offloads::HeaderAndUdp, TCP_OFFLOADS | UDP_OFFLOADS), (Offloads::Header, TCP_OFFLOADS)]
        {
            if self.set_offload(features).is_ok() {
                return Ok(offloads);
            }
        }
        tracing::info!(interface = self.name, "the kernel offers no offloads for TUN interfaces");
        // Another process may have left some on.
        self.operate("switching offloads off", || self.set_offload(0))?;
        Ok(Offloads::Header)
    }

    /// Makes another interface, which is gone when this returns.
    pub(crate) fn check() -> Result<(), Error> {
        // The kernel puts the first free number in.
        let tun = Self { file: open_tun()?, name: "fairlead%d".to_owned(), offloads: Offloads::default() };
        tun.operate("making a TUN interface", || tun.attach(0))
    }

    /// Removes the interface, unless another program has done so.
    pub(crate) fn delete(self) -> Result<(), Error> {
        self.operate("removing it", || match self.set_persist(false) {
            Err(Errno::EBADFD) => Ok(0),
            result => result,
        })
    }

    /// Reads one packet, behind its header if [`Offloads::has_header`]; `WouldBlock` when there is none.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(buffer)
    }

    /// Writes one packet, which lies in parts of `buffer`.
    pub(crate) fn write(&self, frame: &Frame<'_>, buffer: &[u8]) -> io::Result<()> {
        let mut slices = [IoSlice::new(&[]); MAX_PARTS];
        let header = if self.offloads.has_header() { &frame.header[..] } else { &[] };
        let parts =
            frame.parts.iter().map(|part: &Range<usize>| buffer.get(part.clone()).unwrap_or_default());
        let mut used = 0_usize;
        for (slot, part) in slices.iter_mut().zip(std::iter::once(header).chain(parts)) {
            *slot = IoSlice::new(part);
            used = used.saturating_add(1);
        }
        (&self.file).write_vectored(slices.get(..used).unwrap_or_default()).map(drop)
    }

    fn operate(
        &self,
        operation: &'static str,
        act: impl FnOnce() -> Result<libc::c_int, Errno>,
    ) -> Result<(), Error> {
        let failed =
            |errno: Errno| Error::Interface { name: self.name.clone(), operation, source: errno.into() };
        act().map(drop).map_err(failed)
    }

    fn request(&self) -> libc::ifreq {
        let mut name: [libc::c_char; libc::IFNAMSIZ] = [0; libc::IFNAMSIZ];
        // The last byte stays zero.
        for (slot, byte) in name.iter_mut().take(libc::IFNAMSIZ - 1).zip(self.name.bytes()) {
            *slot = libc::c_char::from_ne_bytes([byte]);
        }
        libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: 0 } }
    }

    #[expect(unsafe_code, reason = "TUNSETIFF has no safe wrapper")]
    fn attach(&self, more_flags: libc::c_int) -> Result<libc::c_int, Errno> {
        let mut request = self.request();
        let flags = libc::IFF_TUN | libc::IFF_NO_PI | more_flags;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the descriptor is an open /dev/net/tun; TUNSETIFF reads and writes one `ifreq`, which is valid and
        // exclusively ours for the duration of the call (the wrapper takes it by const pointer, `request` is `mut`).
        unsafe { ioctl::tun_set_interface(self.file.as_raw_fd(), &raw mut request) }
    }

    #[expect(unsafe_code, reason = "TUNSETPERSIST has no safe wrapper")]
    fn set_persist(&self, persist: bool) -> Result<libc::c_int, Errno> {
        // SAFETY: the argument is passed by value; the descriptor is an attached TUN.
        unsafe { ioctl::tun_set_persist(self.file.as_raw_fd(), persist.into()) }
    }

    #[expect(unsafe_code, reason = "TUNSETOFFLOAD has no safe wrapper")]
    fn set_offload(&self, features: libc::c_uint) -> Result<libc::c_int, Errno> {
        let features = libc::c_int::try_from(features).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the argument is passed by value; the descriptor is an attached TUN.
        unsafe { ioctl::tun_set_offload(self.file.as_raw_fd(), features) }
    }

    /// Another process may have left another length.
    #[expect(unsafe_code, reason = "TUNSETVNETHDRSZ has no safe wrapper")]
    fn set_header_length(&self) -> Result<libc::c_int, Errno> {
        let length = libc::c_int::try_from(HEADER_LENGTH).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the descriptor is an attached TUN; TUNSETVNETHDRSZ reads one `c_int`, valid for the duration of the call.
        unsafe { ioctl::tun_set_header_length(self.file.as_raw_fd(), &raw const length) }
    }

    #[expect(unsafe_code, reason = "SIOCSIFMTU has no safe wrapper")]
    fn set_mtu(&self, mtu: u16) -> Result<libc::c_int, Errno> {
        let socket = any_socket()?;
        let mut request = self.request();
        request.ifr_ifru.ifru_mtu = mtu.into();
        // SAFETY: the descriptor is an open socket; SIOCSIFMTU reads one `ifreq`, valid for the duration of the call.
        unsafe { ioctl::set_mtu(socket.as_raw_fd(), &raw const request) }
    }

    #[expect(unsafe_code, reason = "SIOCSIFTXQLEN has no safe wrapper")]
    fn set_queue_length(&self) -> Result<libc::c_int, Errno> {
        let socket = any_socket()?;
        let mut request = self.request();
        // `ifr_qlen` is `ifr_ifru.ifru_ivalue`, an `int` like the metric.
        request.ifr_ifru.ifru_metric = QUEUE_LENGTH;
        // SAFETY: the descriptor is an open socket; SIOCSIFTXQLEN reads one `ifreq`, valid for the duration of the call.
        unsafe { ioctl::set_queue_length(socket.as_raw_fd(), &raw const request) }
    }
}

/// A socket for requests about interfaces: any of this network namespace serves (netdevice(7)).
fn any_socket() -> Result<Socket, Errno> {
    Socket::new(Domain::IPV4, Type::DGRAM, None)
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}

fn open_tun() -> Result<File, Error> {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    options.open("/dev/net/tun").map_err(Error::OpenTun)
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests;
