//! Sessions with etcd, one after the other: connect, list or go on, watch.
//!
//! A session goes on where the watch of the one before ended, if etcd's history is the same: the same cluster, whose revision and
//! term have not gone back. Otherwise, or when etcd has compacted what was missed, everything is listed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fairlead_limits::Backoff;
use fairlead_wire::etcd::event::EventType;
use fairlead_wire::etcd::kv_client::KvClient;
use fairlead_wire::etcd::lease_client::LeaseClient;
use fairlead_wire::etcd::watch_client::WatchClient;
use fairlead_wire::etcd::watch_request::RequestUnion;
use fairlead_wire::etcd::{
    Event, KeyValue, LeaseGrantRequest, LeaseTimeToLiveRequest, RangeRequest, ResponseHeader,
    WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use tokio::sync::mpsc;
use tokio::time::{Instant as Deadline, MissedTickBehavior, interval, sleep, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::connect::{EtcdEndpoint, channel};
use super::lease::{LEASE_INTERVAL, lease_ttl};
use super::statistics::add;
use super::{Connection, Etcd, Live, Member, OwnLease, RequireLeader, chain, in_words, lock, random, within};
use crate::server::state::Shared;

/// Longest connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest pause between sessions.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Pause before a list that a session had to be ended for.
const RELIST_PAUSE: Duration = Duration::from_millis(100);
/// Keys of one answer to a list: about a megabyte and a half.
const PAGE: i64 = 256;
/// Longest message of etcd.
const MAX_MESSAGE: usize = 64 << 20;
/// Interval of the progress requests on a watch, which etcd answers even if nothing has changed.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// A watch on which etcd says nothing for so long has ended.
const SILENCE: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("etcd has compacted what was missed, and everything is listed")]
    Compacted,
    #[error("cannot connect to {member}: {reason}")]
    Connect { member: EtcdEndpoint, reason: String },
    #[error(
        "{member} ended the connection without an answer; if it wants a client certificate, name one with --etcd-cert-file and \
         --etcd-key-file: {reason}"
    )]
    NoCertificate { member: EtcdEndpoint, reason: String },
    #[error("no endpoint")]
    NoEndpoint,
    #[error("what is accepted has changed, and everything is listed")]
    Relist,
    #[error("etcd says nothing")]
    Silent,
    #[error("{}", in_words(.0))]
    Status(#[from] Status),
    #[error("etcd ended the watch: {0}")]
    WatchEnded(String),
}

impl SessionError {
    /// Whether the next session begins at once, with a list.
    fn is_relist(&self) -> bool {
        matches!(self, Self::Compacted | Self::Relist)
    }
}

/// Point in the history of etcd up to which everything was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct History {
    cluster: u64,
    term: u64,
    revision: i64,
}

impl History {
    fn of(header: &ResponseHeader, revision: i64) -> Self {
        Self { cluster: header.cluster_id, term: header.raft_term, revision }
    }

    /// Whether what this header says may be the future of this history.
    fn continues(self, header: &ResponseHeader) -> bool {
        header.cluster_id == self.cluster && header.raft_term >= self.term && header.revision >= self.revision
    }
}

/// State that a session leaves to the next one.
#[derive(Debug, Default)]
struct Seen {
    history: Option<History>,
    /// Whether a list has to come first.
    must_list: bool,
}

/// Never ends.
pub(in crate::server) async fn run(etcd: &Etcd, shared: &Shared) {
    let mut backoff = Backoff::up_to(LONGEST_PAUSE);
    let mut seen = Seen::default();
    // Replicas begin with different members.
    let mut turn = usize::try_from(random()).unwrap_or_default();
    loop {
        let began = Instant::now();
        let member = turn.checked_rem(etcd.members.len()).and_then(|turn| etcd.members.get(turn));
        let error = match member {
            Some(member) => session(etcd, shared, member, &mut seen).await,
            None => SessionError::NoEndpoint,
        };
        turn = turn.wrapping_add(1);
        etcd.lose(shared, &error);
        if error.is_relist() {
            seen.must_list = true;
            tracing::info!(%error, "a session with etcd ended");
            sleep(RELIST_PAUSE).await;
        } else {
            let pause = backoff.lost(began.elapsed(), random());
            tracing::warn!(%error, ?pause, "not connected to etcd; what is known is served, writes are refused");
            sleep(pause).await;
        }
    }
}

