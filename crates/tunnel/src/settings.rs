//! The settings of a device before it starts.

use std::path::PathBuf;

use crate::Error;

/// Directory in which `wg(8)` looks for userspace devices.
const CONTROL_DIRECTORY: &str = "/var/run/wireguard";
/// `IFNAMSIZ` of `linux/if.h` without its terminating zero.
const MAX_NAME_LENGTH: usize = 15;
/// The MTU that every IPv4 host must accept (RFC 791).
const MIN_MTU: u32 = 576;

/// Settings of a [`crate::Device`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Name of the TUN interface. An existing free TUN of this name is adopted.
    pub name: String,
    /// MTU of the interface in bytes, 576 to 65535.
    pub mtu: u32,
    /// Directory of the control socket `NAME.sock` that `wg show` reads; `None` for no control socket.
    /// A socket that cannot be opened is logged; the device starts without it.
    pub control_directory: Option<PathBuf>,
    /// Path of the UNIX socket of an old process that may hand the interface over ([`crate::Device::hand_over`]); `None` without a
    /// hand-over. Its directory must be one that only root can enter: a process that listens there gets the traffic.
    pub handover_socket: Option<PathBuf>,
    /// Threads that encrypt and decrypt beside the packet loop when there is much to do; `None` for two fewer than this process has
    /// processors, and 7 at most. 32 is the most there are.
    pub threads: Option<usize>,
}

impl Settings {
    /// The usual settings: only name and MTU differ between devices.
    pub fn new(name: impl Into<String>, mtu: u32) -> Self {
        Self {
            name: name.into(),
            mtu,
            control_directory: Some(PathBuf::from(CONTROL_DIRECTORY)),
            handover_socket: None,
            threads: None,
        }
    }

    /// The checked MTU, or why these settings cannot be used.
    pub(crate) fn check(&self) -> Result<u16, Error> {
        if !is_interface_name(&self.name) {
            return Err(Error::InterfaceName(self.name.clone()));
        }
        u16::try_from(self.mtu)
            .ok()
            .filter(|_| self.mtu >= MIN_MTU)
            .ok_or_else(|| Error::Mtu { name: self.name.clone(), mtu: self.mtu })
    }
}

/// The kernel's `dev_valid_name`, and without `%`, which `TUNSETIFF` would expand to a number.
fn is_interface_name(name: &str) -> bool {
    (1..=MAX_NAME_LENGTH).contains(&name.len())
        && name != "."
        && name != ".."
        && name.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'/' | b':' | b'%'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_kernel_would_refuse_or_expand_are_refused() {
        for name in ["", ".", "..", "a/b", "tun%d", "with space", "sixteen-letters-", "café", "a:b"] {
            assert!(matches!(Settings::new(name, 1420).check(), Err(Error::InterfaceName(_))), "{name:?}");
        }
        assert_eq!(Settings::new("kubespan", 1420).check().unwrap(), 1420);
        assert_eq!(Settings::new("fifteen-letters", 576).check().unwrap(), 576);
    }

    #[test]
    fn impossible_mtus_are_refused() {
        for mtu in [0, 575, 65_536, u32::MAX] {
            assert!(matches!(Settings::new("wg0", mtu).check(), Err(Error::Mtu { .. })), "{mtu}");
        }
    }
}
