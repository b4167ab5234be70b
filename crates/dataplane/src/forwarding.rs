//! Lets packets of pods and of the mesh through firewalls of this host that drop what they do not know: Docker sets the policy of
//! iptables' `FORWARD` to `DROP`.
//!
//! Such a chain can only be opened by a rule in itself. So the packets get a mark in tables of ours, which know exactly which they
//! are, and iptables gets one rule per address family, at the end of the chain, which no other software needs to follow:
//!
//! ```text
//! iptables -A FORWARD -m mark --mark 0x10/0x10 -m comment --comment "fairlead: pods and mesh" -j ACCEPT
//! ```
//!
//! Packets that another rule drops stay dropped. Where no policy drops, nothing is marked and the rule goes. Chains that an administrator
//! wrote for nftables, and those of iptables-legacy, are not changed: [`Forwarding::problems`] says which rule they need. So are those of
//! firewalld, which rejects at the end what it does not know, and would lose a rule of ours when it is reloaded: the problem has its commands.

mod last_rule;
mod lasting;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use fairlead_address::IpFamily;
use fairlead_api::names::{LINK_GROUP_PODS, MARK_FORWARD, NFT_TABLE_FORWARD};
use fairlead_netlink::nftables::foreign::{self, AcceptingRule, ForwardChain};
use fairlead_netlink::nftables::{self, Chain, Comparison, Expression, Hook, Meta, Rule, Table};
use fairlead_netlink::{Error, Family, Result, Socket, xtables};
use nix::libc;

use crate::nft_table::{self, Applied};
use last_rule::LastRules;
use lasting::Lasting;

/// Before `filter` (`NF_IP_PRI_FILTER`, 0), where iptables has its chains.
pub(crate) const PRIORITY: i32 = -1;
/// Table of firewalld.
const FIREWALLD: &str = "firewalld";
/// Name as those of pods' links, and of all of them as firewalld writes it.
const POD_LINK: &str = "veth00000000";
const POD_LINKS: &str = "veth+";
/// Comment that iptables prints beside the rule.
const COMMENT: &str = "fairlead: pods and mesh";

/// The mesh and the pods' network look after the same chains.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Findings about forwarded packets in firewalls of other programs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forwarding {
    /// Whether the policy of any chain is to drop them, so that what is to pass has to be marked.
    pub is_dropped: bool,
    /// Chains that marked packets do not pass, once that has lasted for some seconds, chains whose end others want, and failures to read firewalls.
    pub problems: Vec<ForwardingProblem>,
}

/// Reason why forwarded packets of pods and of the mesh may be dropped. `Display` is a sentence for status and Events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForwardingProblem {
    /// Another program appends its rule again whenever the one of this program has become the last.
    Contested {
        /// Name of the chain.
        chain: String,
    },
    /// A chain drops them.
    Dropped {
        /// Name of the chain.
        chain: String,
        /// Command that adds a rule to let them through.
        command: String,
        /// The kernel's refusal, if this program tried to add the rule.
        refusal: Option<String>,
    },
    /// A chain rejects them at its end.
    Rejected {
        /// Name of the chain.
        chain: String,
        /// Command that lets them through.
        command: String,
    },
    /// The firewalls could not be read.
    Unreadable {
        /// The kernel's refusal.
        reason: String,
    },
}

impl ForwardingProblem {
    /// One word for conditions, Events and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Contested { .. } => "ForwardingContested",
            Self::Dropped { .. } | Self::Rejected { .. } => "ForwardingDropped",
            Self::Unreadable { .. } => "FirewallUnreadable",
        }
    }

    /// Chain that drops packets, if it is one.
    fn chain(&self) -> Option<&str> {
        match self {
            Self::Dropped { chain, .. } | Self::Rejected { chain, .. } => Some(chain),
            Self::Contested { .. } | Self::Unreadable { .. } => None,
        }
    }
}

