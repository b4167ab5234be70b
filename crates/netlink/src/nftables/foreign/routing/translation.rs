//! Rules of other programs that translate the destination of UDP packets to a port of this host: those of a pod's `hostPort`, of a proxy of Services, and
//! of administrators.
//!
//! One packet is followed, the first of a flow that comes from another node: through base chains of type nat at the hook prerouting, in the order of their
//! priorities, and chains to which these lead, with iptables-nft's own matches and targets. Its source and its mark are not known, so that it may meet
//! conditions on these. A rule is found if the packet certainly comes to it, or if a condition on the port was met on the way: what the port is named for is
//! taken from some node. A set is asked for the packet's element, and not read, however large it is.

mod extensions;
mod kernel;
mod packet;
mod source;
mod steps;

use std::net::IpAddr;

use fairlead_address::IpFamily;

use self::kernel::Kernel;
pub use self::packet::Arrival;
use self::packet::{End, Packet, Passage, pass};
use self::source::{Look, Source};
use self::steps::NatRule;
use super::{Conditions, Effect, MAX_DEPTH, RoutingChain, RoutingHook, RoutingRule, Verdict, routing_chains};
use crate::{Result, Socket};

/// Most rules that a packet is led past, and most rules and verdicts of maps that are kept of all tables. A rule of iptables-nft takes less than 1 KiB, and
/// the node program's container has 256 MiB for all.
const MAX_RULES: usize = 40_000;
/// Most rules that are found for one packet: users are told of a few.
const MAX_FOUND: usize = 256;

/// Rules that translate the destination of packets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Translations {
    /// The rules. One that several packets meet is there several times.
    pub rules: Vec<RoutingRule>,
    /// Number of rules and elements of sets that were read, and of requests about sets.
    pub read: usize,
    /// Number of rules among these that were not looked at, because there are too many. No rule is found behind them.
    pub left_out: usize,
}

/// Rules that translate the destinations of these packets, of all tables but those whose name `is_own` accepts. A rule that leaves a packet its port, and gives
/// it the destination of one of them, is none.
///
/// # Errors
/// As [`super::super::forward_chains`].
pub fn translations(
    socket: &mut Socket,
    arrivals: &[Arrival],
    is_own: impl Fn(&str) -> bool,
) -> Result<Translations> {
    let mut chains = routing_chains(socket, &["nat"])?;
    chains.retain(|chain| chain.hook == RoutingHook::Prerouting && !is_own(&chain.table));
    chains.sort_by_key(|chain| chain.priority);
    let mut found = Translations::default();
    let Some(first) = chains.first() else { return Ok(found) };
    let own: Vec<IpAddr> = arrivals.iter().map(|arrival| arrival.destination).collect();
    let mut look = Look::new(Kernel(socket), first.clone());
    for arrival in arrivals {
        let packet = Packet { arrival, own: &own };
        found.rules.extend(follow(packet, &chains, &mut look)?);
    }
    (found.read, found.left_out) = (look.read, look.left_out);
    Ok(found)
}

/// The rules on the way of one packet.
fn follow<S: Source>(
    packet: Packet<'_>,
    chains: &[RoutingChain],
    source: &mut S,
) -> Result<Vec<RoutingRule>> {
    let family = IpFamily::of(packet.arrival.destination);
    let (mut found, mut left) = (Vec::new(), MAX_RULES);
    for base in chains.iter().filter(|chain| chain.family.only().is_none_or(|only| only == family)) {
        source.enter(base);
        let mut walk = Walk { base, packet, source: &mut *source, left, found };
        let flow = walk.chain(&base.name, Way::BASE, MAX_DEPTH)?;
        (found, left) = (walk.found, walk.left);
        if flow == Flow::Ended {
            break;
        }
    }
    Ok(found)
}

/// Knowledge of a packet's way to a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    is_certain: bool,
    names_port: bool,
}

impl Way {
    const BASE: Self = Self { is_certain: true, names_port: false };

    const fn through(self, passage: &Passage) -> Self {
        Self {
            is_certain: self.is_certain && passage.is_certain,
            names_port: self.names_port || passage.names_port,
        }
    }
}

/// Continuation of a packet's way behind a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// Base chains that follow at the hook.
    Accepted,
    /// No further chain: it is translated, or dropped.
    Ended,
    /// Chain that led to it.
    Returned,
}

struct Walk<'a, S> {
    base: &'a RoutingChain,
    packet: Packet<'a>,
    source: &'a mut S,
    left: usize,
    found: Vec<RoutingRule>,
}

impl<S: Source> Walk<'_, S> {
    /// Follows a chain; a packet that comes to it certainly continues as the result says, if that is certain, else as [`Flow::Returned`] does.
    fn chain(&mut self, name: &str, leading: Way, depth: usize) -> Result<Flow> {
        let Some(deeper) = depth.checked_sub(1).filter(|_| self.left > 0) else { return Ok(Flow::Accepted) };
        let rules = self.source.rules(name)?;
        for rule in &rules.kept {
            let Some(left) = self.left.checked_sub(1) else { return Ok(Flow::Accepted) };
            self.left = left;
            let Some(passage) = pass(rule, self.packet, self.source)? else { continue };
            let way = leading.through(&passage);
            let flow = match &passage.end {
                End::Next => None,
                End::Translated => {
                    self.add(name, rule, way);
                    Some(Flow::Ended)
                }
                End::Verdicts(verdicts) => self.verdicts(verdicts, way, deeper)?,
            };
            if let Some(flow) = flow.filter(|_| passage.is_certain) {
                return Ok(flow);
            }
        }
        if rules.left_out > 0 {
            // The way behind rules that are not known is not known either.
            self.left = 0;
            return Ok(Flow::Accepted);
        }
        Ok(Flow::Returned)
    }

    /// Follows each of these verdicts, of which the last one tells how it goes on; `None` if it does with the next rule.
    fn verdicts(&mut self, verdicts: &[Verdict], way: Way, depth: usize) -> Result<Option<Flow>> {
        let mut flow = None;
        for verdict in verdicts {
            flow = match verdict {
                Verdict::Accept => Some(Flow::Accepted),
                Verdict::Goto(to) => Some(self.chain(to, way, depth)?),
                Verdict::Jump(to) => Some(self.chain(to, way, depth)?).filter(|it| *it != Flow::Returned),
                Verdict::None => None,
                Verdict::Refuse => Some(Flow::Ended),
                Verdict::Return => Some(Flow::Returned),
            };
        }
        Ok(flow)
    }

    fn add(&mut self, chain: &str, rule: &NatRule, way: Way) {
        if (!way.is_certain && !way.names_port) || self.found.len() >= MAX_FOUND {
            return;
        }
        self.found.push(RoutingRule {
            base: self.base.clone(),
            chain: chain.to_owned(),
            handle: rule.handle,
            effect: Effect::Translation,
            conditions: Conditions { has_more: !way.is_certain, ..Conditions::default() },
            may_be_skipped: false,
            packets: rule.packets,
        });
    }
}

#[cfg(test)]
mod tests;
