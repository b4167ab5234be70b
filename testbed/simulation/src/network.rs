//! A network of NAT routers in memory: datagrams take time, are translated, filtered and lost.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_keys::PublicKey;
use fairlead_wire::stun;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::relay::RelayHost;
use super::router::{Nat, Router};

/// Time after which TCP sends lost data again.
const RETRANSMISSION: Duration = Duration::from_millis(200);

#[derive(Debug, Clone)]
pub(crate) struct Datagram {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) payload: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) routers: Vec<Router>,
    /// Pairs of addresses between which nothing passes, in this direction.
    pub(crate) black_holes: BTreeSet<(IpAddr, IpAddr)>,
    /// One-way delay within a site, and through the Internet.
    pub(crate) delays: (Duration, Duration),
    /// Most by which a way through the Internet may take longer: datagrams overtake each other.
    pub(crate) jitter: Duration,
    under_way: BTreeMap<(Duration, u64), Datagram>,
    sent: u64,
    /// Private addresses of any site are reached from any other.
    are_sites_linked: bool,
    /// The longest datagram that passes the Internet.
    pub(crate) longest: Option<usize>,
    /// Share of the datagrams through the Internet that are lost, in thousandths.
    pub(crate) loss: u32,
    /// Share of the data of TCP that is lost, in thousandths: it is sent again, and what follows waits.
    pub(crate) connection_loss: u32,
    /// A STUN server, if there is one.
    pub(crate) stun: Option<SocketAddr>,
    /// A relay, if there is one.
    pub(crate) relay: Option<RelayHost>,
    pub(crate) random: SmallRng,
    /// Datagrams that were sent through the Internet, if they are to be recorded.
    pub(crate) tape: Option<Vec<Datagram>>,
    /// Bytes that arrived at each address.
    returned: BTreeMap<IpAddr, usize>,
}

impl Network {
    pub(crate) fn new(routers: Vec<Router>) -> Self {
        let delays = (Duration::from_millis(1), Duration::from_millis(20));
        Self {
            routers,
            black_holes: BTreeSet::new(),
            delays,
            jitter: Duration::ZERO,
            under_way: BTreeMap::new(),
            sent: 0,
            are_sites_linked: false,
            loss: 0,
            longest: None,
            connection_loss: 0,
            stun: None,
            relay: None,
            random: SmallRng::seed_from_u64(1),
            tape: None,
            returned: BTreeMap::new(),
        }
    }

    pub(crate) fn link_sites(&mut self) {
        self.are_sites_linked = true;
    }

    /// When something arrives next.
    pub(crate) fn next(&self, now: Duration) -> Option<Duration> {
        let datagram = self.under_way.first_key_value().map(|((at, _), _)| *at);
        datagram.into_iter().chain(self.relay.as_ref().and_then(|relay| relay.next(now))).min()
    }

    pub(crate) fn send(&mut self, now: Duration, datagram: Datagram) {
        let Datagram { mut from, to, payload } = datagram;
        if to.ip().is_loopback() {
            let delay = self.connection_delay();
            if let Some(relay) = &mut self.relay {
                relay.send(now, delay, from, to, &payload);
            }
            return;
        }
        let mut is_near = true;
        let site = self.routers.iter().position(|router| router.has_inside(from.ip()));
        let linked = self.are_sites_linked && self.routers.iter().any(|router| router.has_inside(to.ip()));
        if !linked && !site.is_some_and(|site| self.routers[site].has_inside(to.ip())) {
            is_near = false;
            if let Some(router) = site.map(|site| &mut self.routers[site]) {
                if router.nat == Nat::NoUdp {
                    return;
                }
                from = router.send(now, from, to);
            }
        }
        let is_lost = !is_near && self.random.random_range(0..1000) < self.loss;
        let is_too_long = !is_near && self.longest.is_some_and(|longest| payload.len() > longest);
        if is_lost || is_too_long || self.black_holes.contains(&(from.ip(), to.ip())) {
            return;
        }
        let delay = if is_near { self.delays.0 } else { self.delay() };
        if let Some(tape) = self.tape.as_mut().filter(|_| !is_near) {
            tape.push(Datagram { from, to, payload: payload.clone() });
        }
        if self.stun == Some(to) {
            let Some(request) = stun::server::parse_request(&payload) else { return };
            let payload = stun::server::success(request.request.transaction, from);
            self.carry(now + delay + self.delays.1, Datagram { from: to, to: from, payload });
            return;
        }
        self.carry(now + delay, Datagram { from, to, payload });
    }