impl fmt::Display for ForwardingProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Contested { chain } => write!(
                f,
                "another program appends a rule to chain {chain} again whenever the one of Fairlead has become the last, so that stays before it for now, \
                 and packets of pods and the mesh pass that the other rule may drop: have that program insert its rule at the beginning of the chain"
            ),
            Self::Dropped { chain, command, refusal } => {
                write!(
                    f,
                    "the policy of chain {chain} drops packets that this host forwards for pods and the mesh"
                )?;
                if let Some(refusal) = refusal {
                    write!(f, ", and no rule can be added ({refusal})")?;
                }
                write!(f, ": add this rule to that firewall: {command}")
            }
            Self::Rejected { chain, command } => write!(
                f,
                "the last rule of chain {chain} refuses packets that this host forwards for pods and the mesh: run this on the host, which lasts \
                 when that firewall is reloaded: {command}"
            ),
            Self::Unreadable { reason } => write!(
                f,
                "it is not known whether a firewall of this host drops packets that it forwards for pods and the mesh: {reason}"
            ),
        }
    }
}

/// Keeps the rules in chains of iptables, and knows which other chains need one.
#[derive(Debug, Default)]
pub struct ForwardRules {
    /// Findings in nftables, and its generation then.
    known: Option<(Forwarding, u32)>,
    last_rules: LastRules,
    lasting: Lasting,
    was_dropped: bool,
    /// The mesh's device; `None` for what looks after pods alone.
    mesh_device: Option<String>,
}

impl ForwardRules {
    /// Sets the device of the mesh, from which and to which packets are forwarded as well.
    pub fn set_mesh_device(&mut self, name: &str) {
        if self.mesh_device.as_deref() != Some(name) {
            (self.mesh_device, self.known) = (Some(name.to_owned()), None);
        }
    }

    /// Adds the rule where iptables drops what is forwarded, and deletes it where it is not needed. Sends nothing when nothing differs.
    pub fn apply(&mut self, now: Instant) -> Forwarding {
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.nftables(now).and_then(|mut found| {
            // Those of iptables-legacy are in no generation.
            IpFamily::BOTH.into_iter().try_for_each(|family| add_legacy(&mut found, family))?;
            Ok(found)
        });
        let mut forwarding = match found {
            Ok(found) => Forwarding { problems: self.lasting.told(found.problems, now), ..found },
            Err(error) => Forwarding {
                is_dropped: self.was_dropped,
                problems: vec![ForwardingProblem::Unreadable { reason: error.to_string() }],
            },
        };
        forwarding.problems.extend(self.last_rules.problems(now));
        self.was_dropped = forwarding.is_dropped;
        forwarding
    }

    fn nftables(&mut self, now: Instant) -> Result<Forwarding> {
        let mut socket = Socket::open(Family::Netfilter)?;
        let generation = nftables::generation(&mut socket)?;
        let known = self.known.take().filter(|(_, at)| *at == generation);
        let found = match known {
            Some((known, _)) => known,
            None => in_nftables(&mut socket, self.mesh_device.as_deref(), &mut self.last_rules, now)?,
        };
        let was_refused =
            |it: &ForwardingProblem| matches!(it, ForwardingProblem::Dropped { refusal: Some(_), .. });
        // A rule that rests is moved once its time is over, which is no change of nftables.
        let looks_again =
            found.problems.iter().any(was_refused) || self.last_rules.problems(now).next().is_some();
        // After a change of our own there is another generation, and it is looked at once more.
        self.known = (!looks_again).then(|| (found.clone(), generation));
        Ok(found)
    }
}

/// Deletes the rule from all chains of iptables, and the table that marks packets of pods.
///
/// # Errors
/// The kernel refuses.
pub fn remove() -> Result<()> {
    let marks = nft_table::remove(NFT_TABLE_FORWARD);
    let mut socket = Socket::open(Family::Netfilter)?;
    let chains = foreign::forward_chains(&mut socket)?;
    for chain in chains.iter().filter(|chain| chain.is_of_iptables()) {
        let rules = foreign::accepting(&mut socket, chain, MARK_FORWARD)?;
        delete(&mut socket, chain, &ours(&rules))?;
    }
    marks
}

