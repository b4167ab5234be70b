//! Rules of other programs by which packets to WireGuard's port of this host reach another program, such as those of a pod's `hostPort`.

use std::time::{Duration, SystemTime};

use fairlead_address::IpFamily;
use fairlead_netlink::nftables::foreign::routing::{Arrival, RoutingRule, Translations, translations};
use fairlead_netlink::route::{Address, Link, RouteSocket, Scope};
use fairlead_netlink::{Result, Socket};
use ipnet::IpNet;

use super::host::Host;
use super::is_own;
use crate::mesh::state::MeshState;

/// Rules and elements that are read in a second, and requests about sets, on average: kube-proxy may have ten thousand rules in one chain, and may change
/// some each second.
const READ_PER_SECOND: usize = 100;
/// Least time from a failure until the next look: reading may have taken long, and rules that change all the time make it fail again.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(60);
/// Most links by which packets may come, and most addresses of each one in a family.
const MAX_LINKS: usize = 16;
const MAX_ADDRESSES: usize = 4;

/// The rules, as of the last look.
#[derive(Debug, Default)]
pub(super) struct PortTranslations {
    found: Vec<RoutingRule>,
    /// State at the last look.
    looked: Option<Occasion>,
    /// Time of the last look, and least time until the next one.
    last: Option<(SystemTime, Duration)>,
    /// Whether there were too many rules at the last look.
    is_partial: bool,
}

/// State on which the result of a look depends.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Occasion {
    /// Generation of nftables.
    generation: u32,
    port: u16,
    uplinks: Vec<String>,
    /// Addresses of this node by which peers know it, among others.
    own: Vec<IpNet>,
}

impl PortTranslations {
    /// Looks for them, if it is due, and returns whether it has. A failure changes nothing else, and is logged.
    pub(super) fn observe(
        &mut self,
        socket: &mut Socket,
        generation: u32,
        state: &MeshState,
        now: SystemTime,
    ) -> bool {
        let own = state.bypass.own.clone();
        let occasion = Occasion { generation, port: state.listen_port, uplinks: state.uplinks.clone(), own };
        if !self.is_due(&occasion, now) {
            return false;
        }
        match look(socket, state) {
            Ok(found) => {
                if self.becomes_partial(found.left_out) {
                    tracing::warn!(
                        left_out = found.left_out,
                        "there are too many rules of other programs that translate destinations: whether those that \
                         were left out, or follow them, give WireGuard's port to another program is not known"
                    );
                }
                self.take_over(found, occasion, now);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read which rules of other programs translate destinations");
                self.put_off(now);
                return false;
            }
        }
        true
    }

    pub(super) fn found(&self) -> &[RoutingRule] {
        &self.found
    }

    /// Whether something has changed, or there were rules, which may count packets; not too soon after a look at many rules.
    fn is_due(&self, occasion: &Occasion, now: SystemTime) -> bool {
        let is_too_soon =
            |(last, pause): (SystemTime, Duration)| now.duration_since(last).is_ok_and(|it| it < pause);
        let has_changed = self.looked.as_ref() != Some(occasion);
        (has_changed || !self.found.is_empty()) && !self.last.is_some_and(is_too_soon)
    }

    /// Takes over how many rules were left out, and returns whether that is to be told: it was not so at the last look.
    fn becomes_partial(&mut self, left_out: usize) -> bool {
        let was_partial = std::mem::replace(&mut self.is_partial, left_out > 0);
        self.is_partial && !was_partial
    }

    /// Puts the next look off after a failure, by the pause of the last look at least. What was found stays.
    fn put_off(&mut self, now: SystemTime) {
        let pause = self.last.map(|(_, pause)| pause).unwrap_or_default();
        self.last = Some((now, pause.max(PAUSE_AFTER_FAILURE)));
    }

    fn take_over(&mut self, found: Translations, occasion: Occasion, now: SystemTime) {
        let pause = u64::try_from(found.read / READ_PER_SECOND).unwrap_or(u64::MAX);
        self.found = found.rules;
        self.looked = Some(occasion);
        self.last = Some((now, Duration::from_secs(pause)));
    }
}

fn look(socket: &mut Socket, state: &MeshState) -> Result<Translations> {
    let mut arrivals = arrivals(state)?;
    let first = translations(socket, &arrivals, is_own)?;
    if first.rules.is_empty() {
        return Ok(first);
    }
    // Nothing of other nodes comes by the bridge of a container engine.
    let host = Host::read(state)?;
    arrivals.retain(|arrival| host.is_way(&arrival.input));
    let second = translations(socket, &arrivals, is_own)?;
    Ok(Translations { read: first.read.saturating_add(second.read), ..second })
}

/// First packets of other nodes to WireGuard's port.
fn arrivals(state: &MeshState) -> Result<Vec<Arrival>> {
    let mut found = Vec::new();
    if state.listen_port == 0 {
        return Ok(found);
    }
    let mut socket = RouteSocket::open()?;
    for uplink in state.uplinks.iter().take(MAX_LINKS) {
        if let Some(link) = socket.link_by_name(uplink)? {
            let addresses = socket.addresses_on(link.index)?;
            found.extend(arrivals_by(&link, &addresses, state.listen_port));
        }
    }
    Ok(found)
}

