//! One stream of a node program: its token, its messages, and what it is told.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fairlead_wire::egress::register_request::Kind;
use fairlead_wire::egress::{self as wire, RegisterRequest, RegisterResponse, State};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::changes::Changes;
use super::clock::ClockError;
use super::connections::Caller;
use super::streams::Streams;
use crate::data_path::InPlace;
use crate::metrics::Metrics;
use crate::registry::store::Store;
use crate::registry::{Client, ProtocolError, Reason, Refusal, Registry, StreamId, Update};
use crate::review::{Accepted, Rejected, Reviewer};
use crate::source_addresses::holds::announced::HeldAddress;

/// Longest wait for a token.
const HELLO: Duration = Duration::from_secs(5);
/// Longest wait for a client's AddressBlock to arrive here: the node program may have seen it before.
const FACTS: Duration = Duration::from_secs(1);

/// Longest text of a kernel's refusal that is sent.
const MAX_MESSAGE: usize = 500;

/// Stores and channels that sessions read.
pub(crate) struct Inputs {
    pub(crate) store: Arc<Store>,
    pub(crate) streams: Arc<Streams>,
    pub(crate) clock_error: Arc<ClockError>,
    pub(crate) state: watch::Receiver<State>,
    pub(crate) in_place: watch::Receiver<InPlace>,
    pub(crate) held: watch::Receiver<Arc<Vec<HeldAddress>>>,
}

impl Inputs {
    /// All that is refused of a Node, also by the kernel, by UID.
    fn refusals(&self, node: &str) -> BTreeMap<String, Refusal> {
        let refused = Arc::clone(&self.in_place.borrow().refused);
        self.store.read(|registry| {
            let mut all: BTreeMap<String, Refusal> =
                registry.refusals(node).map(|refusal| (refusal.uid.clone(), refusal.clone())).collect();
            for (address, reason) in refused.iter() {
                if let Some(owner) = registry.owners().get(address).filter(|owner| owner.node == node) {
                    let message: String = reason.chars().take(MAX_MESSAGE).collect();
                    let refusal = Refusal::new(&owner.client.uid, Reason::LinkRefused, message);
                    all.insert(owner.client.uid.clone(), refusal);
                }
            }
            all
        })
    }
}

/// State that all sessions share.
pub(super) struct Context {
    pub(super) inputs: Inputs,
    pub(super) reviewer: Reviewer,
    pub(super) metrics: Metrics,
    pub(super) changes: Changes,
    pub(super) stopping: CancellationToken,
}

/// A stream whose token was accepted.
struct Known {
    node: String,
    stream: StreamId,
    replaced: CancellationToken,
    expires: Instant,
    revision: u64,
    /// Refusals that the node program was told last, by UID of the pod.
    refusals: BTreeMap<String, Refusal>,
    has_clients: bool,
}

/// A stream.
pub(super) struct Session {
    context: Arc<Context>,
    source: Option<Caller>,
    inbound: Streaming<RegisterRequest>,
    state: watch::Receiver<State>,
    in_place: watch::Receiver<InPlace>,
    held: watch::Receiver<Arc<Vec<HeldAddress>>>,
    known: Option<Known>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(known) = &self.known {
            self.context.inputs.streams.end(&known.node, known.stream);
        }
    }
}

enum Event {
    Message(RegisterRequest),
    State,
    InPlace,
    Held,
}

impl Session {
    pub(super) fn new(
        context: Arc<Context>,
        source: Option<Caller>,
        inbound: Streaming<RegisterRequest>,
    ) -> Self {
        let Inputs { state, in_place, held, .. } = &context.inputs;
        let state = state.clone();
        let mut in_place = in_place.clone();
        let held = held.clone();
        in_place.mark_unchanged();
        Self { context, source, inbound, state, in_place, held, known: None }
    }

    /// The next answer; `None` when the stream ends.
    pub(super) async fn next(&mut self) -> Result<Option<RegisterResponse>, Status> {
        if self.known.is_none() {
            return self.first().await;
        }
        loop {
            let Some(event) = self.event().await? else { return Ok(None) };
            let answer = match event {
                Event::Message(message) => self.message(message).await?,
                Event::State | Event::Held => Some(Vec::new()),
                Event::InPlace => self.changed_refusals(),
            };
            if let Some(refused) = answer {
                return Ok(Some(self.answer(&refused)));
            }
        }
    }

