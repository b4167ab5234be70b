//! Times at which hosts beside this node are told that an address is here. Without I/O and without a clock.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_dataplane::source_addresses::Uplink;

/// Pauses before hosts are told again: a frame may be lost, and for 0.9 s another node may answer for an address that its gateway has handed
/// over.
const AGAIN: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(1000)];

/// Announcements of each address on each link. Bounded by the addresses of this node's gateways and its links.
#[derive(Debug, Default)]
pub(super) struct Schedule(BTreeMap<(IpAddr, u32), Entry>);

#[derive(Debug)]
struct Entry {
    uplink: Uplink,
    /// Time at which it is told next, and the pauses until it is told again.
    at: Option<Instant>,
    again: std::slice::Iter<'static, Duration>,
}

impl Schedule {
    /// The addresses that are here, and the uplinks of each. What is new is told from now on, as is everything of an uplink that has
    /// another link-layer address.
    pub(super) fn set(&mut self, here: &[(IpAddr, Uplink)], now: Instant) {
        self.0.retain(|(address, _), entry| {
            here.iter().any(|(it, uplink)| (it, uplink) == (address, &entry.uplink))
        });
        for (address, uplink) in here {
            let new = || Entry { uplink: uplink.clone(), at: Some(now), again: AGAIN.iter() };
            self.0.entry((*address, uplink.link)).or_insert_with(new);
        }
    }

    /// Addresses to be told now, each with the link.
    pub(super) fn due(&mut self, now: Instant) -> Vec<(IpAddr, Uplink)> {
        let mut due = Vec::new();
        for ((address, _), entry) in &mut self.0 {
            if entry.at.is_some_and(|at| at <= now) {
                entry.at = entry.again.next().and_then(|wait| now.checked_add(*wait));
                due.push((*address, entry.uplink.clone()));
            }
        }
        due
    }

    /// Time at which the next announcement is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().filter_map(|entry| entry.at).min()
    }
}

#[cfg(test)]
mod tests {
    use fairlead_netlink::route::MacAddress;

    use super::*;

    #[test]
    fn each_address_is_told_three_times_on_each_link_and_again_when_it_has_been_elsewhere() {
        let (start, address) = (Instant::now(), IpAddr::from([192, 0, 2, 40]));
        let uplink =
            |link| Uplink { link, name: format!("eth{link}"), mac: MacAddress([2; 6]), link_local: None };
        let here = [(address, uplink(2)), (address, uplink(3))];
        let mut schedule = Schedule::default();
        let told = |schedule: &mut Schedule, from: Instant| {
            let mut counts = Vec::new();
            let mut now = from;
            while let Some(next) = schedule.next() {
                now = next.max(now);
                counts.push(schedule.due(now).len());
            }
            (counts, now - from)
        };
        schedule.set(&here, start);
        assert_eq!(told(&mut schedule, start), (vec![2, 2, 2], AGAIN.iter().sum()));
        schedule.set(&here, start);
        assert_eq!(schedule.next(), None);
        schedule.set(&here[..1], start);
        schedule.set(&here, start);
        assert_eq!(told(&mut schedule, start).0, [1, 1, 1]);
    }
}
