//! The other gateways of an Egress that has source addresses: who they are, and what is sent to them and heard from them.
//!
//! The Lease `NAME-gateways` has an annotation of each gateway with its addresses and the hash of its key ([`members`](fairlead_source_addresses::members)). Each gateway
//! dials all others, and sends on the connection that it has dialed; answers come back on it. Nothing here decides who holds an address:
//! the state machine behind [`Hold`] does, and `sync` what is said of flows.
//!
//! Limits bound what a member can do to this gateway with a key that counts: frames, their number in a second, flows in a second, and what
//! waits of them. What is beyond is read later, or dropped where the text of a constant says so.

mod connection;
pub mod frames;
pub mod lease;
mod outbox;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fairlead_egress::registration::PublicKeyHash;
use fairlead_source_addresses::members::Members;
use fairlead_wire::egress_peers::{Answer, Heartbeat, ToMember, to_member};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

pub(crate) use connection::FLOWS;
pub use tls::Identity;

use self::outbox::Outbox;

/// Messages about flows that wait for `sync`, of all members. One more is dropped, and the member is asked for a full copy.
const INBOX: usize = 128;

/// Receiver of heartbeats and of their answers. Both functions are called on tasks of connections and return at once.
/// Members are named by their pods; TLS has shown that it is the pod's key.
pub trait Hold: Send + Sync + 'static {
    /// A member's heartbeat has come; the answer is sent at once.
    fn heartbeat(&self, from: &str, heartbeat: Heartbeat) -> Answer;

    /// A member has answered a heartbeat. Heartbeats that were lost, or replaced before they were sent, have no answer.
    fn answer(&self, from: &str, answer: Answer);
}

/// Message of a member about flows.
#[derive(Debug)]
pub struct Heard {
    /// Name of the member's pod.
    pub from: String,
    /// Content of the message.
    pub news: News,
}

/// Content of a message about flows.
#[derive(Debug)]
pub enum News {
    /// Flows of a slot that the member holds.
    Flows(to_member::Kind),
    /// The member could not take something of a slot that this gateway holds.
    Missed(u32),
}

/// The other gateways.
#[derive(Debug)]
pub struct Peers {
    members: watch::Receiver<Option<Arc<Members>>>,
    outboxes: Mutex<BTreeMap<String, Arc<Outbox>>>,
    /// The connections that this gateway has dialed, by member: each has another number.
    connections: watch::Sender<BTreeMap<String, u64>>,
    inbox: mpsc::Sender<Heard>,
    /// Whether `sync` takes messages about flows; otherwise they are dropped.
    is_listening: AtomicBool,
    /// Members of which messages about flows were dropped.
    dropped: Mutex<BTreeMap<String, Arc<AtomicBool>>>,
    /// Number of messages that were dropped since [`Peers::take_lost`] was asked, because too many waited.
    lost: AtomicU64,
    /// Slots of which members are asked for full copies, with the answer to their next message.
    wanted: Mutex<BTreeMap<String, BTreeSet<u32>>>,
}

impl Peers {
    /// Without a connection yet; [`Peers::run`] makes them.
    pub fn new(members: watch::Receiver<Option<Arc<Members>>>) -> (Arc<Self>, mpsc::Receiver<Heard>) {
        let (inbox, heard) = mpsc::channel(INBOX);
        let peers = Self {
            members,
            outboxes: Mutex::default(),
            connections: watch::Sender::default(),
            inbox,
            is_listening: AtomicBool::new(true),
            dropped: Mutex::default(),
            lost: AtomicU64::new(0),
            wanted: Mutex::default(),
        };
        (Arc::new(peers), heard)
    }

    /// Accepts connections of members and dials them, until it is dropped.
    pub async fn run(
        self: Arc<Self>,
        listener: TcpListener,
        identity: Identity,
        port: u16,
        hold: Arc<dyn Hold>,
    ) -> std::convert::Infallible {
        let accepts =
            connection::accept_all(Arc::clone(&self), listener, identity.clone(), Arc::clone(&hold));
        let dials = connection::dial_all(self, identity, port, hold);
        tokio::select! {
            never = accepts => never,
            never = dials => never,
        }
    }