/// Returns why it ended.
async fn session(etcd: &Etcd, shared: &Shared, member: &EtcdEndpoint, seen: &mut Seen) -> SessionError {
    let session = match Session::connect(etcd, member).await {
        Ok(session) => session,
        Err(error) => return error,
    };
    match session.follow(etcd, shared, seen).await {
        Ok(never) => match never {},
        // With TLS 1.3 the connection is there before etcd misses the certificate, and what it says of that may not arrive.
        Err(SessionError::Status(status)) if etcd.may_lack_certificate(member, &status) => {
            SessionError::NoCertificate { member: member.clone(), reason: in_words(&status) }
        }
        Err(error) => error,
    }
}

/// A connection to a member.
struct Session {
    keys: KvClient<Member>,
    leases: LeaseClient<Member>,
    watches: WatchClient<Member>,
}

/// A watch, and the way to ask for its progress.
struct Watch {
    requests: mpsc::Sender<WatchRequest>,
    responses: Streaming<WatchResponse>,
}

impl Session {
    async fn connect(etcd: &Etcd, member: &EtcdEndpoint) -> Result<Self, SessionError> {
        let failed = |reason: String| SessionError::Connect { member: member.clone(), reason };
        let connected = timeout(CONNECT, channel(member, &etcd.credentials)).await;
        let channel =
            connected.map_err(|_| failed("no answer".to_owned()))?.map_err(|error| failed(chain(&*error)))?;
        Ok(Self {
            keys: KvClient::with_interceptor(channel.clone(), RequireLeader)
                .max_decoding_message_size(MAX_MESSAGE),
            leases: LeaseClient::with_interceptor(channel.clone(), RequireLeader),
            watches: WatchClient::with_interceptor(channel, RequireLeader)
                .max_decoding_message_size(MAX_MESSAGE),
        })
    }

    async fn follow(
        self,
        etcd: &Etcd,
        shared: &Shared,
        seen: &mut Seen,
    ) -> Result<std::convert::Infallible, SessionError> {
        let lease = self.grant(etcd).await?;
        let resumed = match seen.history.filter(|_| !seen.must_list) {
            Some(history) => self.resume(etcd, history).await?,
            None => None,
        };
        let mut watch = match resumed {
            Some(watch) => watch,
            None => {
                let listed = self.list(etcd, shared, seen.history).await?;
                *seen = Seen { history: Some(listed), must_list: false };
                self.watch(etcd, listed.revision.saturating_add(1)).await?.1
            }
        };
        // What a resumed watch has missed is still to come. Nothing depends on when.
        let live = Live { keys: self.keys.clone(), leases: self.leases.clone(), lease };
        *lock(&etcd.connection) = Connection::Live(Box::new(live));
        let revision = {
            let mut state = shared.state();
            state.discovery.release_expiries(Instant::now());
            state.discovery.position()
        };
        tracing::info!(revision, "connected to etcd");
        self.keep(etcd, shared, &mut watch, seen).await
    }

    /// Applies what the watch tells, and renews the lease for new keys.
    async fn keep(
        &self,
        etcd: &Etcd,
        shared: &Shared,
        watch: &mut Watch,
        seen: &mut Seen,
    ) -> Result<std::convert::Infallible, SessionError> {
        let mut renewal = interval(LEASE_INTERVAL);
        let mut progress = interval(PROGRESS_INTERVAL);
        for timer in [&mut renewal, &mut progress] {
            timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
            timer.reset();
        }
        let mut heard = Deadline::now();
        loop {
            tokio::select! {
                message = timeout_at(heard + SILENCE, watch.responses.message()) => {
                    let message = message.map_err(|_| SessionError::Silent)??;
                    let message = message.ok_or_else(|| SessionError::WatchEnded("no reason".to_owned()))?;
                    heard = Deadline::now();
                    self.apply(etcd, shared, message, seen).await?;
                }
                _ = progress.tick() => {
                    let request = RequestUnion::ProgressRequest(WatchProgressRequest {});
                    // A full queue has requests already.
                    let _ = watch.requests.try_send(WatchRequest { request_union: Some(request) });
                }
                _ = renewal.tick() => self.renew(etcd).await?,
                () = etcd.renew.notified() => self.renew(etcd).await?,
                () = etcd.relist.notified() => return Err(SessionError::Relist),
            }
        }
    }

