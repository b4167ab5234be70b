//! Chains of other programs at the forward hook, and rules in them that accept packets with a bit of the mark.
//! [`routing`] has rules that change marks, check sources or translate destinations.
//!
//! A verdict to accept in one table does not count in the next one of the same hook: a packet is forwarded only if each chain accepts
//! it. So what another program's chain drops by its policy can only be let through in that chain.
//!
//! The rule has the form of iptables' own `mark` and `comment` matches (`linux/netfilter/nf_tables_compat.h`): every version of
//! iptables-nft prints and restores it. Versions before 1.8.9 read a native comparison of the mark as a rule without a condition.

pub mod routing;
mod walk;

use std::fmt;

use fairlead_address::IpFamily;
use nix::libc;

use super::attributes::{AttributeWriter, Parsed, array, attributes, be32, explain, find, require, text};
use super::expression::Expression;
use super::request::{body, family_header, kind};
use super::uapi::{NF_ACCEPT, NFPROTO_INET, chain, rule, table};
pub use walk::refuses;

use crate::{Message, Reply, Result, Socket};

/// `NFPROTO_IPV4`, `NFPROTO_IPV6` (`linux/netfilter.h`)
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
/// `NF_INET_FORWARD`
const FORWARD: u32 = 2;
/// `NF_DROP`
const NF_DROP: u32 = 0;
/// `NFT_TABLE_F_DORMANT`: its chains see no packets.
const TABLE_DORMANT: u32 = 1;
/// `NFT_TABLE_F_OWNER`: only the process that made it can change it.
const TABLE_OWNED: u32 = 2;
/// `NFTA_MATCH_*`
const MATCH_NAME: u16 = 1;
const MATCH_REVISION: u16 = 2;
const MATCH_INFO: u16 = 3;
/// `struct xt_comment_info` (`linux/netfilter/xt_comment.h`) in bytes.
const COMMENT: usize = 256;
/// `struct xt_mark_mtinfo1` (`linux/netfilter/xt_mark.h`): mark, mask, whether to invert; in bytes, aligned to eight.
const MARK_MATCH: usize = 16;
/// `NFTA_RULE_HANDLE`
const RULE_HANDLE: u16 = 3;
/// `NFTA_LIST_ELEM`, `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`
const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
/// `NFT_META_MARK`
const META_MARK: u32 = 3;

/// A family of tables whose chains see forwarded packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TableFamily {
    /// `inet`: both.
    Inet,
    /// `ip`
    Ipv4,
    /// `ip6`
    Ipv6,
}

impl TableFamily {
    const fn number(self) -> u8 {
        match self {
            Self::Inet => NFPROTO_INET,
            Self::Ipv4 => NFPROTO_IPV4,
            Self::Ipv6 => NFPROTO_IPV6,
        }
    }

    /// Family of all packets that its chains see; `None` for both.
    pub const fn only(self) -> Option<IpFamily> {
        match self {
            Self::Inet => None,
            Self::Ipv4 => Some(IpFamily::V4),
            Self::Ipv6 => Some(IpFamily::V6),
        }
    }

    fn of(number: u8) -> Option<Self> {
        [Self::Inet, Self::Ipv4, Self::Ipv6].into_iter().find(|family| family.number() == number)
    }
}

impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ipv4 => "ip",
            Self::Ipv6 => "ip6",
        })
    }
}

/// A base chain of type filter at the forward hook. `Display` is how `nft` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardChain {
    /// Family of its table.
    pub family: TableFamily,
    /// Name of its table.
    pub table: String,
    /// Name of the chain.
    pub name: String,
    /// Whether its policy is to drop.
    pub drops: bool,
    /// Whether the table belongs to a process that alone can change it.
    pub is_owned: bool,
}

impl ForwardChain {
    /// Whether iptables-nft made it, by its name.
    pub fn is_of_iptables(&self) -> bool {
        self.family != TableFamily::Inet && self.table == "filter" && self.name == "FORWARD"
    }
}

impl fmt::Display for ForwardChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.family, self.table, self.name)
    }
}

/// All chains that see forwarded packets, whichever program made them. Those of dormant tables see none.
///
/// # Errors
/// The kernel refuses (no nftables, no right), or its answer cannot be decoded.
pub fn forward_chains(socket: &mut Socket) -> Result<Vec<ForwardChain>> {
    let tables = tables(socket)?;
    let what = "list the chains of nftables";
    let replies = socket.dump(&request(libc::NFT_MSG_GETCHAIN, libc::AF_UNSPEC as u8, what, |_| {})?)?;
    let chains: Parsed<Vec<_>> = replies.iter().map(parse_chain).collect();
    let mut chains: Vec<ForwardChain> = explain(what, chains)?.into_iter().flatten().collect();
    chains.retain_mut(|chain| {
        let flags = flags_of(&tables, chain.family, &chain.table);
        chain.is_owned = flags & TABLE_OWNED != 0;
        flags & TABLE_DORMANT == 0
    });
    Ok(chains)
}

