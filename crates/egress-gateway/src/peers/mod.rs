//! The other gateways of an Egress that has source addresses: who they are, and what is sent to them and heard from them.
//!
//! The Lease `NAME-gateways` has an annotation of each gateway with its addresses and the hash of its key ([`membership`]). Each gateway
//! dials all others. Nothing here decides who holds an address: the state machine behind [`Hold`] does, and `sync` what is said of flows.

pub mod membership;
mod outbox;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use fairlead_wire::egress_peers::{Answer, Heartbeat};
use tokio::sync::watch;

pub use membership::{Member, Members};

use self::outbox::Outbox;

/// What makes heartbeats and takes what is heard of them. Both functions are called on tasks of connections and return at once.
/// Members are named by their pods; TLS has shown that it is the pod's key.
pub trait Hold: Send + Sync + 'static {
    /// A member's heartbeat has come; the answer is sent at once.
    fn heartbeat(&self, from: &str, heartbeat: Heartbeat) -> Answer;

    /// A member has answered a heartbeat. Heartbeats that were lost, or replaced before they were sent, have no answer.
    fn answer(&self, from: &str, answer: Answer);
}

/// A slot of source addresses, as the hold protocol sees it: what `sync` goes by.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slot {
    /// Its addresses, of `status.sourceAddresses`: at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// The greatest term that this gateway knows of.
    pub term: u64,
    /// The pod that the Lease names in this term.
    pub holder: Option<String>,
    /// Whether this gateway holds it.
    pub is_held: bool,
}

/// All slots, by their numbers.
pub type Slots = BTreeMap<u32, Slot>;

/// The other gateways.
#[derive(Debug)]
pub struct Peers {
    members: watch::Receiver<Option<Arc<Members>>>,
    outboxes: Mutex<BTreeMap<String, Arc<Outbox>>>,
}

impl Peers {
    /// The gateways of the Egress besides this one; `None` until the Lease has been read once.
    pub fn members(&self) -> watch::Receiver<Option<Arc<Members>>> {
        self.members.clone()
    }

    /// Sends a heartbeat to a member. One that waits there is replaced by it. `false`, and the heartbeat is dropped, if there is no
    /// connection to the member.
    pub fn heartbeat(&self, member: &str, heartbeat: Heartbeat) -> bool {
        let outboxes = self.outboxes.lock().unwrap_or_else(PoisonError::into_inner);
        outboxes.get(member).is_some_and(|outbox| outbox.heartbeat(heartbeat))
    }
}