    /// The gateways of the Egress besides this one; `None` until the Lease has been read once.
    pub fn members(&self) -> watch::Receiver<Option<Arc<Members>>> {
        self.members.clone()
    }

    /// The members that there is a connection to.
    pub fn connections(&self) -> watch::Receiver<BTreeMap<String, u64>> {
        self.connections.subscribe()
    }

    /// Sends a heartbeat to a member. One that waits there is replaced by it. `false`, and the heartbeat is dropped, if there is no
    /// connection to the member.
    pub fn heartbeat(&self, member: &str, heartbeat: Heartbeat) -> bool {
        self.outboxes().get(member).is_some_and(|outbox| outbox.heartbeat(heartbeat))
    }

    /// Sends a message about flows to members on these connections; returns those that did not take it.
    pub(crate) fn flows(&self, to: &BTreeMap<String, u64>, kind: to_member::Kind) -> Vec<String> {
        let frame = frames::encode(&ToMember { kind: Some(kind) });
        let outboxes = self.outboxes();
        let takes = |(member, connection): &(&String, &u64)| {
            outboxes.get(*member).is_some_and(|outbox| outbox.flows(**connection, Arc::clone(&frame)))
        };
        to.iter().filter(|it| !takes(it)).map(|(member, _)| member.clone()).collect()
    }

    /// Number of messages about flows that a member still takes, and the age of the first that waits.
    pub(crate) fn room(&self, member: &str) -> (usize, Duration) {
        self.outboxes().get(member).map(|outbox| outbox.room()).unwrap_or_default()
    }

    /// Asks a member for a full copy of a slot.
    pub(crate) fn want(&self, member: &str, slot: u32) {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.entry(member.to_owned()).or_default().insert(slot);
    }

    fn take_wanted(&self, member: &str) -> Option<u32> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).get_mut(member)?.pop_first()
    }

    /// Whether messages about flows are taken from now on.
    pub(crate) fn listen(&self, is_listening: bool) {
        self.is_listening.store(is_listening, Ordering::Release);
    }

    /// Whether messages of the member were dropped since the last call.
    pub(crate) fn take_dropped(&self, member: &str) -> bool {
        let dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        dropped.get(member).is_some_and(|dropped| dropped.swap(false, Ordering::AcqRel))
    }

    /// Number of messages of all members that were dropped since the last call, because too many waited.
    pub(crate) fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::AcqRel)
    }

    /// Hands on what was heard; `false` if it was dropped.
    fn hear(&self, from: &str, news: News) -> bool {
        let is_listening = self.is_listening.load(Ordering::Acquire);
        let is_taken = is_listening && self.inbox.try_send(Heard { from: from.to_owned(), news }).is_ok();
        if !is_taken {
            self.lost.fetch_add(u64::from(is_listening), Ordering::AcqRel);
            let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
            // Members are few; those that are gone are forgotten with their connection.
            dropped.entry(from.to_owned()).or_default().store(true, Ordering::Release);
        }
        is_taken
    }

    fn member_of(&self, key: &PublicKeyHash) -> Option<String> {
        let members = self.members.borrow();
        let mut members = members.iter().flat_map(|members| members.iter());
        members.find(|(_, member)| member.key == *key).map(|(pod, _)| pod.clone())
    }

    /// Whether the Lease shows a member with this address.
    fn has_address(&self, address: IpAddr) -> bool {
        let members = self.members.borrow();
        members.iter().flat_map(|members| members.values()).any(|member| member.addresses.contains(&address))
    }

    /// Whether the Lease still shows this member with this key.
    fn is_member(&self, pod: &str, key: &PublicKeyHash) -> bool {
        let members = self.members.borrow();
        members.as_ref().and_then(|members| members.get(pod)).is_some_and(|member| member.key == *key)
    }

    fn outboxes(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Outbox>>> {
        self.outboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
