//! Loads that are sent through a tunnel, and their results.

use std::fmt;

use super::iperf::Arrived;

/// Bytes of payload of datagrams that are counted by number.
pub(super) const SMALL: u16 = 64;

/// Kind of traffic that iperf3 sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Load {
    /// Over so many connections at once.
    Tcp(u8),
    /// As many datagrams with so many bytes of payload as the sender can make.
    Udp(u16),
}

impl Load {
    pub(super) const ALL: [Self; 5] =
        [Self::Tcp(1), Self::Tcp(4), Self::Tcp(16), Self::Udp(1200), Self::Udp(SMALL)];
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(streams) => write!(f, "TCP, streams: {streams}"),
            Self::Udp(1200) => f.write_str("UDP, 1,200 bytes"),
            Self::Udp(length) => write!(f, "UDP, {length} bytes"),
        }
    }
}

/// One transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Transfer {
    pub(super) arrived: Arrived,
    /// CPU time of both device processes together; 0 without a device.
    pub(super) cpu_seconds: f64,
}

impl Transfer {
    pub(super) fn gigabits_per_second(&self) -> f64 {
        self.arrived.bits_per_second / 1e9
    }

    /// Datagrams of so many bytes.
    pub(super) fn packets_per_second(&self, length: u16) -> f64 {
        self.arrived.bits_per_second / (8.0 * f64::from(length))
    }

    pub(super) fn cpu_seconds_per_gigabyte(&self) -> f64 {
        self.cpu_seconds / (self.arrived.bytes / 1e9)
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate, cpu) = (self.gigabits_per_second(), self.cpu_seconds_per_gigabyte());
        write!(f, "{rate:.3} Gbit/s, {:.1} % lost, {cpu:.2} CPU s/GB", self.arrived.lost_percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_counted_in_decimal_units() {
        let arrived = Arrived { bytes: 2.5e8, bits_per_second: 2e9, lost_percent: 12.5 };
        let transfer = Transfer { arrived, cpu_seconds: 1.5 };
        assert!((transfer.cpu_seconds_per_gigabyte() - 6.0).abs() < 1e-9);
        assert!((transfer.packets_per_second(1000) - 250_000.0).abs() < 1e-6);
        assert_eq!(transfer.to_string(), "2.000 Gbit/s, 12.5 % lost, 6.00 CPU s/GB");
    }

    #[test]
    fn loads_are_named_by_what_differs() {
        let names = Load::ALL.map(|load| load.to_string());
        assert_eq!(names[0], "TCP, streams: 1");
        assert_eq!([&names[3], &names[4]], ["UDP, 1,200 bytes", "UDP, 64 bytes"]);
    }
}
