//! The TUN interface: `linux/if_tun.h`, Documentation/networking/tuntap.rst.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::errno::Errno;
use nix::libc;
use socket2::{Domain, Socket, Type};

use crate::Error;

mod ioctl {
    use nix::libc;

    nix::ioctl_write_ptr_bad!(tun_set_interface, libc::TUNSETIFF, libc::ifreq);
    nix::ioctl_write_int_bad!(tun_set_persist, libc::TUNSETPERSIST);
    nix::ioctl_write_int_bad!(tun_set_offload, libc::TUNSETOFFLOAD);
    nix::ioctl_write_ptr_bad!(set_mtu, libc::SIOCSIFMTU, libc::ifreq);
}

/// An attached TUN interface. Dropping it leaves the interface, its addresses and its routes.
pub(crate) struct Tun {
    file: File,
    name: String,
}

impl Tun {
    /// Attaches to the interface `name` (checked by the caller), creating it if there is none, and sets its MTU.
    pub(crate) fn open(name: &str, mtu: u16) -> Result<Self, Error> {
        let tun = Self { file: open_tun()?, name: name.to_owned() };
        tun.attach().map_err(|source| Error::AttachTun { name: name.to_owned(), source: source.into() })?;
        // Another process may have left offloads on: this device reads and writes plain packets.
        tun.operate("switching offloads off", || tun.set_offload(0))?;
        tun.operate("making it persistent", || tun.set_persist(true))?;
        tun.operate("setting the MTU", || tun.set_mtu(mtu))?;
        Ok(tun)
    }

    /// Adopts the attached descriptor of another process for the interface `name`, and sets its MTU.
    pub(crate) fn adopt(name: &str, descriptor: OwnedFd, mtu: u16) -> Result<Self, Error> {
        let tun = Self { file: descriptor.into(), name: name.to_owned() };
        tun.operate("setting the MTU", || tun.set_mtu(mtu))?;
        Ok(tun)
    }

    /// Makes another interface, which is gone when this returns.
    pub(crate) fn check() -> Result<(), Error> {
        // The kernel puts the first free number in.
        let tun = Self { file: open_tun()?, name: "fairlead%d".to_owned() };
        tun.operate("making a TUN interface", || tun.attach())
    }

    /// Removes the interface.
    pub(crate) fn delete(self) -> Result<(), Error> {
        self.operate("removing it", || self.set_persist(false))
    }

    /// Reads one packet; `WouldBlock` when there is none.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(buffer)
    }

    /// Writes one packet.
    pub(crate) fn write(&self, packet: &[u8]) -> io::Result<()> {
        (&self.file).write(packet).map(drop)
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
    fn attach(&self) -> Result<libc::c_int, Errno> {
        let mut request = self.request();
        let flags = libc::IFF_TUN | libc::IFF_NO_PI;
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
    fn set_offload(&self, features: libc::c_int) -> Result<libc::c_int, Errno> {
        // SAFETY: the argument is passed by value; the descriptor is an attached TUN.
        unsafe { ioctl::tun_set_offload(self.file.as_raw_fd(), features) }
    }

    #[expect(unsafe_code, reason = "SIOCSIFMTU has no safe wrapper")]
    fn set_mtu(&self, mtu: u16) -> Result<libc::c_int, Errno> {
        // Any socket of this network namespace serves (netdevice(7)).
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)
            .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
        let mut request = self.request();
        request.ifr_ifru.ifru_mtu = mtu.into();
        // SAFETY: the descriptor is an open socket; SIOCSIFMTU reads one `ifreq`, valid for the duration of the call.
        unsafe { ioctl::set_mtu(socket.as_raw_fd(), &raw const request) }
    }
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
