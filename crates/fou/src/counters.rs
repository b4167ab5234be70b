//! Counters of the programs.

use crate::layout::TrafficNumbers;

/// Counter of the programs: `enum counter` of `bpf/layout.h`, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Counter {
    /// Packets encapsulated and sent.
    Encapsulated,
    /// Packets decapsulated and received.
    Decapsulated,
    /// FoU packets of hosts that are not peers. They are dropped, or left to the kernel: [`Settings::drop_unknown`].
    ///
    /// [`Settings::drop_unknown`]: crate::Settings::drop_unknown
    UnknownSender,
    /// Packets of a client dropped because their inner source is not the client, and of a gateway because it is none of its service:
    /// [`Tunnels::set_origins`](crate::Tunnels::set_origins).
    InnerSource,
    /// Packets of a client dropped because their inner destination is not allowed, and of a gateway because it is not the pod.
    InnerDestination,
    /// Packets dropped because an inner or outer header is unusable.
    Malformed,
    /// Fragments of FoU packets dropped: they are not reassembled before decapsulation.
    Fragment,
    /// Packets to a service address dropped because it has no gateway.
    NoGateway,
    /// Packets dropped because a helper of the kernel failed.
    Failed,
    /// Flows for which a gateway was chosen.
    Chosen,
    /// Packets dropped at the uplink because their source is foreign: [`Settings::own`].
    ///
    /// [`Settings::own`]: crate::Settings::own
    ForeignSource,
    /// Bytes of all [`ClientTraffic::sent_bytes`].
    SentBytes,
    /// Bytes of all [`ClientTraffic::received_bytes`].
    ReceivedBytes,
}

impl Counter {
    /// All of them, in the order of the map.
    pub const ALL: [Self; 13] = [
        Self::Encapsulated,
        Self::Decapsulated,
        Self::UnknownSender,
        Self::InnerSource,
        Self::InnerDestination,
        Self::Malformed,
        Self::Fragment,
        Self::NoGateway,
        Self::Failed,
        Self::Chosen,
        Self::ForeignSource,
        Self::SentBytes,
        Self::ReceivedBytes,
    ];

    /// Name of the counter, in words joined by underscores as metrics have them.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chosen => "chosen",
            Self::Decapsulated => "decapsulated",
            Self::Encapsulated => "encapsulated",
            Self::Failed => "failed",
            Self::ForeignSource => "foreign_source",
            Self::Fragment => "fragment",
            Self::InnerDestination => "inner_destination",
            Self::InnerSource => "inner_source",
            Self::Malformed => "malformed",
            Self::NoGateway => "no_gateway",
            Self::ReceivedBytes => "received_bytes",
            Self::SentBytes => "sent_bytes",
            Self::UnknownSender => "unknown_sender",
        }
    }
}

/// The values of all counters, summed over CPUs, since the programs were first attached.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters(pub(crate) [u64; Counter::ALL.len()]);

impl Counters {
    /// The value of one counter.
    pub fn of(&self, counter: Counter) -> u64 {
        self.iter().find(|(it, _)| *it == counter).map_or(0, |(_, value)| value)
    }

    /// All counters with their values.
    pub fn iter(&self) -> impl Iterator<Item = (Counter, u64)> + '_ {
        Counter::ALL.into_iter().zip(self.0)
    }
}

/// Traffic exchanged with a client since it was one of these programs. Packets are those on the wire; bytes count from the inner IP
/// header on, for segments that the network card makes their headers once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientTraffic {
    /// Packets that the client sent and that were forwarded.
    pub sent_packets: u64,
    /// Bytes of these packets.
    pub sent_bytes: u64,
    /// Packets that were sent to the client.
    pub received_packets: u64,
    /// Bytes of these packets.
    pub received_bytes: u64,
}

impl ClientTraffic {
    /// `struct traffic`, of each CPU.
    pub(crate) fn sum<'a>(numbers: impl IntoIterator<Item = &'a TrafficNumbers>) -> Self {
        numbers.into_iter().fold(
            Self::default(),
            |sum, [sent_packets, sent_bytes, received_packets, received_bytes]| {
                let sent_packets = *sent_packets;
                let sent_bytes = *sent_bytes;
                let received_packets = *received_packets;
                let received_bytes = *received_bytes;
                sum.and(Self { sent_packets, sent_bytes, received_packets, received_bytes })
            },
        )
    }

    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            sent_packets: self.sent_packets.wrapping_add(other.sent_packets),
            sent_bytes: self.sent_bytes.wrapping_add(other.sent_bytes),
            received_packets: self.received_packets.wrapping_add(other.received_packets),
            received_bytes: self.received_bytes.wrapping_add(other.received_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_have_the_order_of_the_program() {
        let source = include_str!("../bpf/layout.h");
        let list = source.split("enum counter {").nth(1).unwrap().split("};").next().unwrap();
        let named: Vec<String> = list
            .lines()
            .filter_map(|line| line.trim().strip_prefix("COUNT_"))
            .map(|line| line.split(',').next().unwrap().to_lowercase())
            .collect();
        assert_eq!(named, Counter::ALL.map(Counter::name));
    }

    #[test]
    fn traffic_is_that_of_all_cpus() {
        let sum = ClientTraffic::sum(&[[1, 100, 2, 200], [3, 300, 4, 400]]);
        let expected =
            ClientTraffic { sent_packets: 4, sent_bytes: 400, received_packets: 6, received_bytes: 600 };
        assert_eq!(sum, expected);
    }

    #[test]
    fn each_counter_has_its_value() {
        let mut values = [0; Counter::ALL.len()];
        values[7] = 5;
        assert_eq!(Counters(values).of(Counter::NoGateway), 5);
        assert_eq!(Counters::default().of(Counter::Failed), 0);
    }
}
