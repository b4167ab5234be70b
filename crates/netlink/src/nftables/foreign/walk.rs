//! Path of a packet through the chains of another program, as far as the devices tell: firewalld accepts by them, and rejects at the end.

use std::collections::BTreeMap;

use nix::libc;

use super::{EXPRESSION_DATA, EXPRESSION_NAME, ForwardChain, NF_DROP, request, value};
use crate::nftables::attributes::{Parsed, attributes, be32, explain, find, require, text};
use crate::nftables::request::body;
use crate::nftables::uapi::{NF_ACCEPT, rule};
use crate::{Reply, Result, Socket};

/// `NFT_META_IIFNAME`, `NFT_META_OIFNAME`
pub(super) const META_INPUT: u32 = 6;
pub(super) const META_OUTPUT: u32 = 7;
/// `NFT_JUMP`, `NFT_GOTO`, `NFT_RETURN`
const JUMP: u32 = -3_i32 as u32;
const GOTO: u32 = -4_i32 as u32;
const RETURN: u32 = -5_i32 as u32;
/// `IFNAMSIZ`
const INTERFACE_NAME: usize = 16;
/// Most chains that one jumps from to the next (`NFT_JUMP_STACK_SIZE`), and most rules that are looked at.
pub(super) const MAX_DEPTH: usize = 16;
const MAX_RULES: usize = 100_000;

/// Whether the chain refuses the first packet of a connection that comes in by one device and leaves by another, as far as rules look at
/// devices alone. What a rule accepts for other properties of the packet, may be this one; what it refuses for them, is not.
///
/// # Errors
/// As [`super::forward_chains`].
pub fn refuses(socket: &mut Socket, chain: &ForwardChain, input: &str, output: &str) -> Result<bool> {
    let own = rules(socket, chain, Some(&chain.name))?;
    let ends_refusing = own
        .get(&chain.name)
        .and_then(|rules| rules.last())
        .is_some_and(|last| last.verdict == Verdict::Refuse && last.conditions.is_empty());
    // Only then the rest of the table is worth reading: it may have tens of thousands of rules.
    if !ends_refusing {
        return Ok(false);
    }
    let rules = rules(socket, chain, None)?;
    let mut walk = Walk { rules: &rules, input: padded(input), output: padded(output), left: MAX_RULES };
    Ok(walk.chain(&chain.name, MAX_DEPTH) == Outcome::Refused)
}

/// Rules by their chains, in order.
type Rules = BTreeMap<String, Vec<ForeignRule>>;

