//! Rules of other programs that change the mark of packets, or drop packets by a check of their sources, before these are routed or leave.
//!
//! The chains that are read are base chains of the types filter and route at the hooks prerouting, output and postrouting, and those to which
//! these lead. Chains of type nat see the first packet of a connection only, and in them kube-proxy has tens of thousands of rules: of these,
//! [`translations`] follows what one packet meets. Rules of iptables-legacy are not in nftables.

mod bounded;
mod conditions;
mod effect;
mod expressions;
mod extensions;
mod translation;

use std::fmt;

use nix::libc;

use bounded::Bounded;
pub use conditions::{Conditions, DeviceName};
pub use effect::{Effect, MarkChange};
use expressions::{ParsedRule, parse_expressions};
pub use translation::{Arrival, Translations, translations};

use super::walk::{MAX_DEPTH, Verdict};
use super::{RULE_HANDLE, TABLE_DORMANT, TableFamily, family_of, flags_of, request, tables};
use crate::nftables::attributes::{Parsed, array, be32, find, require, text};
use crate::nftables::request::body;
use crate::nftables::uapi::{chain, rule};
use crate::{Reply, Result, Socket};

/// Most rules that are looked at.
const MAX_RULES: usize = 10_000;

/// Hook at which packets are to be routed, or have been.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoutingHook {
    /// Packets that this host sends.
    Output,
    /// All packets that leave.
    Postrouting,
    /// All packets that arrive.
    Prerouting,
}

impl RoutingHook {
    /// `NF_INET_PRE_ROUTING`, `NF_INET_LOCAL_OUT`, `NF_INET_POST_ROUTING` (`linux/netfilter.h`)
    const fn of(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Prerouting),
            3 => Some(Self::Output),
            4 => Some(Self::Postrouting),
            _ => None,
        }
    }
}

impl fmt::Display for RoutingHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Output => "output",
            Self::Postrouting => "postrouting",
            Self::Prerouting => "prerouting",
        })
    }
}

/// A base chain at such a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingChain {
    /// Family of its table.
    pub family: TableFamily,
    /// Name of its table.
    pub table: String,
    /// Name of the chain.
    pub name: String,
    /// Hook at which it is.
    pub hook: RoutingHook,
    /// Priority at its hook; chains with a lower one come before.
    pub priority: i32,
    /// Whether it is of type route: at the hook output, the kernel routes a packet again whose mark it has changed.
    pub reroutes: bool,
}

/// A rule with an effect. `Display` says where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingRule {
    /// Base chain that leads to it.
    pub base: RoutingChain,
    /// Name of its own chain, in the same table.
    pub chain: String,
    /// The kernel's number of it in its table.
    pub handle: u64,
    /// Effect on packets that meet its conditions.
    pub effect: Effect,
    /// Conditions.
    pub conditions: Conditions,
    /// Some packets may not come to it, because of an earlier rule.
    pub may_be_skipped: bool,
    /// Packets that it has counted; `None` if it does not count.
    pub packets: Option<u64>,
}

impl fmt::Display for RoutingRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, chain, handle, .. } = self;
        let RoutingChain { family, table, name, hook, priority, .. } = base;
        write!(f, "rule {handle} of chain {family} {table} {chain} (")?;
        if chain != name {
            write!(f, "reached from {name}, ")?;
        }
        write!(f, "hook {hook}, priority {priority})")
    }
}

/// Rules with an effect, of all tables but those whose name `is_own` accepts, in the order in which packets come to them. A rule to which several
/// ways lead is there several times.
///
/// # Errors
/// As [`super::forward_chains`].
pub fn routing_rules(socket: &mut Socket, is_own: impl Fn(&str) -> bool) -> Result<Vec<RoutingRule>> {
    let (mut found, mut left) = (Vec::new(), MAX_RULES);
    for base in routing_chains(socket, &["filter", "route"])?.iter().filter(|chain| !is_own(&chain.table)) {
        let rules = |chain: &str| rules_of(socket, base, chain);
        let mut walk = Walk { base, rules, left, found: Vec::new() };
        walk.chain(&base.name, &Conditions::default(), false, MAX_DEPTH)?;
        left = walk.left;
        found.extend(walk.found);
    }
    Ok(found)
}

/// Chains of these types that see packets; those of dormant tables do not.
fn routing_chains(socket: &mut Socket, kinds: &[&str]) -> Result<Vec<RoutingChain>> {
    let tables = tables(socket)?;
    let what = "list the chains of nftables";
    let request = request(libc::NFT_MSG_GETCHAIN, libc::AF_UNSPEC as u8, what, |_| {})?;
    let mut chains = socket.dump_each(&request, Vec::new, |chains: &mut Vec<RoutingChain>, reply| {
        chains.extend(parse_chain(&reply, kinds)?);
        Ok(())
    })?;
    chains.retain(|chain| flags_of(&tables, chain.family, &chain.table) & TABLE_DORMANT == 0);
    Ok(chains)
}

