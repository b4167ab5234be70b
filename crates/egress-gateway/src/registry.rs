//! Clients of a gateway: what node programs claim, judged by what the cluster says. Without I/O and without a clock.
//!
//! A claim is kept as the node program sent it, and judged anew whenever anything changes; so a client whose AddressBlock is seen a
//! moment later is accepted then. What a node program sends never changes what is accepted of another Node: the one that has an
//! address keeps it as long as it claims it and the address is one of its Node.
//!
//! Clients of an earlier process are known by their addresses alone. They are kept until the node program of their Node has sent all of
//! its clients; those of no Node are dropped when a grace period ends.

mod client;
pub(crate) mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

pub use client::{Client, Reason, Refusal};

use crate::facts::Facts;

/// Clients of one Node that are accepted. kubelet runs 110 pods unless told otherwise.
pub const MAX_PER_NODE: usize = 512;
/// Claims of one Node that are kept; further ones are refused and forgotten.
pub const MAX_CLAIMS: usize = 2 * MAX_PER_NODE;
/// Addresses of all clients: the size of the data path's tables.
pub const MAX_ADDRESSES: usize = fairlead_fou::MAX_CLIENTS;

/// A stream of a node program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

/// Clients that a message of a node program registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Update {
    /// All clients of the Node.
    All(Vec<Client>),
    /// Clients that are new or have other addresses, and UIDs of those that are gone.
    Change(Vec<Client>, Vec<String>),
}

/// A message that does not follow the protocol; its stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A change before all clients.
    #[error("a change came before all clients")]
    ChangeFirst,
    /// A revision that is not greater than the one before.
    #[error("the revision of a message is not greater than that of the one before")]
    Revision,
    /// Another stream of the same Node is newer.
    #[error("a newer stream of this Node has replaced this one")]
    Replaced,
}

/// The clients of all Nodes.
#[derive(Debug, Default)]
pub struct Registry {
    own: Vec<IpAddr>,
    facts: Facts,
    nodes: BTreeMap<String, NodeClaims>,
    owners: BTreeMap<IpAddr, Owner>,
    refusals: BTreeMap<String, BTreeMap<String, Refusal>>,
    adopted: BTreeSet<IpAddr>,
    is_grace_over: bool,
    last: u64,
    version: u64,
}

/// Pod that has an address, and its Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Name of the Node.
    pub node: String,
    /// The pod.
    pub client: Client,
}

/// Clients that the node program of one Node has registered.
#[derive(Debug, Default)]
struct NodeClaims {
    stream: Option<StreamId>,
    revision: u64,
    listing: Listing,
    claims: BTreeMap<String, Claim>,
}

/// Whether a node program has sent all of its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Listing {
    /// The stream has.
    Complete,
    /// No stream has.
    #[default]
    Never,
    /// An earlier stream has, and this one has not yet.
    Outdated,
}

#[derive(Debug)]
struct Claim {
    client: Client,
    /// Grows with each claim of any Node.
    number: u64,
}

impl Registry {
    /// A gateway with these addresses of its own, whose data path already has clients with the `adopted` ones.
    pub fn new(own: Vec<IpAddr>, adopted: impl IntoIterator<Item = IpAddr>) -> Self {
        let adopted = adopted.into_iter().filter(|address| !own.contains(address)).take(MAX_ADDRESSES);
        Self { adopted: adopted.collect(), own, ..Self::default() }
    }