    /// Waits for Hello.
    async fn first(&mut self) -> Result<Option<RegisterResponse>, Status> {
        if self.in_place.borrow().version.is_none() {
            return Err(Status::unavailable("NotReady: the gateway has just started; try again"));
        }
        let message = timeout(HELLO, self.inbound.message()).await;
        let message = message.map_err(|_| Status::deadline_exceeded("HelloTimeout: no Hello came"))??;
        let Some(RegisterRequest { revision, kind: Some(Kind::Hello(hello)) }) = message else {
            return Err(Status::invalid_argument("HelloMissing: the first message must be Hello"));
        };
        let Accepted { node, lifetime, .. } = self.review(hello).await?;
        let (stream, replaced) = self.context.inputs.streams.begin(&node);
        let expires = Instant::now() + lifetime;
        tracing::info!(node, "a node program registers its clients");
        let refusals = BTreeMap::new();
        let has_clients = false;
        self.known =
            Some(Known { node: node.clone(), stream, replaced, expires, revision, refusals, has_clients });
        self.context
            .inputs
            .store
            .update(|registry| registry.check(&node, stream, revision))
            .map_err(protocol)?;
        Ok(Some(self.answer(&[])))
    }

    async fn review(&self, hello: wire::Hello) -> Result<Accepted, Status> {
        let source = self.source.as_ref().map_or(IpAddr::from([0; 4]), |caller| caller.address);
        let reviewed = self.context.reviewer.review(hello.token, source).await;
        self.context.metrics.hello(reviewed.as_ref().err());
        match reviewed {
            Ok(accepted) => {
                if let Some(caller) = &self.source {
                    caller.is_known.store(true, Ordering::Relaxed);
                }
                self.context.inputs.clock_error.set(accepted.clock_error);
                Ok(accepted)
            }
            Err(rejected) => {
                tracing::warn!(%source, error = %rejected, "a token was not accepted");
                let text = format!("{}: {rejected}", rejected.reason());
                Err(match rejected {
                    Rejected::TooManyReviews => Status::resource_exhausted(text),
                    Rejected::Unavailable(_) => Status::unavailable(text),
                    Rejected::Invalid(_) | Rejected::NoNode => Status::unauthenticated(text),
                    Rejected::OtherUser(..) => Status::permission_denied(text),
                })
            }
        }
    }

    /// Next event of the stream; `None` when the stream or the program ends.
    async fn event(&mut self) -> Result<Option<Event>, Status> {
        let Some(known) = &self.known else { return Ok(None) };
        let replaced = known.replaced.clone();
        let expires = known.expires;
        tokio::select! {
            biased;
            () = replaced.cancelled() => Err(protocol(ProtocolError::Replaced)),
            () = self.context.stopping.cancelled() => Ok(None),
            () = sleep_until(expires) => Err(Status::unauthenticated("TokenExpired: send a Hello with another token in time")),
            // Neither sender ends before the server.
            _ = self.state.changed() => Ok(Some(Event::State)),
            _ = self.held.changed() => Ok(Some(Event::Held)),
            message = self.inbound.message() => Ok(message?.map(Event::Message)),
            _ = self.in_place.changed() => Ok(Some(Event::InPlace)),
        }
    }

    /// Takes a message, and returns what is refused of it once the data path has the rest.
    async fn message(&mut self, message: RegisterRequest) -> Result<Option<Vec<Refusal>>, Status> {
        let (node, stream) = match &self.known {
            Some(known) => (known.node.clone(), known.stream),
            None => return Ok(None),
        };
        let revision = message.revision;
        self.context
            .inputs
            .store
            .update(|registry| registry.check(&node, stream, revision))
            .map_err(protocol)?;
        let (clients, removed) = match message.kind {
            Some(Kind::Hello(hello)) => {
                self.renew(hello, &node).await?;
                self.note(revision);
                return Ok(Some(Vec::new()));
            }
            Some(Kind::All(all)) => (all.clients, None),
            Some(Kind::Change(change)) => (change.set, Some(change.removed)),
            None => {
                return Err(Status::invalid_argument(
                    "UnknownMessage: this gateway is older than the node program",
                ));
            }
        };
        let (parsed, mut refused) = parse(clients);
        let named: BTreeSet<String> = parsed.iter().map(|client| client.uid.clone()).collect();
        let update = match removed {
            None => Update::All(parsed),
            Some(mut removed) => {
                // What is known of such a pod is no longer true.
                removed.extend(refused.iter().map(|refusal| refusal.uid.clone()));
                Update::Change(parsed, removed)
            }
        };
        let changes = self.context.inputs.store.update(|registry| registry.changes(&node, &update));
        let pause = self.context.changes.pause(&node, changes, std::time::Instant::now());
        if !pause.is_zero() {
            tracing::warn!(node, ?pause, "the clients of a Node change too fast");
            self.while_valid(tokio::time::sleep(pause)).await?;
        }
        let kept = self.context.inputs.store.update(|registry| registry.update(&node, stream, update));
        refused.extend(kept.map_err(protocol)?);
        self.settle(&node, &named).await?;
        self.note(revision);
        let all = self.context.inputs.refusals(&node);
        refused.extend(all.values().filter(|refusal| named.contains(&refusal.uid)).cloned());
        self.context.metrics.refused(&refused);
        if let Some(known) = &mut self.known {
            known.refusals = all;
            known.has_clients = true;
        }
        Ok(Some(refused))
    }