fn parse_chain(reply: &Reply, kinds: &[&str]) -> Parsed<Option<RoutingChain>> {
    let Some(family) = TableFamily::of(family_of(reply)) else { return Ok(None) };
    let body = body(reply)?;
    let Some(hook) = find(body, chain::HOOK)? else { return Ok(None) };
    let kind = text(require(body, chain::TYPE)?)?;
    let number = be32(require(hook, chain::HOOK_NUMBER)?)?;
    let Some(at) = RoutingHook::of(number).filter(|_| kinds.contains(&kind)) else {
        return Ok(None);
    };
    Ok(Some(RoutingChain {
        family,
        table: text(require(body, chain::TABLE)?)?.to_owned(),
        name: text(require(body, chain::NAME)?)?.to_owned(),
        hook: at,
        priority: i32::from_be_bytes(array(require(hook, chain::HOOK_PRIORITY)?)?),
        reroutes: kind == "route",
    }))
}

/// Reads the rules of one chain, in order, as many as are looked at.
fn rules_of(socket: &mut Socket, base: &RoutingChain, chain: &str) -> Result<Vec<ParsedRule>> {
    let rules = read_chain(socket, base, chain, MAX_RULES, |expressions, handle| {
        let parsed = parse_expressions(expressions, base.family.only())?;
        Ok(ParsedRule { handle, ..parsed })
    })?;
    Ok(rules.kept)
}

/// Reads the rules of one chain, in order, each from its expressions and its handle, and keeps at most so many.
fn read_chain<T>(
    socket: &mut Socket,
    base: &RoutingChain,
    chain: &str,
    most: usize,
    parse: impl Fn(&[u8], u64) -> Parsed<T>,
) -> Result<Bounded<T>> {
    let what = format!("list rules of chain {} {} {chain}", base.family, base.table);
    let request = request(libc::NFT_MSG_GETRULE, base.family.number(), &what, |m| {
        m.text(rule::TABLE, &base.table);
        m.text(rule::CHAIN, chain);
    })?;
    let start = || Bounded::new(most);
    socket.dump_each(&request, start, |rules: &mut Bounded<T>, reply| {
        rules.add(|| parse_rule(&reply, base, chain, &parse))
    })
}

/// `None` for a rule of another chain.
fn parse_rule<T>(
    reply: &Reply,
    base: &RoutingChain,
    chain: &str,
    parse: impl Fn(&[u8], u64) -> Parsed<T>,
) -> Parsed<Option<T>> {
    let body = body(reply)?;
    if text(require(body, rule::TABLE)?)? != base.table || text(require(body, rule::CHAIN)?)? != chain {
        return Ok(None);
    }
    let handle = u64::from_be_bytes(array(require(body, RULE_HANDLE)?)?);
    parse(find(body, rule::EXPRESSIONS)?.unwrap_or_default(), handle).map(Some)
}

/// Ways of packets through a base chain.
struct Walk<'a, R> {
    base: &'a RoutingChain,
    /// Reads the rules of a chain.
    rules: R,
    left: usize,
    found: Vec<RoutingRule>,
}