/// Marks forwarded packets from and to pods, or stops that. Returns `None` where nothing is marked.
///
/// # Errors
/// The kernel refuses.
pub fn mark_pods(is_dropped: bool) -> Result<Option<Applied>> {
    if !is_dropped {
        return nft_table::remove(NFT_TABLE_FORWARD).map(|()| None);
    }
    let rule = |group| {
        let is_pod = Expression::Compare(Comparison::Equal, LINK_GROUP_PODS.to_ne_bytes().to_vec());
        Rule([vec![Expression::LoadMeta(group), is_pod], mark()].concat())
    };
    let rules = [Meta::InputInterfaceGroup, Meta::OutputInterfaceGroup].map(rule).to_vec();
    let chain = Chain { hook: Hook::FilterForward, priority: PRIORITY, rules };
    let chains = BTreeMap::from([("forward".to_owned(), chain)]);
    let sets = BTreeMap::new();
    let maps = BTreeMap::new();
    nft_table::apply(&Table {
        name: NFT_TABLE_FORWARD.to_owned(),
        sets,
        timed: BTreeMap::new(),
        maps,
        chains,
    })
    .map(Some)
}

/// `meta mark set meta mark | 0x10`
pub(crate) fn mark() -> Vec<Expression> {
    Expression::replace_mark(!MARK_FORWARD, MARK_FORWARD).to_vec()
}

fn in_nftables(
    socket: &mut Socket,
    mesh_device: Option<&str>,
    last_rules: &mut LastRules,
    now: Instant,
) -> Result<Forwarding> {
    let mut forwarding = Forwarding::default();
    for chain in foreign::forward_chains(socket)? {
        let may_change = chain.is_of_iptables() && !chain.is_owned;
        if !chain.drops && !may_change {
            if !foreign::accepting(socket, &chain, MARK_FORWARD)?.is_empty() {
                forwarding.is_dropped = true;
            } else if rejects(socket, &chain, mesh_device)? {
                forwarding.is_dropped = true;
                forwarding.problems.push(rejected(&chain, mesh_device));
            }
            continue;
        }
        forwarding.is_dropped |= chain.drops;
        let rules = foreign::accepting(socket, &chain, MARK_FORWARD)?;
        if may_change
            && let Some(followed) = delete_excess(socket, &chain, &rules)?
            && last_rules.may_move(&chain.to_string(), now)
        {
            move_to_end(socket, &chain, followed)?;
        }
        if !chain.drops || !rules.is_empty() {
            continue;
        }
        if !may_change {
            forwarding.problems.push(dropped(&chain, None));
        } else if let Err(error) = add(socket, &chain) {
            forwarding.problems.push(dropped(&chain, Some(error.to_string())));
        } else {
            tracing::info!(%chain, "added a rule to a firewall that drops what it does not know");
        }
    }
    Ok(forwarding)
}

/// Deletes rules of this program that are not needed. Returns the handle of the one that stays if another rule follows it.
fn delete_excess(socket: &mut Socket, chain: &ForwardChain, rules: &[AcceptingRule]) -> Result<Option<u64>> {
    let own = ours(rules);
    let needed = usize::from(chain.drops).min(own.len());
    let (excess, kept) = own.split_at(own.len().saturating_sub(needed));
    delete(socket, chain, excess)?;
    let is_followed = |rule: &&AcceptingRule| kept.contains(&rule.handle) && !rule.is_last;
    Ok(rules.iter().find(is_followed).map(|rule| rule.handle))
}

fn add(socket: &mut Socket, chain: &ForwardChain) -> Result<()> {
    nftables::commit(socket, &[foreign::accept_mark(chain, MARK_FORWARD, COMMENT)?])
}