    async fn renew(&mut self, hello: wire::Hello, node: &str) -> Result<(), Status> {
        let accepted = self.review(hello).await?;
        if accepted.node != node {
            return Err(Status::permission_denied("OtherNode: the new token is one of another Node"));
        }
        if let Some(known) = &mut self.known {
            known.expires = Instant::now() + accepted.lifetime;
        }
        Ok(())
    }

    fn note(&mut self, revision: u64) {
        if let Some(known) = &mut self.known {
            known.revision = revision;
        }
    }

    /// Waits until the watches have shown what the clients need, for a moment, and until the data path has what is accepted.
    async fn settle(&mut self, node: &str, named: &BTreeSet<String>) -> Result<(), Status> {
        let inputs = &self.context.inputs;
        let mut version = inputs.store.version();
        let waits_for_facts = || {
            let refusals = inputs.refusals(node);
            refusals.values().any(|it| it.reason == Reason::AddressNotOfNode && named.contains(&it.uid))
        };
        let facts = async { while waits_for_facts() && version.changed().await.is_ok() {} };
        let _ = timeout(FACTS, facts).await;
        let wanted = inputs.store.read(Registry::version);
        let mut in_place = self.in_place.clone();
        let has = |in_place: &InPlace| in_place.version.is_some_and(|version| version >= wanted);
        self.while_valid(async { drop(in_place.wait_for(has).await) }).await
    }

    /// Waits, as long as the stream may go on.
    async fn while_valid(&self, work: impl Future<Output = ()>) -> Result<(), Status> {
        let Some(known) = &self.known else { return Ok(()) };
        tokio::select! {
            biased;
            () = known.replaced.cancelled() => Err(protocol(ProtocolError::Replaced)),
            () = self.context.stopping.cancelled() => Err(Status::unavailable("Ending: the gateway ends")),
            () = sleep_until(known.expires) => Err(Status::unauthenticated("TokenExpired: send a Hello with another token in time")),
            () = work => Ok(()),
        }
    }

    /// All that is refused of the Node, if that has changed since the node program was told.
    fn changed_refusals(&mut self) -> Option<Vec<Refusal>> {
        let known = self.known.as_mut().filter(|known| known.has_clients)?;
        let all = self.context.inputs.refusals(&known.node);
        if known.refusals == all {
            return None;
        }
        known.refusals = all;
        Some(known.refusals.values().cloned().collect())
    }

    fn answer(&mut self, refused: &[Refusal]) -> RegisterResponse {
        let state = *self.state.borrow_and_update();
        let now = std::time::Instant::now();
        let held = self.held.borrow_and_update().iter().filter_map(|held| held.to_wire(now)).collect();
        RegisterResponse {
            revision: self.known.as_ref().map_or(0, |known| known.revision),
            refused: refused.iter().map(Refusal::to_wire).collect(),
            state: state.into(),
            held,
        }
    }
}

/// The clients that can be used, and why the others cannot.
fn parse(clients: Vec<wire::Client>) -> (Vec<Client>, Vec<Refusal>) {
    let mut parsed = Vec::new();
    let mut refused = Vec::new();
    for client in clients {
        match Client::try_from(client) {
            Ok(client) => parsed.push(client),
            Err(refusal) => refused.push(refusal),
        }
    }
    (parsed, refused)
}

fn protocol(error: ProtocolError) -> Status {
    match error {
        ProtocolError::Replaced => Status::aborted(format!("StreamReplaced: {error}")),
        ProtocolError::ChangeFirst | ProtocolError::Revision => {
            Status::invalid_argument(format!("ProtocolError: {error}"))
        }
    }
}