/// Reads the rules of the chain's table, or of one chain of it.
fn rules(socket: &mut Socket, of: &ForwardChain, chain: Option<&str>) -> Result<Rules> {
    let what = format!("list rules of table {} {}", of.family, of.table);
    let request = request(libc::NFT_MSG_GETRULE, of.family.number(), &what, |m| {
        m.text(rule::TABLE, &of.table);
        if let Some(chain) = chain {
            m.text(rule::CHAIN, chain);
        }
    })?;
    let mut rules = Rules::new();
    for reply in &socket.dump(&request)? {
        if let Some((chain, rule)) = explain(&what, parse_rule(reply, &of.table))? {
            rules.entry(chain).or_default().push(rule);
        }
    }
    Ok(rules)
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ForeignRule {
    conditions: Vec<Condition>,
    verdict: Verdict,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Condition {
    /// The state of the connection. That of a first packet is none that a rule accepts before others.
    Connection,
    /// The name of a device begins with these bytes, which may end with zeros, or does not.
    Device { is_input: bool, is_equal: bool, bytes: Vec<u8> },
    /// Something else.
    Other,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Verdict {
    Accept,
    Goto(String),
    Jump(String),
    #[default]
    None,
    Refuse,
    Return,
}

fn parse_rule(reply: &Reply, table: &str) -> Parsed<Option<(String, ForeignRule)>> {
    let body = body(reply)?;
    if text(require(body, rule::TABLE)?)? != table {
        return Ok(None);
    }
    let chain = text(require(body, rule::CHAIN)?)?.to_owned();
    let expressions = find(body, rule::EXPRESSIONS)?.unwrap_or_default();
    Ok(Some((chain, parse_expressions(expressions)?)))
}

fn parse_expressions(expressions: &[u8]) -> Parsed<ForeignRule> {
    let mut parsed = ForeignRule { conditions: Vec::new(), verdict: Verdict::None };
    // The key of `meta` that was loaded last.
    let mut loaded = None;
    for element in attributes(expressions) {
        let (_, element) = element?;
        let data = find(element, EXPRESSION_DATA)?.unwrap_or_default();
        match text(require(element, EXPRESSION_NAME)?)? {
            "counter" | "log" => {}
            "ct" => parsed.conditions.push(Condition::Connection),
            // `NFTA_META_DREG` and `_KEY`; without a destination it sets something.
            "meta" if find(data, 1)?.is_some() => loaded = Some(be32(require(data, 2)?)?),
            "meta" => {}
            // `NFTA_CMP_OP` and `_DATA`
            "cmp" => match (loaded, be32(require(data, 2)?)?) {
                (Some(key @ (META_INPUT | META_OUTPUT)), operation @ (0 | 1)) => {
                    let bytes = value(data, 3)?.to_vec();
                    let is_input = key == META_INPUT;
                    parsed.conditions.push(Condition::Device { is_input, is_equal: operation == 0, bytes });
                }
                _ => parsed.conditions.push(Condition::Other),
            },
            "reject" => parsed.verdict = Verdict::Refuse,
            "immediate" => parsed.verdict = parse_verdict(data)?.unwrap_or(parsed.verdict),
            _ => {
                loaded = None;
                parsed.conditions.push(Condition::Other);
            }
        }
    }
    Ok(parsed)
}

/// `NFTA_IMMEDIATE_DATA`, in it `NFTA_DATA_VERDICT`, in it `NFTA_VERDICT_CODE` and `_CHAIN`.
pub(super) fn parse_verdict(data: &[u8]) -> Parsed<Option<Verdict>> {
    let Some(verdict) = find(require(data, 2)?, 2)? else { return Ok(None) };
    let chain = || -> Parsed<String> { Ok(text(require(verdict, 2)?)?.to_owned()) };
    Ok(Some(match be32(require(verdict, 1)?)? {
        NF_ACCEPT => Verdict::Accept,
        NF_DROP => Verdict::Refuse,
        GOTO => Verdict::Goto(chain()?),
        JUMP => Verdict::Jump(chain()?),
        RETURN => Verdict::Return,
        _ => Verdict::None,
    }))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Accepted,
    Ended,
    Refused,
}

struct Walk<'a> {
    rules: &'a Rules,
    input: [u8; INTERFACE_NAME],
    output: [u8; INTERFACE_NAME],
    left: usize,
}

impl Walk<'_> {
    fn chain(&mut self, name: &str, depth: usize) -> Outcome {
        let Some(deeper) = depth.checked_sub(1) else { return Outcome::Accepted };
        for rule in self.rules.get(name).into_iter().flatten() {
            let Some(left) = self.left.checked_sub(1) else { return Outcome::Accepted };
            self.left = left;
            let Some(is_certain) = self.matches(rule) else { continue };
            match &rule.verdict {
                Verdict::Accept => return Outcome::Accepted,
                Verdict::Refuse if is_certain => return Outcome::Refused,
                Verdict::Return if is_certain => return Outcome::Ended,
                Verdict::Goto(to) | Verdict::Jump(to) => {
                    let is_last = is_certain && matches!(rule.verdict, Verdict::Goto(_));
                    match self.chain(to, deeper) {
                        Outcome::Accepted => return Outcome::Accepted,
                        Outcome::Refused if is_certain => return Outcome::Refused,
                        Outcome::Ended if is_last => return Outcome::Ended,
                        Outcome::Ended | Outcome::Refused => {}
                    }
                }
                Verdict::None | Verdict::Refuse | Verdict::Return => {}
            }
        }
        Outcome::Ended
    }

    /// Whether it certainly does; `None` if it does not.
    fn matches(&self, rule: &ForeignRule) -> Option<bool> {
        let mut is_certain = true;
        for condition in &rule.conditions {
            match condition {
                Condition::Connection => return None,
                Condition::Device { is_input, is_equal, bytes } => {
                    let name = if *is_input { &self.input } else { &self.output };
                    if name.starts_with(bytes) != *is_equal {
                        return None;
                    }
                }
                Condition::Other => is_certain = false,
            }
        }
        Some(is_certain)
    }
}

/// Name as the kernel compares it, filled up with zeros.
pub(super) fn padded(name: &str) -> [u8; INTERFACE_NAME] {
    let mut bytes = [0; INTERFACE_NAME];
    bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(conditions: Vec<Condition>, verdict: Verdict) -> ForeignRule {
        ForeignRule { conditions, verdict }
    }

    fn from(bytes: &[u8]) -> Condition {
        Condition::Device { is_input: true, is_equal: true, bytes: bytes.to_vec() }
    }

    /// As firewalld 1.3 has it, with pods' links in the zone `trusted`.
    fn firewalld() -> Rules {
        let goto = |to: &str| Verdict::Goto(to.to_owned());
        let to_uplink = Condition::Device { is_input: false, is_equal: true, bytes: b"eth0\0".to_vec() };
        Rules::from([
            (
                "forward".to_owned(),
                vec![
                    rule(vec![Condition::Connection], Verdict::Accept),
                    rule(vec![Condition::Other], Verdict::Refuse),
                    rule(vec![], Verdict::Jump("zones".to_owned())),
                    rule(vec![], Verdict::Refuse),
                ],
            ),
            (
                "zones".to_owned(),
                vec![rule(vec![from(b"veth")], goto("trusted")), rule(vec![], goto("public"))],
            ),
            (
                "public".to_owned(),
                vec![rule(vec![to_uplink], Verdict::Accept), rule(vec![], Verdict::Refuse)],
            ),
            ("trusted".to_owned(), vec![rule(vec![], Verdict::Accept)]),
        ])
    }

    fn outcome(rules: &Rules, input: &str, output: &str) -> Outcome {
        let walk = Walk { rules, input: padded(input), output: padded(output), left: MAX_RULES };
        { walk }.chain("forward", MAX_DEPTH)
    }

    #[test]
    fn what_is_in_no_zone_is_refused_and_what_is_in_one_is_accepted() {
        let rules = firewalld();
        assert_eq!(outcome(&rules, "wire_kube", "veth1"), Outcome::Refused);
        assert_eq!(outcome(&rules, "veth1", "wire_kube"), Outcome::Accepted);
        assert_eq!(outcome(&rules, "wire_kube", "eth0"), Outcome::Accepted);
        assert_eq!(outcome(&rules, "wire_kube", "eth01"), Outcome::Refused, "the whole name counts");
    }

    #[test]
    fn a_rule_for_other_properties_may_accept_and_does_not_refuse() {
        let mut rules = firewalld();
        let forward = rules.get_mut("forward").unwrap();
        forward.insert(0, rule(vec![Condition::Other], Verdict::Accept));
        assert_eq!(outcome(&rules, "wire_kube", "veth1"), Outcome::Accepted);
    }

    #[test]
    fn chains_that_lead_to_each_other_end() {
        let jump = |to: &str| vec![rule(vec![], Verdict::Jump(to.to_owned())); 3];
        let rules = Rules::from([("forward".to_owned(), jump("b")), ("b".to_owned(), jump("forward"))]);
        assert_eq!(outcome(&rules, "a", "b"), Outcome::Accepted, "nothing is said of what is not known");
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_expressions(&bytes);
            let _ = parse_rule(&Reply { kind: 0, payload: bytes }, "t");
        }
    }
}
