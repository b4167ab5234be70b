//! Ports that an attempt tries.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_wire::probe::PortSequence;
use rand::RngExt;
use rand::rngs::StdRng;

use super::limits::{PACE, RATE};

/// Requests of one attempt to ports that have not answered.
pub(super) const MAX_REQUESTS: u32 = 2048;
/// The time for which requests are sent at once: 20 of them.
const MAX_LATE: Duration = Duration::from_millis(45);
/// NATs give out no lower ports (RFC 6056, section 3.2).
const FIRST_PORT: u16 = 1024;
/// Mappings that must have been seen before their ports are taken for a sequence.
const MIN_OBSERVED: usize = 4;
/// Most mappings that other hosts behind the NAT may have taken between two of ours.
const MAX_GAP: u16 = 32;
/// The runs of the leading node; each tolerates as many mappings of other hosts as it is long. Their lengths are odd, so that no port is
/// in two of them.
const RUNS: [u16; 5] = [15, 63, 255, 1023, 691];
/// Requests that this host or its network may have lost on their way to the NAT.
const MAX_LOST: i64 = 4;

/// The sequence that a NAT follows which gave these ports to new mappings, one after the other; `None` if there is none.
pub(super) fn predict(observed: &[u16]) -> Option<PortSequence> {
    let steps: Vec<i16> = observed
        .iter()
        .zip(observed.iter().skip(1))
        .map(|(one, next)| next.wrapping_sub(*one).cast_signed())
        .collect();
    let step = steps.iter().copied().min_by_key(|step| step.unsigned_abs())?;
    let follows = |other: &i16| {
        let gap = other.unsigned_abs().checked_div(step.unsigned_abs());
        let is_multiple = other.unsigned_abs().checked_rem(step.unsigned_abs()) == Some(0);
        is_multiple && gap.is_some_and(|gap| gap <= MAX_GAP) && (*other < 0) == (step < 0)
    };
    let next = observed.last()?.wrapping_add_signed(step);
    (observed.len() >= MIN_OBSERVED && steps.iter().all(follows)).then_some(PortSequence { next, step })
}

/// The ports to try, the next one last.
///
/// If both NATs follow sequences, each request of either node makes a mapping with the next port of its NAT, and two of them meet
/// if each goes to the port of the other. Other hosts take ports too, so neither node knows how many ports further than predicted
/// both are. One node tries the predicted ports in order, the other one every second of them: then their requests meet wherever both
/// offsets together are less than the length of the run, also when they grow meanwhile. Each run starts anew, for what was lost on the
/// way, and somewhat before the predicted port.
pub(super) fn plan(
    own: Option<PortSequence>,
    their: Option<PortSequence>,
    leads: bool,
    random: &mut StdRng,
) -> Vec<u16> {
    match their {
        None => random_ports(random),
        Some(their) if own.is_some() && leads => {
            let starts = RUNS.iter().scan(0_u16, |next, length| {
                let start = *next;
                *next = start.saturating_add(*length);
                Some((start, *length))
            });
            let offsets = starts.flat_map(|(start, length)| {
                (0..length).map(move |place| {
                    i64::from(start)
                        .saturating_add(i64::from(place).saturating_mul(2))
                        .saturating_sub(MAX_LOST)
                })
            });
            in_sequence(their, offsets)
        }
        Some(their) => in_sequence(their, 0..i64::from(MAX_REQUESTS)),
    }
}

/// To where ports wrap around, which differs between NATs.
fn in_sequence(PortSequence { next, step }: PortSequence, offsets: impl Iterator<Item = i64>) -> Vec<u16> {
    let port = |offset: i64| {
        let port = i64::from(step).saturating_mul(offset).saturating_add(next.into());
        u16::try_from(port).ok().filter(|port| *port >= FIRST_PORT)
    };
    let mut ports: Vec<u16> = offsets.filter_map(port).collect();
    ports.reverse();
    ports
}

/// Random ports, each once.
pub(super) fn random_ports(random: &mut StdRng) -> Vec<u16> {
    let mut ports: Vec<u16> = (FIRST_PORT..=u16::MAX).collect();
    let tried = usize::try_from(MAX_REQUESTS).unwrap_or(usize::MAX).min(ports.len());
    // The first steps of a shuffle (Fisher and Yates).
    for position in 0..tried {
        let other = random.random_range(position..ports.len());
        ports.swap(position, other);
    }
    ports.truncate(tried);
    ports
}

/// Requests to ports of one address, sent at the rate of attempts. What a late wake-up has missed is not made up for: the limits on probes
/// would hold some back, and the ports of the mappings would no longer be those that were planned.
#[derive(Debug)]
pub(super) struct Volley {
    /// The ports to try, the next one last.
    ports: Vec<u16>,
    ip: IpAddr,
    /// Up to when the requests are sent that were due.
    ran: Duration,
}

impl Volley {
    pub(super) fn new(now: Duration, ip: IpAddr, ports: Vec<u16>) -> Self {
        Self { ports, ip, ran: now }
    }