    async fn apply(
        &self,
        etcd: &Etcd,
        shared: &Shared,
        message: WatchResponse,
        seen: &mut Seen,
    ) -> Result<(), SessionError> {
        if message.compact_revision != 0 {
            return Err(SessionError::Compacted);
        }
        if message.canceled {
            return Err(SessionError::WatchEnded(message.cancel_reason));
        }
        let is_put = |event: &&Event| event.r#type == i32::from(EventType::Put);
        let puts: Vec<KeyValue> =
            message.events.iter().filter(is_put).filter_map(|event| event.kv.clone()).collect();
        etcd.learn_leases(&self.leases, &puts).await?;
        let now = Instant::now();
        // Not the revision of the header, which may be ahead of events that are still to come.
        let mut last = 0;
        for event in &message.events {
            let Some(kv) = &event.kv else { continue };
            last = last.max(kv.mod_revision);
            if is_put(&event) {
                etcd.adopt(shared, kv, now);
            } else if let Some((cluster, affiliate)) = etcd.keys.parse(&kv.key) {
                let mut state = shared.state();
                state.discovery.forget(&cluster, &affiliate, kv.mod_revision, now);
                state.wake();
            }
        }
        shared.state().discovery.advance(last);
        let before = seen.history.map_or(0, |history| history.revision);
        if let Some(header) = &message.header {
            seen.history = Some(History::of(header, before.max(last)));
        }
        Ok(())
    }

    /// The watch goes on where the last one ended; `None` if etcd's history is another one.
    async fn resume(&self, etcd: &Etcd, history: History) -> Result<Option<Watch>, SessionError> {
        let (created, watch) = self.watch(etcd, history.revision.saturating_add(1)).await?;
        Ok(history.continues(&created).then_some(watch))
    }

    /// Opens a watch from a revision on.
    async fn watch(&self, etcd: &Etcd, from: i64) -> Result<(ResponseHeader, Watch), SessionError> {
        let (first, end) = etcd.keys.range();
        let create = WatchCreateRequest {
            key: first.into(),
            range_end: end.into(),
            start_revision: from,
            fragment: true,
        };
        let (requests, queue) = mpsc::channel(1);
        let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        // The queue is empty.
        let _ = requests.try_send(request);
        let mut client = self.watches.clone();
        let mut responses = within(client.watch(ReceiverStream::new(queue))).await?.into_inner();
        let created = within(responses.message()).await?;
        let created = created.ok_or_else(|| SessionError::WatchEnded("no reason".to_owned()))?;
        match created.header {
            Some(header) if created.created && !created.canceled => {
                Ok((header, Watch { requests, responses }))
            }
            _ => Err(SessionError::WatchEnded(created.cancel_reason)),
        }
    }

