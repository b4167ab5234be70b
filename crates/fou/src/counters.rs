//! What the programs count.

/// What is counted: `enum counter` of `bpf/fou.bpf.c`, in its order.
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
    /// Packets of a client dropped because their inner source is not the client.
    InnerSource,
    /// Packets of a client dropped because their inner destination is not allowed.
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
}

impl Counter {
    /// All of them, in the order of the map.
    pub const ALL: [Self; 11] = [
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
    ];

    /// Its name, in words joined by underscores as metrics have them.
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

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn counters_have_the_order_of_the_program() {
        let source = include_str!("../bpf/fou.bpf.c");
        let list = source.split("enum counter {").nth(1).unwrap().split("};").next().unwrap();
        let named: Vec<String> = list
            .lines()
            .filter_map(|line| line.trim().strip_prefix("COUNT_"))
            .map(|line| line.split(',').next().unwrap().to_lowercase())
            .collect();
        assert_eq!(named, Counter::ALL.map(Counter::name));
    }

    #[test]
    fn each_counter_has_its_value() {
        let mut values = [0; Counter::ALL.len()];
        values[7] = 5;
        assert_eq!(Counters(values).of(Counter::NoGateway), 5);
        assert_eq!(Counters::default().of(Counter::Failed), 0);
    }
}