/// Tables: family, name and flags.
fn tables(socket: &mut Socket) -> Result<Vec<(u8, String, u32)>> {
    let what = "list the tables of nftables";
    let replies = socket.dump(&request(libc::NFT_MSG_GETTABLE, libc::AF_UNSPEC as u8, what, |_| {})?)?;
    let tables: Parsed<Vec<_>> = replies.iter().map(parse_table).collect();
    explain(what, tables)
}

fn flags_of(tables: &[(u8, String, u32)], family: TableFamily, table: &str) -> u32 {
    let found = tables.iter().find(|(number, name, _)| *number == family.number() && name == table);
    found.map_or(0, |(_, _, flags)| *flags)
}

/// A rule that accepts each packet with certain bits of the mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptingRule {
    /// The kernel's number of it in its table.
    pub handle: u64,
    /// Text of its `comment` match; by that a program knows its own.
    pub comment: Option<String>,
    /// Whether no other rule follows it in its chain.
    pub is_last: bool,
}

/// The chain's rules that accept each packet with these bits of the mark, whichever program made them.
///
/// # Errors
/// As [`forward_chains`].
pub fn accepting(socket: &mut Socket, chain: &ForwardChain, mark: u32) -> Result<Vec<AcceptingRule>> {
    let what = format!("list rules of chain {chain}");
    let request = request(libc::NFT_MSG_GETRULE, chain.family.number(), &what, |m| {
        m.text(rule::TABLE, &chain.table);
        m.text(rule::CHAIN, &chain.name);
    })?;
    let mut rules: Vec<AcceptingRule> = Vec::new();
    for reply in &socket.dump(&request)? {
        let parsed = body(reply).and_then(|body| parse_accepting(body, chain, mark));
        let (is_of_chain, rule) = explain(&what, parsed)?;
        if let Some(before) = rules.last_mut().filter(|_| is_of_chain) {
            before.is_last = false;
        }
        rules.extend(rule);
    }
    Ok(rules)
}

/// Appends a rule that accepts each packet with these bits of the mark. Iptables prints it as
/// `-A FORWARD -m mark --mark M/M -m comment --comment TEXT -j ACCEPT`.
///
/// # Errors
/// None in practice: a name would have to be longer than an attribute can be.
pub fn accept_mark(chain: &ForwardChain, mark: u32, comment: &str) -> Result<Message> {
    let bits = [mark.to_ne_bytes(), mark.to_ne_bytes()].concat();
    let change = libc::NLM_F_CREATE | libc::NLM_F_APPEND;
    let what = format!("add a rule to chain {chain}");
    change_message(libc::NFT_MSG_NEWRULE, change, chain, what, |m| {
        m.nested(rule::EXPRESSIONS, |list| {
            write_match(list, "mark", 1, bits, MARK_MATCH);
            let text = comment.bytes().take(COMMENT.saturating_sub(1)).collect();
            write_match(list, "comment", 0, text, COMMENT);
            Expression::Counter.write(list);
            Expression::Accept.write(list);
        });
    })
}

/// Deletes a rule by its handle.
///
/// # Errors
/// As [`accept_mark`].
pub fn delete_rule(chain: &ForwardChain, handle: u64) -> Result<Message> {
    let what = format!("delete rule {handle} of chain {chain}");
    change_message(libc::NFT_MSG_DELRULE, 0, chain, what, |m| m.bytes(RULE_HANDLE, &handle.to_be_bytes()))
}

fn write_match(list: &mut AttributeWriter, name: &str, revision: u32, mut info: Vec<u8>, size: usize) {
    info.resize(size, 0);
    list.nested(LIST_ELEMENT, |element| {
        element.text(EXPRESSION_NAME, "match");
        element.nested(EXPRESSION_DATA, |data| {
            data.text(MATCH_NAME, name);
            data.be32(MATCH_REVISION, revision);
            data.bytes(MATCH_INFO, &info);
        });
    });
}