/// Moves the rule behind those that another program appended, as ufw does when it is enabled: what they drop stays dropped.
fn move_to_end(socket: &mut Socket, chain: &ForwardChain, rule: u64) -> Result<()> {
    let messages = [foreign::delete_rule(chain, rule)?, foreign::accept_mark(chain, MARK_FORWARD, COMMENT)?];
    match nftables::commit(socket, &messages) {
        // Another program has deleted it meanwhile.
        Err(Error::Refused { errno: libc::ENOENT, .. }) => Ok(()),
        done => done,
    }
}

/// Handles of the rules that this program made. Others' are left alone, and do as well.
fn ours(rules: &[AcceptingRule]) -> Vec<u64> {
    let own = rules.iter().filter(|rule| rule.comment.as_deref() == Some(COMMENT));
    own.map(|rule| rule.handle).collect()
}

fn delete(socket: &mut Socket, chain: &ForwardChain, rules: &[u64]) -> Result<()> {
    for rule in rules {
        match nftables::commit(socket, &[foreign::delete_rule(chain, *rule)?]) {
            // Another program has deleted it meanwhile.
            Err(Error::Refused { errno: libc::ENOENT, .. }) => {}
            done => done?,
        }
    }
    Ok(())
}

fn dropped(chain: &ForwardChain, refusal: Option<String>) -> ForwardingProblem {
    let command = format!("nft 'add rule {chain} meta mark & {MARK_FORWARD:#x} == {MARK_FORWARD:#x} accept'");
    ForwardingProblem::Dropped { chain: chain.to_string(), command, refusal }
}

/// Whether the chain refuses packets between pods, or between pods and the mesh.
fn rejects(socket: &mut Socket, chain: &ForwardChain, mesh_device: Option<&str>) -> Result<bool> {
    let other = mesh_device.unwrap_or(POD_LINK);
    for (input, output) in [(other, POD_LINK), (POD_LINK, other)] {
        if foreign::refuses(socket, chain, input, output)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn rejected(chain: &ForwardChain, mesh_device: Option<&str>) -> ForwardingProblem {
    let command = if chain.table == FIREWALLD {
        let mesh = mesh_device.map(|device| format!(" --add-interface={device}")).unwrap_or_default();
        // The zone is for what comes from these links, the policy for what goes there.
        let zone = format!("--zone=trusted --add-interface={POD_LINKS}{mesh}");
        let policy = [
            "--new-policy=fairlead",
            "--policy=fairlead --set-target=ACCEPT",
            "--policy=fairlead --add-ingress-zone=ANY",
            "--policy=fairlead --add-egress-zone=trusted",
        ];
        let changes = [zone.as_str()].into_iter().chain(policy);
        let commands: String = changes.map(|change| format!("firewall-cmd --permanent {change}; ")).collect();
        format!("{commands}firewall-cmd --reload")
    } else {
        format!("nft 'insert rule {chain} meta mark & {MARK_FORWARD:#x} == {MARK_FORWARD:#x} accept'")
    };
    ForwardingProblem::Rejected { chain: chain.to_string(), command }
}

fn add_legacy(forwarding: &mut Forwarding, family: IpFamily) -> Result<()> {
    let Some(chain) = xtables::legacy_forward(family, MARK_FORWARD)?.filter(|chain| chain.drops) else {
        return Ok(());
    };
    forwarding.is_dropped = true;
    if !chain.accepts_mark {
        let program = match family {
            IpFamily::V4 => "iptables-legacy",
            IpFamily::V6 => "ip6tables-legacy",
        };
        forwarding.problems.push(ForwardingProblem::Dropped {
            chain: format!("FORWARD of {program}"),
            command: format!(
                "{program} -A FORWARD -m mark --mark {MARK_FORWARD:#x}/{MARK_FORWARD:#x} -j ACCEPT"
            ),
            refusal: None,
        });
    }
    Ok(())
}
