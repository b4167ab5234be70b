//! Holds of source addresses by gateways, as far as gateways have said them to this node. Without I/O and without a clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_egress::EgressName;
use fairlead_wire::egress as wire;

/// Longest time for which a hold counts without being said again, and most addresses that a gateway may hold.
const MAX_VALIDITY: Duration = Duration::from_secs(5);
const MAX_HOLDS: usize = 256;

/// Time for which the term of a hold still counts after its end.
const FORGOTTEN: Duration = Duration::from_secs(10);

/// Time for which an address is announced beyond the end of the hold that its gateway has said: that program may just be starting again.
/// The kernel of the gateway ends the use of the address in time, and another gateway takes it 0.2 s after that at the earliest.
const ANNOUNCED_LONGER: Duration = Duration::from_secs(1);

/// Time for which an address stays announced here after a gateway elsewhere has said that it holds it: until that is announced there, and
/// clients send there. Less than the 0.9 s for which a gateway uses what it has handed over.
const SUPERSEDED: Duration = Duration::from_millis(600);

/// Hold of a source address, as a gateway says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// Term, greater than that of each gateway that has held the address before.
    pub term: u64,
    /// End of the hold, unless the gateway says it again.
    pub until: Instant,
    /// Whether clients are to stay at the gateway before for a moment.
    pub settling: bool,
}

/// A source address that a gateway on this node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeardHold {
    /// Egress of the gateway.
    pub egress: EgressName,
    /// UID of the gateway.
    pub gateway: String,
    /// The source address.
    pub address: IpAddr,
    /// Term, greater than that of each gateway that has held the address before.
    pub term: u64,
    /// Time until which the address is announced, unless the gateway says the hold again.
    pub until: Instant,
    /// Whether the gateway takes packets of clients already.
    pub is_ready: bool,
}

/// Reads the holds that a gateway says, as of now. An address that it says with no validity is released.
///
/// # Errors
/// There are too many, or one has no address.
pub fn read(said: &[wire::Hold], now: Instant) -> Result<BTreeMap<IpAddr, Hold>, String> {
    if said.len() > MAX_HOLDS {
        return Err(format!("it holds {} source addresses", said.len()));
    }
    let hold = |said: &wire::Hold| {
        let address = <[u8; 4]>::try_from(&*said.address).map(IpAddr::from);
        let address = address.or_else(|_| <[u8; 16]>::try_from(&*said.address).map(IpAddr::from));
        let bytes = said.address.len();
        let address = address.map_err(|_| format!("a source address has {bytes} bytes"))?;
        let validity = Duration::from_millis(said.valid_milliseconds.into()).min(MAX_VALIDITY);
        let until = now.checked_add(validity).unwrap_or(now);
        Ok((address, Hold { term: said.term, until, settling: said.settling }))
    };
    let mut held = said.iter().map(hold).collect::<Result<BTreeMap<_, _>, String>>()?;
    held.retain(|_, hold| hold.until > now);
    Ok(held)
}

/// Gateway that says what it holds.
pub trait Holder {
    /// The source addresses that it said last it holds, some of which it may hold no more: see [`Hold::until`].
    fn holds(&self) -> &BTreeMap<IpAddr, Hold>;

    /// Whether it has ever answered.
    fn has_answered(&self) -> bool;

    /// Whether it says of itself that clients should send to others.
    fn is_standby(&self) -> bool;
}

/// Gateways of all Egresses by their UIDs.
pub type Gateways<G> = BTreeMap<EgressName, BTreeMap<String, G>>;

/// Newest hold of an address that a gateway has said.
#[derive(Debug, Clone, Copy)]
struct Newest {
    hold: Hold,
    /// Time at which its term was heard first.
    since: Instant,
    /// Whether that gateway wants clients to send to it already.
    forwards: bool,
}

/// Holds that the gateways of all Egresses have said.
#[derive(Debug, Default)]
pub struct Holds {
    /// Gateways on this node that may hold source addresses.
    local: BTreeSet<(EgressName, String)>,
    /// The newest hold that any gateway of an Egress said of an address.
    newest: BTreeMap<EgressName, BTreeMap<IpAddr, Newest>>,
}