    /// Asks the relay for a UDP port to a peer.
    pub(crate) fn ask_port(&mut self, now: Duration, from: SocketAddr, peer: &PublicKey) {
        let delay = self.connection_delay();
        if let Some(relay) = &mut self.relay {
            relay.ask_port(now, delay, from, peer);
        }
    }

    /// A stranger on the Internet sends a datagram, with any source.
    pub(crate) fn inject(&mut self, now: Duration, datagram: Datagram) {
        let delay = self.delay();
        self.carry(now + delay, datagram);
    }

    /// Bytes that arrived at this address of a stranger.
    pub(crate) fn returned(&self, ip: IpAddr) -> usize {
        self.returned.get(&ip).copied().unwrap_or_default()
    }

    fn carry(&mut self, arrives: Duration, datagram: Datagram) {
        self.sent += 1;
        self.under_way.insert((arrives, self.sent), datagram);
    }

    /// Delay of a datagram through the Internet.
    fn delay(&mut self) -> Duration {
        delay(&mut self.random, self.delays.1, self.jitter)
    }

    fn connection_delay(&mut self) -> Duration {
        connection_delay(&mut self.random, self.delays.1, self.jitter, self.connection_loss)
    }

    /// Datagrams that arrive now, with their inner destinations.
    pub(crate) fn arrivals(&mut self, now: Duration) -> Vec<Datagram> {
        let later = self.under_way.split_off(&(now, u64::MAX));
        let under_way = std::mem::replace(&mut self.under_way, later);
        let mut arrived = Vec::new();
        for datagram in under_way.into_values() {
            match self.relay.as_mut().filter(|relay| relay.is_at(datagram.to.ip())) {
                Some(relay) => {
                    if let Some(sent) = relay.receive(now, &datagram) {
                        self.send(now, sent);
                    }
                }
                None => {
                    *self.returned.entry(datagram.to.ip()).or_default() += datagram.payload.len();
                    arrived.extend(self.translate(now, datagram));
                }
            }
        }
        if let Some(mut relay) = self.relay.take() {
            let (one_way, jitter, loss) = (self.delays.1, self.jitter, self.connection_loss);
            let random = &mut self.random;
            arrived.extend(relay.run(now, &mut || connection_delay(random, one_way, jitter, loss)));
            self.relay = Some(relay);
        }
        arrived
    }

    fn translate(&self, now: Duration, datagram: Datagram) -> Option<Datagram> {
        match self.routers.iter().find(|router| router.is_at(datagram.to.ip())) {
            Some(router) => {
                let to = router.inner(now, datagram.from, datagram.to)?;
                Some(Datagram { to, ..datagram })
            }
            // Private addresses are not routed in the Internet.
            None => {
                let site = self.routers.iter().find(|router| router.has_inside(datagram.to.ip()));
                let is_near = |site: &Router| self.are_sites_linked || site.has_inside(datagram.from.ip());
                site.is_none_or(is_near).then_some(datagram)
            }
        }
    }
}

fn delay(random: &mut SmallRng, one_way: Duration, jitter: Duration) -> Duration {
    let jitter = u64::try_from(jitter.as_micros()).unwrap();
    one_way + Duration::from_micros(random.random_range(0..=jitter))
}

/// Delay of data that TCP carries: nothing is lost, but what was lost is sent again.
fn connection_delay(random: &mut SmallRng, one_way: Duration, jitter: Duration, loss: u32) -> Duration {
    let again =
        if random.random_range(0..1000) < loss { RETRANSMISSION + 2 * one_way } else { Duration::ZERO };
    delay(random, one_way, jitter) + again
}