fn change_message(
    number: i32,
    flags: i32,
    chain: &ForwardChain,
    what: String,
    write: impl FnOnce(&mut AttributeWriter),
) -> Result<Message> {
    let mut message = request(number, chain.family.number(), &what, |m| {
        m.text(rule::TABLE, &chain.table);
        m.text(rule::CHAIN, &chain.name);
        write(m);
    })?;
    message.flags = flags as u16;
    Ok(message)
}

fn request(number: i32, family: u8, what: &str, write: impl FnOnce(&mut AttributeWriter)) -> Result<Message> {
    let mut writer = AttributeWriter::new(&family_header(family, 0));
    write(&mut writer);
    Ok(Message { kind: kind(number), flags: 0, payload: writer.finish(what)?, what: what.to_owned() })
}

/// Family, name and flags.
fn parse_table(reply: &Reply) -> Parsed<(u8, String, u32)> {
    let body = body(reply)?;
    let flags = find(body, table::FLAGS)?.map_or(Ok(0), be32)?;
    Ok((family_of(reply), text(require(body, table::NAME)?)?.to_owned(), flags))
}

fn family_of(reply: &Reply) -> u8 {
    reply.payload.first().copied().unwrap_or_default()
}

/// `None` for a chain that sees no forwarded packets, or translates addresses only.
fn parse_chain(reply: &Reply) -> Parsed<Option<ForwardChain>> {
    let Some(family) = TableFamily::of(family_of(reply)) else { return Ok(None) };
    let body = body(reply)?;
    let Some(hook) = find(body, chain::HOOK)? else { return Ok(None) };
    let is_filter = text(require(body, chain::TYPE)?)? == "filter";
    if !is_filter || be32(require(hook, chain::HOOK_NUMBER)?)? != FORWARD {
        return Ok(None);
    }
    Ok(Some(ForwardChain {
        family,
        table: text(require(body, chain::TABLE)?)?.to_owned(),
        name: text(require(body, chain::NAME)?)?.to_owned(),
        drops: be32(require(body, chain::POLICY)?)? == NF_DROP,
        is_owned: false,
    }))
}

/// Whether the rule is of the chain, and the rule unless it does something else.
fn parse_accepting(body: &[u8], of: &ForwardChain, mark: u32) -> Parsed<(bool, Option<AcceptingRule>)> {
    let is_of_chain =
        text(require(body, rule::TABLE)?)? == of.table && text(require(body, rule::CHAIN)?)? == of.name;
    let handle = u64::from_be_bytes(array(require(body, RULE_HANDLE)?)?);
    let Some(expressions) = find(body, rule::EXPRESSIONS)?.filter(|_| is_of_chain) else {
        return Ok((is_of_chain, None));
    };
    let comment = if accepts_mark(expressions, mark)? { Some(comment(expressions)?) } else { None };
    Ok((true, comment.map(|comment| AcceptingRule { handle, comment, is_last: true })))
}

/// Text of the first `comment` match of a rule (`struct xt_comment_info`).
fn comment(expressions: &[u8]) -> Parsed<Option<String>> {
    for element in attributes(expressions) {
        let (_, element) = element?;
        let data = find(element, EXPRESSION_DATA)?.unwrap_or_default();
        if text(require(element, EXPRESSION_NAME)?)? == "match"
            && text(require(data, MATCH_NAME)?)? == "comment"
        {
            let said = require(data, MATCH_INFO)?.split(|byte| *byte == 0).next().unwrap_or_default();
            return Ok(Some(String::from_utf8_lossy(said).into_owned()));
        }
    }
    Ok(None)
}

/// Progress in reading a rule's comparison of the mark.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    Nothing,
    Loaded,
    Masked,
    Compared,
}

/// Whether these expressions accept each packet with these bits of the mark. Any condition besides is one too many.
fn accepts_mark(expressions: &[u8], mark: u32) -> Parsed<bool> {
    let mut seen = Seen::Nothing;
    let mut accepts = false;
    for element in attributes(expressions) {
        let (_, element) = element?;
        let name = text(require(element, EXPRESSION_NAME)?)?;
        let data = find(element, EXPRESSION_DATA)?.unwrap_or_default();
        seen = match (name, seen) {
            ("bitwise", Seen::Loaded) if masks(data, mark)? => Seen::Masked,
            ("cmp", Seen::Masked) if compares(data, mark)? => Seen::Compared,
            ("counter", _) => seen,
            ("immediate", _) => {
                accepts = verdict(data)? == Some(NF_ACCEPT);
                seen
            }
            ("match", _) if text(require(data, MATCH_NAME)?)? == "comment" => seen,
            ("match", Seen::Nothing) if is_mark_match(data, mark)? => Seen::Compared,
            ("meta", Seen::Nothing) if find(data, 2)?.map_or(Ok(0), be32)? == META_MARK => Seen::Loaded,
            _ => return Ok(false),
        };
    }
    Ok(accepts && seen == Seen::Compared)
}