    /// The endpoints to ask now.
    pub(super) fn due(&mut self, now: Duration) -> Vec<SocketAddr> {
        let elapsed = now.saturating_sub(self.ran).min(MAX_LATE);
        let due = elapsed.as_micros().saturating_mul(RATE.into()) / 1_000_000;
        let due = u32::try_from(due).unwrap_or(u32::MAX);
        let used = Duration::from_secs(1).saturating_mul(due) / RATE;
        self.ran = now.saturating_sub(elapsed.saturating_sub(used));
        let kept = self.ports.len().saturating_sub(usize::try_from(due).unwrap_or(usize::MAX));
        let ports = self.ports.split_off(kept);
        ports.into_iter().rev().map(|port| SocketAddr::new(self.ip, port)).collect()
    }

    /// Waits without sending.
    pub(super) fn pause(&mut self, now: Duration) {
        self.ran = now;
    }

    /// Time at which the next endpoints are to be asked, or the last one was.
    pub(super) fn next(&self) -> Duration {
        if self.is_over() { self.ran } else { self.ran.saturating_add(PACE) }
    }

    /// All were asked.
    pub(super) fn is_over(&self) -> bool {
        self.ports.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;

    fn sequence(next: u16, step: i16) -> Option<PortSequence> {
        Some(PortSequence { next, step })
    }

    #[test]
    fn ports_that_follow_a_sequence_are_predicted_and_others_are_not() {
        for (observed, expected) in [
            (vec![40_000, 40_001, 40_002, 40_003], sequence(40_004, 1)),
            (vec![40_000, 40_002, 40_003, 40_009], sequence(40_010, 1)),
            (vec![40_000, 39_996, 39_992, 39_984], sequence(39_980, -4)),
            (vec![40_000, 40_256, 40_512, 40_768], sequence(41_024, 256)),
            (vec![65_534, 65_535, 0, 1], sequence(2, 1)),
            (vec![40_000, 40_001, 40_002], None),
            (vec![40_000, 40_001, 40_003, 40_002], None),
            (vec![40_000, 40_001, 40_002, 40_100], None),
            (vec![40_000, 40_000, 40_000, 40_000], None),
            (vec![40_000, 7_768, 40_536, 7_768], None),
            (vec![1_234, 50_022, 8_361, 33_190, 61_001, 15_222], None),
            (Vec::new(), None),
        ] {
            assert_eq!(predict(&observed), expected, "{observed:?}");
        }
    }

    #[test]
    fn a_late_wake_up_is_not_made_up_for() {
        let mut volley = Volley::new(Duration::ZERO, IpAddr::from([203, 0, 113, 1]), (2000..4000).collect());
        for (at, sent) in [(20, 9), (40, 9), (5000, 20), (5001, 0), (5020, 9)] {
            assert_eq!(volley.due(Duration::from_millis(at)).len(), sent, "{at}");
        }
    }

    /// The ports that a NAT gives to the requests of one node, while other hosts take some.
    fn given(sequence: PortSequence, late: u16, gaps: &[u16]) -> Vec<u16> {
        let mut next = i64::from(sequence.next) + i64::from(sequence.step) * i64::from(late);
        let give = |gap: &u16| {
            next += i64::from(sequence.step) * i64::from(*gap);
            next += i64::from(sequence.step);
            u16::try_from(next - i64::from(sequence.step)).unwrap_or(0)
        };
        gaps.iter().map(give).collect()
    }

    proptest! {
        /// After one in eight mappings another host takes one.
        #[test]
        fn requests_meet_whatever_ports_other_hosts_take(
            steps in (1_i16..4, -4_i16..0),
            late in (0_u16..40, 0_u16..40),
            taken in (prop::collection::vec(0_u16..8, 2048), prop::collection::vec(0_u16..8, 2048)),
        ) {
            let gaps = |taken: &[u16]| taken.iter().map(|taken| taken / 7).collect::<Vec<u16>>();
            let one = PortSequence { next: 20_000, step: steps.0 };
            let other = PortSequence { next: 50_000, step: steps.1 };
            let random = &mut StdRng::seed_from_u64(1);
            let tried = [plan(Some(one), Some(other), true, random), plan(Some(other), Some(one), false, random)]
                .map(|ports| ports.into_iter().rev().collect::<Vec<u16>>());
            let ports = [given(one, late.0, &gaps(&taken.0)), given(other, late.1, &gaps(&taken.1))];
            // From own port to the peer's.
            let sent: BTreeSet<(u16, u16)> = ports[0].iter().copied().zip(tried[0].iter().copied()).collect();
            let received = tried[1].iter().copied().zip(ports[1].iter().copied());
            prop_assert!(received.filter(|flow| sent.contains(flow)).count() >= 2);
        }

        #[test]
        fn plans_name_each_port_once_and_none_below_1024(next: u16, step: i16, leads: bool) {
            prop_assume!(step != 0);
            let ports = plan(sequence(1, 1), sequence(next, step), leads, &mut StdRng::seed_from_u64(1));
            prop_assert!(ports.len() <= usize::try_from(MAX_REQUESTS).unwrap());
            prop_assert!(ports.iter().all(|port| *port >= FIRST_PORT));
            prop_assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), ports.len());
        }

        #[test]
        fn hostile_ports_never_panic(observed: Vec<u16>) {
            let _ = predict(&observed);
        }
    }
}