/// First packets that come by one link, to addresses that others know.
fn arrivals_by(link: &Link, addresses: &[Address], port: u16) -> Vec<Arrival> {
    let of_family = |family: IpFamily| {
        let known = addresses.iter().filter(|address| address.scope == Scope::UNIVERSE);
        let known = known.map(|address| address.prefix.addr());
        known.filter(move |address| IpFamily::of(*address) == family).take(MAX_ADDRESSES)
    };
    let arrival = |destination| Arrival { link: link.index, input: link.name.clone(), destination, port };
    IpFamily::BOTH.into_iter().flat_map(of_family).map(arrival).collect()
}

#[cfg(test)]
mod tests {
    use fairlead_netlink::nftables::foreign::TableFamily;
    use fairlead_netlink::nftables::foreign::routing::{Conditions, Effect, RoutingChain, RoutingHook};
    use fairlead_netlink::route::AddressFlags;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn occasion(generation: u32) -> Occasion {
        Occasion { generation, port: 51820, uplinks: vec!["eth0".to_owned()], own: Vec::new() }
    }

    fn rule() -> RoutingRule {
        let (table, name) = ("nat".to_owned(), "PREROUTING".to_owned());
        let (family, hook) = (TableFamily::Ipv4, RoutingHook::Prerouting);
        RoutingRule {
            base: RoutingChain { family, table, name, hook, priority: -100, reroutes: false },
            chain: "CNI-DN-1".to_owned(),
            handle: 7,
            effect: Effect::Translation,
            conditions: Conditions::default(),
            may_be_skipped: false,
            packets: None,
        }
    }

    fn found(rules: Vec<RoutingRule>, read: usize) -> Translations {
        Translations { rules, read, left_out: 0 }
    }

    #[test]
    fn it_is_looked_again_after_a_change_and_while_there_are_rules() {
        let mut seen = PortTranslations::default();
        assert!(seen.is_due(&occasion(1), at(0)));
        seen.take_over(found(Vec::new(), 99), occasion(1), at(0));
        assert!(!seen.is_due(&occasion(1), at(60)) && seen.is_due(&occasion(2), at(0)));
        let moved = Occasion { port: 51821, ..occasion(1) };
        assert!(seen.is_due(&moved, at(0)));
        seen.take_over(found(vec![rule()], 99), occasion(2), at(1));
        assert!(seen.is_due(&occasion(2), at(1)), "it may have counted packets");
    }

    #[test]
    fn ten_thousand_rules_are_not_read_each_second() {
        let mut seen = PortTranslations::default();
        seen.take_over(found(vec![rule()], 10_000), occasion(1), at(1000));
        assert!(!seen.is_due(&occasion(2), at(1099)) && seen.is_due(&occasion(2), at(1100)));
        assert!(seen.is_due(&occasion(2), at(0)), "the clock was set back");
    }

    /// Ten thousand rules would be read at each reconciliation else, for as long as it fails.
    #[test]
    fn it_is_not_looked_again_at_once_after_a_failure() {
        let mut seen = PortTranslations::default();
        seen.put_off(at(1000));
        assert!(!seen.is_due(&occasion(1), at(1059)) && seen.is_due(&occasion(1), at(1060)));
        seen.take_over(found(vec![rule()], 10_000), occasion(1), at(2000));
        seen.put_off(at(2100));
        assert!(!seen.is_due(&occasion(2), at(2199)) && seen.is_due(&occasion(2), at(2200)));
        assert_eq!(seen.found(), [rule()], "what was found stays");
    }

    #[test]
    fn that_there_are_too_many_rules_is_told_once() {
        let mut seen = PortTranslations::default();
        let told = [0, 5, 7, 0, 5].map(|left_out| seen.becomes_partial(left_out));
        assert_eq!(told, [false, true, false, false, true]);
    }

    #[test]
    fn packets_come_to_addresses_of_each_family_that_are_not_of_the_link_alone() {
        let link = Link { index: 2, name: "eth0".to_owned(), ..Link::default() };
        let address = |text: &str, scope| {
            let flags = AddressFlags::default();
            Address { link: 2, prefix: text.parse().unwrap(), scope, flags }
        };
        let addresses = [
            address("192.0.2.1/24", Scope::UNIVERSE),
            address("2001:db8::1/64", Scope::UNIVERSE),
            address("fe80::1/64", Scope::LINK),
        ];
        let found = arrivals_by(&link, &addresses, 51820);
        let destinations: Vec<String> = found.iter().map(|it| it.destination.to_string()).collect();
        assert_eq!(destinations, ["192.0.2.1", "2001:db8::1"]);
        assert!(found.iter().all(|it| (it.link, it.input.as_str(), it.port) == (2, "eth0", 51820)));
    }
}