    /// Has the core adopt everything, as of one revision.
    async fn list(
        &self,
        etcd: &Etcd,
        shared: &Shared,
        before: Option<History>,
    ) -> Result<History, SessionError> {
        add(&etcd.statistics.lists);
        shared.state().discovery.begin_listing();
        let (mut first, end) = etcd.keys.range();
        let mut listed: Option<ResponseHeader> = None;
        loop {
            let request = RangeRequest {
                key: first.into(),
                range_end: end.clone().into(),
                limit: PAGE,
                revision: listed.as_ref().map_or(0, |header| header.revision),
            };
            let page = within(self.keys.clone().range(request)).await.map_err(compacted)?.into_inner();
            etcd.learn_leases(&self.leases, &page.kvs).await?;
            let now = Instant::now();
            page.kvs.iter().for_each(|kv| etcd.adopt(shared, kv, now));
            let header = page.header.ok_or_else(|| Status::internal("etcd's answer has no header"))?;
            // Of all pages the revision of the first one counts: the others are as of that, too.
            let listed = *listed.get_or_insert(header);
            match page.kvs.last().filter(|_| page.more) {
                Some(last) => first = [&last.key[..], &[0]].concat(),
                None => {
                    let is_same = before.is_some_and(|before| before.continues(&listed));
                    let mut state = shared.state();
                    state.discovery.end_listing(listed.revision, is_same, now);
                    state.wake();
                    return Ok(History::of(&listed, listed.revision));
                }
            }
        }
    }

    async fn grant(&self, etcd: &Etcd) -> Result<OwnLease, SessionError> {
        // Before the request: what is attached later may seem younger than it is, never older.
        let granted = Instant::now();
        let request = LeaseGrantRequest { ttl: lease_ttl(etcd.ttl) };
        let answer = within(self.leases.clone().lease_grant(request)).await?.into_inner();
        if !answer.error.is_empty() || answer.id == 0 {
            return Err(Status::internal(format!("etcd grants no lease: {}", answer.error)).into());
        }
        lock(&etcd.leases).learn(answer.id, answer.ttl, answer.ttl, granted);
        Ok(OwnLease { id: answer.id, granted })
    }

    async fn renew(&self, etcd: &Etcd) -> Result<(), SessionError> {
        let lease = self.grant(etcd).await?;
        if let Connection::Live(live) = &mut *lock(&etcd.connection) {
            live.lease = lease;
        }
        Ok(())
    }
}

impl Etcd {
    /// Asks how old the leases of these keys are, of which that is not known.
    pub(super) async fn learn_leases(
        &self,
        client: &LeaseClient<Member>,
        kvs: &[KeyValue],
    ) -> Result<(), Status> {
        let now = Instant::now();
        let unknown: BTreeSet<i64> = {
            let known = lock(&self.leases);
            let leases = kvs.iter().map(|kv| kv.lease).filter(|lease| *lease != 0);
            leases.filter(|lease| known.age(*lease, now).is_none()).collect()
        };
        for id in unknown {
            match within(client.clone().lease_time_to_live(LeaseTimeToLiveRequest { id })).await {
                Ok(answer) => {
                    let answer = answer.into_inner();
                    lock(&self.leases).learn(id, answer.granted_ttl, answer.ttl, Instant::now());
                }
                // It is over.
                Err(status) if status.code() == Code::NotFound => {}
                Err(status) => return Err(status),
            }
        }
        Ok(())
    }

    fn lose(&self, shared: &Shared, error: &SessionError) {
        // A list that had ended has a revision, also of an etcd that is empty.
        let is_listed = shared.state().discovery.position() > 0;
        {
            let mut connection = lock(&self.connection);
            let was_read = is_listed || !matches!(&*connection, Connection::Lost { was_read: false, .. });
            *connection = Connection::Lost { reason: error.to_string(), was_read };
        }
        add(&self.statistics.lost);
        shared.state().discovery.hold_expiries(Instant::now());
    }
}

/// A list of many pages may be overtaken.
fn compacted(status: Status) -> SessionError {
    match status.code() {
        Code::OutOfRange => SessionError::Compacted,
        _ => SessionError::Status(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_goes_on_only_in_the_same_history() {
        let header = |cluster_id, raft_term, revision| ResponseHeader { cluster_id, revision, raft_term };
        let history = History::of(&header(1, 5, 120), 100);
        assert!(history.continues(&header(1, 5, 100)));
        assert!(history.continues(&header(1, 6, 200)), "another leader");
        assert!(!history.continues(&header(1, 6, 99)), "restored from a backup");
        assert!(!history.continues(&header(1, 2, 200)), "restored, and written to since");
        assert!(!history.continues(&header(2, 6, 200)), "another cluster");
    }
}