    /// A number that grows whenever [`Self::addresses`] or what is refused changes.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The addresses of all clients.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        self.owners.keys().chain(&self.adopted).copied().collect()
    }

    /// Accepted clients by address.
    pub fn owners(&self) -> &BTreeMap<IpAddr, Owner> {
        &self.owners
    }

    /// Addresses of clients of an earlier process that no node program has registered yet.
    pub fn adopted(&self) -> &BTreeSet<IpAddr> {
        &self.adopted
    }

    /// Whether an address is that of a client, or may be that of a pod, which is a client elsewhere or will be one here.
    pub fn may_be_client(&self, address: IpAddr) -> bool {
        self.owners.contains_key(&address)
            || self.adopted.contains(&address)
            || self.facts.nodes_of(address).next().is_some()
    }

    /// Refusals of clients of a Node, in the order of their UIDs.
    pub fn refusals(&self, node: &str) -> impl Iterator<Item = &Refusal> {
        self.refusals.get(node).into_iter().flat_map(BTreeMap::values)
    }

    /// The cluster has changed.
    pub fn set_facts(&mut self, facts: Facts) {
        if self.facts != facts {
            self.facts = facts;
            self.judge();
        }
    }

    /// Clients of an earlier process that are on no known Node are dropped from now on.
    pub fn end_grace(&mut self) {
        self.is_grace_over = true;
        self.judge();
    }

    /// A stream of the node program of this Node begins, and replaces an earlier one.
    pub fn begin(&mut self, node: &str) -> StreamId {
        let stream = StreamId(self.next());
        let of_node = self.nodes.entry(node.to_owned()).or_default();
        of_node.stream = Some(stream);
        of_node.revision = 0;
        if of_node.listing == Listing::Complete {
            of_node.listing = Listing::Outdated;
        }
        stream
    }

    /// A stream ends. The clients of its Node stay.
    pub fn end(&mut self, node: &str, stream: StreamId) {
        if let Some(of_node) = self.nodes.get_mut(node).filter(|of_node| of_node.stream == Some(stream)) {
            of_node.stream = None;
            self.judge();
        }
    }

    /// Checks the revision of a message.
    ///
    /// # Errors
    /// See [`ProtocolError`].
    pub fn check(&mut self, node: &str, stream: StreamId, revision: u64) -> Result<(), ProtocolError> {
        let of_node = self.nodes.get_mut(node).filter(|of_node| of_node.stream == Some(stream));
        let of_node = of_node.ok_or(ProtocolError::Replaced)?;
        if revision <= of_node.revision {
            return Err(ProtocolError::Revision);
        }
        of_node.revision = revision;
        Ok(())
    }

    /// Takes what a message says, and returns what of it cannot even be kept. What is refused otherwise is in [`Self::refusals`].
    ///
    /// # Errors
    /// See [`ProtocolError`].
    pub fn update(
        &mut self,
        node: &str,
        stream: StreamId,
        update: Update,
    ) -> Result<Vec<Refusal>, ProtocolError> {
        let mut last = self.last;
        let of_node = self.nodes.get_mut(node).filter(|of_node| of_node.stream == Some(stream));
        let of_node = of_node.ok_or(ProtocolError::Replaced)?;
        let set = match update {
            Update::All(all) => {
                let stays: BTreeSet<&str> = all.iter().map(|client| client.uid.as_str()).collect();
                of_node.claims.retain(|uid, _| stays.contains(uid.as_str()));
                of_node.listing = Listing::Complete;
                all
            }
            Update::Change(..) if of_node.listing != Listing::Complete => {
                return Err(ProtocolError::ChangeFirst);
            }
            Update::Change(set, removed) => {
                removed.iter().for_each(|uid| drop(of_node.claims.remove(uid)));
                set
            }
        };
        let mut refused = Vec::new();
        for client in set {
            last = last.wrapping_add(1);
            refused.extend(of_node.claim(client, last));
        }
        self.last = last;
        self.judge();
        Ok(refused)
    }

    /// Number of clients of a Node that an update would make, change or remove.
    pub fn changes(&self, node: &str, update: &Update) -> usize {
        let claims = self.nodes.get(node).map(|of_node| &of_node.claims);
        let present = |uid: &str| claims.and_then(|claims| claims.get(uid)).map(|claim| &claim.client);
        let is_new = |client: &&Client| present(&client.uid) != Some(client);
        match update {
            Update::All(all) => {
                let stays: BTreeSet<&str> = all.iter().map(|client| client.uid.as_str()).collect();
                let gone =
                    claims.into_iter().flat_map(BTreeMap::keys).filter(|uid| !stays.contains(uid.as_str()));
                gone.count().saturating_add(all.iter().filter(is_new).count())
            }
            Update::Change(set, removed) => {
                let gone = removed.iter().filter(|uid| present(uid).is_some());
                gone.count().saturating_add(set.iter().filter(is_new).count())
            }
        }
    }

    fn next(&mut self) -> u64 {
        self.last = self.last.wrapping_add(1);
        self.last
    }

    /// Decides anew which claims are accepted.
    fn judge(&mut self) {
        let facts = &self.facts;
        self.nodes.retain(|node, of_node| of_node.stream.is_some() || facts.nodes.contains(node));
        let mut refusals = BTreeMap::<String, BTreeMap<String, Refusal>>::new();
        let mut refuse = |node: &str, refusal: Refusal| {
            refusals.entry(node.to_owned()).or_default().insert(refusal.uid.clone(), refusal);
        };
        let mut candidates = Vec::new();
        for (node, of_node) in &self.nodes {
            let (accepted, refused) = self.judge_node(node, of_node);
            refused.into_iter().for_each(|refusal| refuse(node, refusal));
            candidates.extend(
                accepted.into_iter().map(|claim| (!self.has(node, &claim.client), claim.number, node, claim)),
            );
        }
        // Those that have their addresses keep them, then the first one gets them.
        candidates.sort_unstable_by_key(|(is_new, number, ..)| (*is_new, *number));
        let mut owners = BTreeMap::new();
        let mut total = self.adopted.len();
        for (_, _, node, Claim { client, .. }) in candidates {
            match self.admit(node, client, &owners, total) {
                Some(refusal) => refuse(node, refusal),
                None => {
                    for address in client.addresses.iter() {
                        total = total.saturating_add(usize::from(!self.adopted.contains(&address)));
                        owners.insert(address, Owner { node: node.clone(), client: client.clone() });
                    }
                }
            }
        }
        self.replace(owners, refusals);
    }

    /// The claims of one Node that are valid by themselves; of two with one address the newest.
    fn judge_node<'a>(&self, node: &str, of_node: &'a NodeClaims) -> (Vec<&'a Claim>, Vec<Refusal>) {
        let mut claims: Vec<&Claim> = of_node.claims.values().collect();
        claims.sort_unstable_by_key(|claim| std::cmp::Reverse(claim.number));
        let mut accepted = Vec::new();
        let mut refused = Vec::new();
        let mut taken = BTreeSet::new();
        for claim in claims {
            let client = &claim.client;
            if let Some(refusal) = self.fault(node, client) {
                refused.push(refusal);
            } else if client.addresses.iter().any(|address| taken.contains(&address)) {
                let message = "a newer pod of the same Node has its address";
                refused.push(Refusal::new(&client.uid, Reason::AddressInUse, message));
            } else {
                taken.extend(client.addresses.iter());
                accepted.push(claim);
            }
        }
        accepted.sort_unstable_by_key(|claim| (!self.has(node, &claim.client), claim.number));
        let excess = accepted.split_off(accepted.len().min(MAX_PER_NODE));
        refused.extend(excess.into_iter().map(|claim| too_many(&claim.client.uid)));
        (accepted, refused)
    }

    /// Reason why a client cannot be accepted, whatever others there are.
    fn fault(&self, node: &str, client: &Client) -> Option<Refusal> {
        let Client { uid, namespace, name, addresses } = client;
        if !self.facts.allows(namespace) {
            let message = format!("spec.allowedNamespaces of the Egress does not have {namespace}; add it");
            return Some(Refusal::new(uid, Reason::NamespaceNotAllowed, message));
        }
        if let Some(own) = addresses.iter().find(|address| self.own.contains(address)) {
            let message = format!("{own} of pod {namespace}/{name} is the gateway's own address");
            return Some(Refusal::new(uid, Reason::InvalidAddress, message));
        }
        let foreign = addresses.iter().find(|address| !self.facts.is_of(node, *address))?;
        let message = format!(
            "{foreign} of pod {namespace}/{name} is in no AddressBlock and no spec.podCIDRs of Node {node}"
        );
        Some(Refusal::new(uid, Reason::AddressNotOfNode, message))
    }

    /// Reason why a valid client finds no place beside those that are accepted.
    fn admit(
        &self,
        node: &str,
        client: &Client,
        owners: &BTreeMap<IpAddr, Owner>,
        total: usize,
    ) -> Option<Refusal> {
        let other = client.addresses.iter().find_map(|address| Some((address, owners.get(&address)?)));
        if let Some((address, Owner { node: other, client: by })) = other {
            let message = format!(
                "pod {}/{} of Node {other} has registered {address}, which is one of Node {node} as well; let their AddressBlocks and podCIDRs not overlap",
                by.namespace, by.name
            );
            return Some(Refusal::new(&client.uid, Reason::AddressInUse, message));
        }
        let new = client.addresses.iter().filter(|address| !self.adopted.contains(address)).count();
        (total.saturating_add(new) > MAX_ADDRESSES).then(|| too_many(&client.uid))
    }

    /// Whether a Node has all addresses of a client already.
    fn has(&self, node: &str, client: &Client) -> bool {
        client
            .addresses
            .iter()
            .all(|address| self.owners.get(&address).is_some_and(|owner| owner.node == node))
    }

    fn replace(
        &mut self,
        owners: BTreeMap<IpAddr, Owner>,
        refusals: BTreeMap<String, BTreeMap<String, Refusal>>,
    ) {
        let mut adopted = std::mem::take(&mut self.adopted);
        let before = adopted.len();
        adopted.retain(|address| !owners.contains_key(address) && self.may_be_claimed(*address));
        let is_same = before == adopted.len() && self.owners == owners && self.refusals == refusals;
        self.adopted = adopted;
        self.owners = owners;
        self.refusals = refusals;
        self.version = self.version.wrapping_add(u64::from(!is_same));
    }

    /// Whether the node program that has this client may not have said so yet.
    fn may_be_claimed(&self, address: IpAddr) -> bool {
        let is_open =
            |node: &str| self.nodes.get(node).is_none_or(|of_node| of_node.listing == Listing::Never);
        let mut nodes = self.facts.nodes_of(address).peekable();
        if nodes.peek().is_none() { !self.is_grace_over } else { nodes.any(is_open) }
    }
}

impl NodeClaims {
    /// Keeps a claim, unless there are too many.
    fn claim(&mut self, client: Client, number: u64) -> Option<Refusal> {
        let is_full = self.claims.len() >= MAX_CLAIMS;
        match self.claims.get(&client.uid) {
            // The same once more is not newer than what came in between.
            Some(known) if known.client == client => None,
            None if is_full => Some(too_many(&client.uid)),
            _ => {
                self.claims.insert(client.uid.clone(), Claim { client, number });
                None
            }
        }
    }
}

fn too_many(uid: &str) -> Refusal {
    let message = format!(
        "a gateway takes {MAX_PER_NODE} clients of one Node and {MAX_ADDRESSES} addresses of all; use another Egress"
    );
    Refusal::new(uid, Reason::TooManyClients, message)
}
