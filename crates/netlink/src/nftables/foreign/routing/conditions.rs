//! Conditions of a rule, as far as they are followed.

use std::net::IpAddr;

use crate::nftables::foreign::walk::padded;

/// Condition on the name of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceName {
    /// The device by which the packet came in; else the one by which it leaves.
    pub is_input: bool,
    /// The name begins with [`Self::bytes`]; else it does not.
    pub is_equal: bool,
    /// Begin of the name, or all of it with a zero behind it.
    pub bytes: Vec<u8>,
}

impl DeviceName {
    /// Whether a device of this name meets it; "" is none.
    pub fn is_met(&self, name: &str) -> bool {
        padded(name).starts_with(&self.bytes) == self.is_equal
    }
}

/// Conditions of a rule, with those of the jumps that lead to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Conditions on devices.
    pub devices: Vec<DeviceName>,
    /// Addresses, each of which has to be the packet's destination. Conditions on prefixes and sets are not among them.
    pub destinations: Vec<IpAddr>,
    /// Others that not every UDP packet meets; those on destinations count as well.
    pub has_more: bool,
}

impl Conditions {
    /// Whether every UDP packet meets them that comes in by one device and leaves by the other; "" is none.
    pub fn are_met(&self, input: &str, output: &str) -> bool {
        let is_met = |it: &DeviceName| it.is_met(if it.is_input { input } else { output });
        !self.has_more && self.devices.iter().all(is_met)
    }

    pub(super) fn with(&self, others: &Self) -> Self {
        let devices = self.devices.iter().chain(&others.devices).cloned().collect();
        let destinations = self.destinations.iter().chain(&others.destinations).copied().collect();
        Self { devices, destinations, has_more: self.has_more || others.has_more }
    }

    /// Whether only packets meet them that stay on this host.
    pub fn are_of_loopback(&self) -> bool {
        self.devices.iter().any(|it| it.is_equal && it.bytes.starts_with(b"lo\0"))
    }
}