/// `NFTA_BITWISE_MASK` and `_XOR`.
fn masks(data: &[u8], mark: u32) -> Parsed<bool> {
    Ok(value(data, 4)? == mark.to_ne_bytes() && value(data, 5)? == [0; 4])
}

/// `NFTA_CMP_OP` and `_DATA`: equal to the bits, or, of a single one, not zero.
fn compares(data: &[u8], mark: u32) -> Parsed<bool> {
    let operation = be32(require(data, 2)?)?;
    let with = value(data, 3)?;
    let is_one_bit = mark.is_power_of_two();
    Ok((operation == 0 && with == mark.to_ne_bytes()) || (operation == 1 && is_one_bit && with == [0; 4]))
}

/// `NFTA_DATA_VALUE` in an attribute; empty if there is none.
fn value(data: &[u8], attribute: u16) -> Parsed<&[u8]> {
    Ok(match find(data, attribute)? {
        Some(nested) => find(nested, 1)?.unwrap_or_default(),
        None => &[],
    })
}

/// `NFTA_IMMEDIATE_DATA`, in it `NFTA_DATA_VERDICT`, in it `NFTA_VERDICT_CODE`.
fn verdict(data: &[u8]) -> Parsed<Option<u32>> {
    let Some(verdict) = find(require(data, 2)?, 2)? else { return Ok(None) };
    find(verdict, 1)?.map(be32).transpose()
}

fn is_mark_match(data: &[u8], mark: u32) -> Parsed<bool> {
    let wanted = [mark.to_ne_bytes().as_slice(), &mark.to_ne_bytes(), &[0]].concat();
    let is_mark = text(require(data, MATCH_NAME)?)? == "mark" && be32(require(data, MATCH_REVISION)?)? == 1;
    Ok(is_mark && require(data, MATCH_INFO)?.starts_with(&wanted))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nftables::{Comparison, Meta};

    const MARK: u32 = 0x10;

    fn chain() -> ForwardChain {
        let (table, name) = ("filter".to_owned(), "FORWARD".to_owned());
        ForwardChain { family: TableFamily::Ipv4, table, name, drops: true, is_owned: false }
    }

    fn accepts(expressions: &[Expression]) -> bool {
        let mut list = AttributeWriter::new(&[]);
        expressions.iter().for_each(|expression| expression.write(&mut list));
        accepts_mark(&list.finish("test").unwrap(), MARK).unwrap()
    }

    #[test]
    fn our_own_rule_is_recognized_and_its_bits_count() {
        let message = accept_mark(&chain(), MARK, "text").unwrap();
        let list = require(&message.payload[4..], rule::EXPRESSIONS).unwrap();
        assert!(accepts_mark(list, MARK).unwrap());
        assert!(!accepts_mark(list, 0x30).unwrap());
    }

    #[test]
    fn a_rule_with_another_condition_or_verdict_is_another_one() {
        let load = Expression::LoadMeta(Meta::Mark);
        let mask = Expression::Bitwise { mask: MARK.to_ne_bytes().to_vec(), xor: vec![0; 4] };
        let equal = Expression::Compare(Comparison::Equal, MARK.to_ne_bytes().to_vec());
        let native = [load.clone(), mask.clone(), equal.clone()];
        let with = |more: &[Expression]| [&native, more].concat();
        assert!(accepts(&with(&[Expression::Accept])));
        assert!(accepts(&with(&[Expression::Counter, Expression::Accept])));
        assert!(!accepts(&with(&[Expression::Drop])));
        assert!(!accepts(&native));
        assert!(!accepts(&[load.clone(), equal, Expression::Accept]), "other bits count too");
        assert!(!accepts(&[load, mask, Expression::Accept]), "nothing is compared");
        assert!(!accepts(&[Expression::Accept]));
        let interface = [Expression::LoadMeta(Meta::InputInterface), Expression::is_interface("eth0")];
        assert!(!accepts(&[&interface[..], &with(&[Expression::Accept])].concat()));
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = accepts_mark(&bytes, MARK);
            let _ = parse_accepting(&bytes, &chain(), MARK);
            let reply = Reply { kind: 0, payload: bytes };
            let _ = parse_chain(&reply);
            let _ = parse_table(&reply);
        }
    }
}