impl<R: FnMut(&str) -> Result<Vec<ParsedRule>>> Walk<'_, R> {
    /// Follows a chain to which these conditions lead. Returns whether rules in it may have ended the way of some packets.
    fn chain(
        &mut self,
        name: &str,
        leading: &Conditions,
        may_be_skipped: bool,
        depth: usize,
    ) -> Result<bool> {
        let Some(deeper) = depth.checked_sub(1) else { return Ok(true) };
        // For the base chain, or for this chain alone.
        let (mut ends, mut returns) = (false, false);
        for parsed in (self.rules)(name)? {
            let Some(left) = self.left.checked_sub(1) else { return Ok(true) };
            self.left = left;
            let conditions = leading.with(&parsed.conditions);
            let may_be_skipped = may_be_skipped || ends || returns;
            let is_exception = !parsed.conditions.are_of_loopback();
            self.add(name, &parsed, leading, may_be_skipped);
            match &parsed.verdict {
                Verdict::Accept | Verdict::Refuse => ends |= is_exception,
                Verdict::Goto(to) => {
                    ends |= self.chain(to, &conditions, may_be_skipped, deeper)?;
                    returns |= is_exception;
                }
                Verdict::Jump(to) => ends |= self.chain(to, &conditions, may_be_skipped, deeper)?,
                Verdict::None => {}
                Verdict::Return => returns |= is_exception,
            }
            let is_last = parsed.conditions == Conditions::default()
                && parsed.effect != Some(Effect::SourceCheck)
                && !matches!(parsed.verdict, Verdict::Jump(_) | Verdict::None);
            if is_last {
                break;
            }
        }
        Ok(ends)
    }

    fn add(&mut self, chain: &str, parsed: &ParsedRule, leading: &Conditions, may_be_skipped: bool) {
        let ParsedRule { handle, effect: Some(effect), packets, .. } = *parsed else { return };
        self.found.push(RoutingRule {
            base: self.base.clone(),
            chain: chain.to_owned(),
            handle,
            effect,
            conditions: leading.with(&parsed.before),
            may_be_skipped,
            packets,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn base() -> RoutingChain {
        let (table, name) = ("mangle".to_owned(), "OUTPUT".to_owned());
        let hook = RoutingHook::Output;
        RoutingChain { family: TableFamily::Ipv4, table, name, hook, priority: -150, reroutes: true }
    }

    fn rule(verdict: Verdict) -> ParsedRule {
        ParsedRule { verdict, ..ParsedRule::default() }
    }

    /// A rule that sets a mark, by which it is known.
    fn marking(mark: u32) -> ParsedRule {
        let change = MarkChange { kept: 0, set: mark, unknown: 0 };
        ParsedRule { effect: Some(Effect::Mark(change)), ..ParsedRule::default() }
    }

    fn sometimes(rule: ParsedRule) -> ParsedRule {
        ParsedRule { conditions: Conditions { has_more: true, ..Conditions::default() }, ..rule }
    }

    fn to_loopback(rule: ParsedRule) -> ParsedRule {
        let device = DeviceName { is_input: false, is_equal: true, bytes: b"lo\0".to_vec() };
        ParsedRule { conditions: Conditions { devices: vec![device], ..Conditions::default() }, ..rule }
    }

    /// Marks that are set, whether all packets meet the conditions, and whether some are skipped.
    fn found(chains: &[(&str, Vec<ParsedRule>)]) -> Vec<(u32, bool, bool)> {
        let chains: BTreeMap<&str, &Vec<ParsedRule>> =
            chains.iter().map(|(name, rules)| (*name, rules)).collect();
        let rules = |name: &str| -> Result<Vec<ParsedRule>> {
            Ok(chains.get(name).map(|rules| (*rules).clone()).unwrap_or_default())
        };
        let base = base();
        let mut walk = Walk { base: &base, rules, left: MAX_RULES, found: Vec::new() };
        walk.chain("OUTPUT", &Conditions::default(), false, MAX_DEPTH).unwrap();
        let shown = walk.found.iter().map(|rule| match rule.effect {
            Effect::Mark(change) => (change.set, !rule.conditions.has_more, rule.may_be_skipped),
            other => panic!("{other:?}"),
        });
        shown.collect()
    }

    fn jump(to: &str) -> ParsedRule {
        rule(Verdict::Jump(to.to_owned()))
    }

    #[test]
    fn rules_are_found_in_chains_that_others_lead_to_with_all_conditions() {
        let own = vec![marking(1), jump("a"), sometimes(jump("b")), marking(4)];
        let chains = [("OUTPUT", own), ("a", vec![marking(2)]), ("b", vec![marking(3)])];
        assert_eq!(found(&chains), [(1, true, false), (2, true, false), (3, false, false), (4, true, false)]);
        let behind = [("OUTPUT", vec![rule(Verdict::Return), marking(1)])];
        assert_eq!(found(&behind), [], "no packet comes to it");
    }

    #[test]
    fn an_exception_counts_for_what_follows_it() {
        let with = |first: ParsedRule| found(&[("OUTPUT", vec![first, marking(1)])]);
        assert_eq!(with(sometimes(rule(Verdict::Accept))), [(1, true, true)]);
        assert_eq!(with(sometimes(rule(Verdict::Return))), [(1, true, true)]);
        assert_eq!(with(to_loopback(rule(Verdict::Accept))), [(1, true, false)]);
        assert_eq!(with(sometimes(rule(Verdict::None))), [(1, true, false)]);
        let within = |verdict| {
            found(&[("OUTPUT", vec![jump("a"), marking(1)]), ("a", vec![sometimes(rule(verdict))])])
        };
        assert_eq!(within(Verdict::Accept), [(1, true, true)]);
        assert_eq!(within(Verdict::Return), [(1, true, false)], "the packet comes back");
    }

    #[test]
    fn chains_that_lead_to_each_other_end() {
        let chains = [("OUTPUT", vec![jump("a"), jump("a")]), ("a", vec![jump("OUTPUT"), jump("OUTPUT")])];
        assert_eq!(found(&chains), []);
    }

    #[test]
    fn a_rule_says_where_it_is() {
        let mut rule = RoutingRule {
            base: base(),
            chain: "OUTPUT".to_owned(),
            handle: 7,
            effect: Effect::SourceCheck,
            conditions: Conditions::default(),
            may_be_skipped: false,
            packets: None,
        };
        assert_eq!(rule.to_string(), "rule 7 of chain ip mangle OUTPUT (hook output, priority -150)");
        rule.chain = "hook".to_owned();
        let shown = "rule 7 of chain ip mangle hook (reached from OUTPUT, hook output, priority -150)";
        assert_eq!(rule.to_string(), shown);
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let reply = Reply { kind: 0, payload: bytes };
            let _ = parse_chain(&reply, &["filter", "nat"]);
            let _ = parse_rule(&reply, &base(), "c", |expressions, _| parse_expressions(expressions, None));
        }
    }
}