impl Holds {
    /// Takes which gateways are on this node. Returns whether anything differs.
    pub fn set_local(&mut self, local: BTreeSet<(EgressName, String)>) -> bool {
        let differs = self.local != local;
        self.local = local;
        differs
    }

    /// Whether a gateway is one of [`Self::set_local`].
    pub fn is_local(&self, egress: &EgressName, uid: &str) -> bool {
        !self.local.is_empty() && self.local.contains(&(egress.clone(), uid.to_owned()))
    }

    /// Gateways on this node that have ever answered.
    pub fn heard_local(&self, gateways: &Gateways<impl Holder>) -> BTreeSet<(EgressName, String)> {
        let has_answered = |(egress, uid): &&(EgressName, String)| {
            let gateway = gateways.get(egress).and_then(|gateways| gateways.get(uid));
            gateway.is_some_and(|gateway| gateway.has_answered())
        };
        self.local.iter().filter(has_answered).cloned().collect()
    }

    /// Takes what a gateway has said of what it holds and of its state.
    pub fn hear(&mut self, egress: &EgressName, gateway: &impl Holder, now: Instant) {
        let takes_clients = !gateway.is_standby();
        let newest = self.newest.entry(egress.clone()).or_default();
        // Terms begin anew where the Lease was deleted.
        newest.retain(|_, newest| newest.hold.until.checked_add(FORGOTTEN).is_none_or(|at| at > now));
        for (address, hold) in gateway.holds().iter().filter(|(_, hold)| hold.until > now) {
            // A gateway may say any address: what it says too much is its own Egress's loss.
            if newest.len() >= MAX_HOLDS && !newest.contains_key(address) {
                continue;
            }
            let forwards = takes_clients && !hold.settling;
            let known = newest.entry(*address).or_insert(Newest { hold: *hold, since: now, forwards });
            if hold.term > known.hold.term {
                known.since = now;
            }
            if hold.term >= known.hold.term {
                known.hold = *hold;
                known.forwards = forwards;
            }
        }
    }

    /// Forgets all other Egresses.
    pub fn keep(&mut self, is_kept: impl Fn(&EgressName) -> bool) {
        self.newest.retain(|egress, _| is_kept(egress));
    }

    /// Holds of the gateways on this node. One that another gateway has with a greater term is left out [`SUPERSEDED`] after that was heard.
    pub fn of_local(&self, gateways: &Gateways<impl Holder>, now: Instant) -> Vec<HeardHold> {
        let mut found = Vec::new();
        for (egress, uid) in &self.local {
            let gateway = gateways.get(egress).and_then(|gateways| gateways.get(uid));
            let takes_clients = gateway.is_some_and(|gateway| !gateway.is_standby());
            let holds = gateway.into_iter().flat_map(|gateway| gateway.holds());
            let announced = holds.filter_map(|(address, hold)| {
                let until = hold.until.checked_add(ANNOUNCED_LONGER)?;
                let superseded = self.newer(egress, address, hold);
                let left = superseded.and_then(|newer| newer.since.checked_add(SUPERSEDED));
                let until = left.map_or(until, |left| left.min(until));
                (until > now).then(|| HeardHold {
                    egress: egress.clone(),
                    gateway: uid.clone(),
                    address: *address,
                    term: hold.term,
                    until,
                    is_ready: takes_clients && !hold.settling,
                })
            });
            found.extend(announced);
        }
        found
    }

    /// Whether flows are better off at another gateway: it says that it is standby, or others, which take clients, hold all that it
    /// held with greater terms.
    pub fn has_handed_over(&self, egress: &EgressName, gateway: &impl Holder) -> bool {
        let holds = gateway.holds();
        let is_superseded = |(address, hold): (&IpAddr, &Hold)| {
            self.newer(egress, address, hold).is_some_and(|newer| newer.forwards)
        };
        gateway.is_standby() || (!holds.is_empty() && holds.iter().all(is_superseded))
    }

    /// Hold of another gateway with a greater term, if one was heard.
    fn newer(&self, egress: &EgressName, address: &IpAddr, hold: &Hold) -> Option<&Newest> {
        let newest = self.newest.get(egress)?.get(address)?;
        (newest.hold.term > hold.term).then_some(newest)
    }
}
