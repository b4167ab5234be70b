//! Replicas around a store in memory, which delivers its changes late, is compacted and emptied.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;
use prost::bytes::Bytes;

use super::*;
use crate::core::{Limits, Notification};

const SECOND: Duration = Duration::from_secs(1);

fn source(n: u8) -> Source {
    Source::of(IpAddr::from([192, 0, 2, n]))
}

fn update(affiliate: &str, data: &[u8], endpoints: &[u8], ttl: Duration) -> Update {
    Update {
        cluster: "c".to_owned(),
        affiliate: affiliate.to_owned(),
        data: (!data.is_empty()).then(|| Bytes::copy_from_slice(data)),
        endpoints: endpoints.iter().map(|n| Bytes::from(vec![*n; 16])).collect(),
        ttl,
    }
}

/// Result of a change: its revision, the identifier, and the affiliate with the time of the write, or nothing after a deletion.
type Change = (i64, String, Option<(SharedAffiliate, Instant)>);

/// As etcd: each change has a revision. Nothing expires here; etcd keeps everything longer than it lives.
#[derive(Debug, Default)]
struct Store {
    revision: i64,
    keys: BTreeMap<String, (i64, SharedAffiliate, Instant)>,
    log: Vec<Change>,
}

impl Store {
    fn put(&mut self, affiliate: &SharedAffiliate, replaces: i64, now: Instant) -> Option<i64> {
        let id = affiliate.stored.affiliate.to_string();
        if self.keys.get(&id).map_or(0, |(revision, ..)| *revision) != replaces {
            return None;
        }
        self.revision += 1;
        self.keys.insert(id.clone(), (self.revision, affiliate.clone(), now));
        self.log.push((self.revision, id, Some((affiliate.clone(), now))));
        Some(self.revision)
    }

    fn delete(&mut self, id: &str) -> i64 {
        if self.keys.remove(id).is_some() {
            self.revision += 1;
            self.log.push((self.revision, id.to_owned(), None));
        }
        self.revision
    }

    fn aged(affiliate: &SharedAffiliate, since: Duration) -> SharedAffiliate {
        let mut aged = affiliate.clone();
        aged.stored.ttl = aged.stored.ttl.saturating_sub(since);
        aged.stored.endpoints.retain(|(_, ttl)| *ttl > since);
        aged.stored.endpoints.iter_mut().for_each(|(_, ttl)| *ttl -= since);
        aged
    }
}

#[derive(Debug)]
struct Server {
    core: Discovery,
    is_connected: bool,
}

impl Server {
    fn new() -> Self {
        Self { core: Discovery::new(Limits::default()), is_connected: false }
    }

    fn list(&mut self, store: &Store, is_same_history: bool, now: Instant) {
        self.core.begin_listing();
        for (revision, affiliate, at) in store.keys.values() {
            self.core.adopt(&Store::aged(affiliate, now - *at), *revision, now).unwrap();
        }
        self.core.end_listing(store.revision, is_same_history, now);
        self.core.release_expiries(now);
        self.is_connected = true;
    }

    /// Tells some of the changes that it has not seen.
    fn watch(&mut self, store: &Store, count: usize, now: Instant) {
        let seen = self.core.position();
        let missed = store.log.iter().filter(|(revision, ..)| *revision > seen).take(count);
        for (revision, id, change) in missed {
            match change {
                Some((affiliate, at)) => {
                    self.core.adopt(&Store::aged(affiliate, now - *at), *revision, now).unwrap();
                }
                None => self.core.forget("c", id, *revision, now),
            }
            self.core.advance(*revision);
        }
    }

    /// As the shell does: tries again with what is there.
    fn update(&mut self, store: &mut Store, update: &Update, now: Instant) {
        let mut proposal = self.core.propose(source(1), update, now).unwrap();
        let mut replaces = proposal.replaces;
        while self.is_connected {
            if let Some(revision) = store.put(&proposal.affiliate, replaces, now) {
                return self.core.complete(&proposal, revision, now);
            }
            let current = store.keys.get(&update.affiliate);
            replaces = current.map_or(0, |(revision, ..)| *revision);
            if let Some((revision, affiliate, at)) = current.filter(|_| replaces > self.core.position()) {
                self.core.adopt(&Store::aged(affiliate, now - *at), *revision, now).unwrap();
            }
            proposal = self.core.propose(source(1), update, now).unwrap();
        }
    }

    fn content(&self) -> BTreeMap<String, (Bytes, Vec<Bytes>)> {
        let list = self.core.list("c").unwrap();
        list.into_iter().map(|affiliate| (affiliate.id, (affiliate.data, affiliate.endpoints))).collect()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Update {
        server: usize,
        affiliate: u8,
        data: u8,
        endpoints: Vec<u8>,
        ttl: u64,
    },
    Delete {
        server: usize,
        affiliate: u8,
    },
    Wait(u64),
    Watch {
        server: usize,
        count: usize,
    },
    Lose(usize),
    GoOn(usize),
    List(usize),
    Restart(usize),
    /// All is gone, and revisions begin again.
    Empty,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let update = (0..2_usize, 0..4_u8, 0..3_u8, proptest::collection::vec(1..5_u8, 0..3), 5..30_u64)
        .prop_map(|(server, affiliate, data, endpoints, ttl)| Step::Update {
            server,
            affiliate,
            data,
            endpoints,
            ttl,
        });
    let step = prop_oneof![
        6 => update,
        1 => (0..2_usize, 0..4_u8).prop_map(|(server, affiliate)| Step::Delete { server, affiliate }),
        1 => (1..8_u64).prop_map(Step::Wait),
        4 => (0..2_usize, 1..4_usize).prop_map(|(server, count)| Step::Watch { server, count }),
        1 => (0..2_usize).prop_map(Step::Lose),
        1 => (0..2_usize).prop_map(Step::GoOn),
        1 => (0..2_usize).prop_map(Step::List),
        1 => (0..2_usize).prop_map(Step::Restart),
    ];
    let empty = prop_oneof![20 => step, 1 => Just(Step::Empty)];
    proptest::collection::vec(empty, 0..80)
}

proptest! {
    /// Property, whatever is lost or late: once both have heard everything they tell the same, which is what was accepted.
    #[test]
    fn replicas_converge_and_lose_nothing_that_was_accepted(steps in steps()) {
        let (mut store, mut now) = (Store::default(), Instant::now());
        let mut servers = [Server::new(), Server::new()];
        servers.iter_mut().for_each(|server| server.list(&store, false, now));
        let mut was_emptied = false;
        for step in steps {
            match step {
                Step::Update { server, affiliate, data, endpoints, ttl } => {
                    let data = vec![data; usize::from(data)];
                    let update = update(&affiliate.to_string(), &data, &endpoints, Duration::from_secs(ttl));
                    let server = &mut servers[server];
                    server.update(&mut store, &update, now);
                    if server.is_connected {
                        let content = server.content();
                        let (_, has) = content.get(&update.affiliate).expect("it is there at once");
                        prop_assert!(update.endpoints.iter().all(|endpoint| has.contains(endpoint)));
                    }
                }
                Step::Delete { server, affiliate } => if servers[server].is_connected {
                    let revision = store.delete(&affiliate.to_string());
                    servers[server].core.forget("c", &affiliate.to_string(), revision, now);
                },
                Step::Wait(seconds) => now += Duration::from_secs(seconds),
                Step::Watch { server, count } => if servers[server].is_connected {
                    servers[server].watch(&store, count, now);
                },
                Step::Lose(server) => {
                    servers[server].is_connected = false;
                    servers[server].core.hold_expiries(now);
                }
                Step::GoOn(server) => {
                    servers[server].core.release_expiries(now);
                    servers[server].is_connected = true;
                }
                Step::List(server) => servers[server].list(&store, true, now),
                Step::Restart(server) => {
                    servers[server] = Server::new();
                    servers[server].list(&store, false, now);
                }
                Step::Empty => {
                    store = Store::default();
                    was_emptied = true;
                    servers.iter_mut().for_each(|server| server.list(&store, false, now));
                }
            }
            servers.iter_mut().for_each(|server| server.core.handle_timeout(now));
        }
        for server in &mut servers {
            server.core.hold_expiries(now);
            server.core.release_expiries(now);
            server.is_connected = true;
            server.watch(&store, usize::MAX, now);
            server.core.handle_timeout(now);
        }
        let written = store.keys.values().map(|(_, affiliate, at)| Store::aged(affiliate, now - *at).stored);
        let expected = alive(written.collect());
        for server in &servers {
            // What has ended is held for a while after an outage.
            let alive = alive(server.core.stored(now));
            for (id, affiliate) in &expected {
                prop_assert_eq!(alive.get(id), Some(affiliate));
            }
            // What was in memory when the store was emptied ends with its time.
            prop_assert!(was_emptied || alive.len() == expected.len(), "{:?} {:?}", alive, expected);
        }
    }
}

fn alive(stored: Vec<Stored>) -> BTreeMap<String, (Bytes, Vec<Bytes>)> {
    let alive = stored.into_iter().filter(|stored| !stored.ttl.is_zero());
    let endpoints = |stored: &Stored| {
        let alive = stored.endpoints.iter().filter(|(_, ttl)| !ttl.is_zero());
        alive.map(|(sealed, _)| sealed.clone()).collect()
    };
    alive.map(|stored| (stored.affiliate.to_string(), (stored.data.clone(), endpoints(&stored)))).collect()
}

fn written(store: &mut Store, server: &mut Server, update: &Update, now: Instant) {
    server.update(store, update, now);
}

fn pair(store: &Store, now: Instant) -> (Server, Server) {
    let (mut first, mut second) = (Server::new(), Server::new());
    first.list(store, false, now);
    second.list(store, false, now);
    (first, second)
}

#[test]
fn endpoints_of_two_replicas_at_the_same_time_are_united() {
    let (mut store, now) = (Store::default(), Instant::now());
    let (mut first, mut second) = pair(&store, now);
    written(&mut store, &mut first, &update("a", b"x", &[1], 60 * SECOND), now);
    // The second one has not heard of the first one's write.
    written(&mut store, &mut second, &update("a", b"y", &[2], 60 * SECOND), now);
    first.watch(&store, usize::MAX, now);
    assert_eq!(first.content(), second.content());
    let (data, endpoints) = &first.content()["a"];
    assert_eq!((&data[..], endpoints.len()), (&b"y"[..], 2));
}

#[test]
fn a_renewal_wakes_no_watch_and_lives_as_long_everywhere() {
    let (mut store, mut now) = (Store::default(), Instant::now());
    let (mut first, mut second) = pair(&store, now);
    written(&mut store, &mut first, &update("a", b"x", &[1], 60 * SECOND), now);
    second.watch(&store, usize::MAX, now);
    let watch = second.core.watch(source(2), "c", now).unwrap();
    assert!(matches!(second.core.poll_watch(watch), Notification::Message(_)));
    assert_eq!(second.core.poll_watch(watch), Notification::Nothing);
    now += 30 * SECOND;
    written(&mut store, &mut first, &update("a", b"x", &[1], 60 * SECOND), now);
    // The watch is late; the time counts from the write.
    second.watch(&store, usize::MAX, now + 10 * SECOND);
    assert_eq!(second.core.take_ready(), []);
    let end = now + 60 * SECOND;
    second.core.handle_timeout(end - SECOND);
    assert_eq!(second.content().len(), 1);
    second.core.handle_timeout(end);
    let Notification::Message(told) = second.core.poll_watch(watch) else { panic!("nothing is told") };
    assert!(told.deleted && told.expired, "{told:?}");
}

#[test]
fn a_deletion_is_told_and_an_end_in_the_store_is_none() {
    let (mut store, now) = (Store::default(), Instant::now());
    let (mut first, mut second) = pair(&store, now);
    written(&mut store, &mut first, &update("a", b"x", &[], 60 * SECOND), now);
    written(&mut store, &mut first, &update("b", b"x", &[], 60 * SECOND), now);
    second.watch(&store, usize::MAX, now);
    let watch = second.core.watch(source(2), "c", now).unwrap();
    assert!(matches!(second.core.poll_watch(watch), Notification::Message(_)));
    store.delete("a");
    second.watch(&store, usize::MAX, now);
    let Notification::Message(told) = second.core.poll_watch(watch) else { panic!("nothing is told") };
    assert!(told.deleted && !told.expired && told.affiliates[0].id == "a", "{told:?}");
    // During an outage nothing expires here; afterwards the lease is over.
    second.core.hold_expiries(now);
    store.delete("b");
    let later = now + 3600 * SECOND;
    second.core.handle_timeout(later);
    second.watch(&store, usize::MAX, later);
    assert_eq!(second.content().len(), 1, "its client may still renew it");
    second.core.release_expiries(later);
    second.core.handle_timeout(later + 59 * SECOND);
    assert_eq!(second.content().len(), 1);
    second.core.handle_timeout(later + 60 * SECOND);
    let Notification::Message(told) = second.core.poll_watch(watch) else { panic!("nothing is told") };
    assert!(told.expired && told.affiliates[0].id == "b", "{told:?}");
}

#[test]
fn a_store_that_was_emptied_removes_nothing_and_is_filled_again() {
    let (mut store, now) = (Store::default(), Instant::now());
    let (mut first, mut second) = pair(&store, now);
    for n in 0..5 {
        written(&mut store, &mut first, &update("a", &[n + 1], &[], 60 * SECOND), now);
    }
    second.watch(&store, usize::MAX, now);
    store = Store::default();
    first.list(&store, false, now);
    second.list(&store, false, now);
    assert_eq!((first.content().len(), second.content().len()), (1, 1));
    // Its revision is lower than that of what is known.
    written(&mut store, &mut first, &update("a", b"new", &[], 60 * SECOND), now);
    second.watch(&store, usize::MAX, now);
    assert_eq!(&second.content()["a"].0[..], b"new");
}

#[test]
fn limits_hold_over_all_replicas_and_the_store_is_believed_no_more_than_clients() {
    let limits = Limits { affiliates: 2, affiliates_per_source: 3, clusters: 2, ..Limits::default() };
    let (now, mut revision) = (Instant::now(), 0);
    let (mut first, mut second) = (Discovery::new(limits), Discovery::new(limits));
    let mut share = |from: &mut Discovery, to: &mut Discovery, by: u8, update: &Update| {
        let proposal = from.propose(source(by), update, now)?;
        revision += 1;
        from.complete(&proposal, revision, now);
        to.adopt(&proposal.affiliate, revision, now)
    };
    let of =
        |cluster: &str, id: &str| Update { cluster: cluster.to_owned(), ..update(id, b"x", &[], SECOND) };
    assert_eq!(share(&mut first, &mut second, 1, &of("c", "a")), Ok(()));
    assert_eq!(share(&mut first, &mut second, 1, &of("c", "b")), Ok(()));
    assert_eq!(share(&mut second, &mut first, 2, &of("c", "c")), Err(Refusal::Affiliates));
    assert_eq!(share(&mut first, &mut second, 1, &of("d", "a")), Ok(()));
    assert_eq!(share(&mut second, &mut first, 1, &of("d", "b")), Err(Refusal::SourceAffiliates));
    assert_eq!(share(&mut second, &mut first, 2, &of("e", "a")), Err(Refusal::Clusters));
    // Replicas may exceed limits together, but not by any number.
    let mut adopted = |cluster: &str, id: &str| {
        let proposal = Discovery::new(Limits::default()).propose(source(3), &of(cluster, id), now).unwrap();
        first.adopt(&proposal.affiliate, 100, now)
    };
    assert_eq!(adopted("c", "c"), Ok(()));
    assert_eq!(adopted("c", "d"), Ok(()));
    assert_eq!(adopted("c", "e"), Err(Refusal::Affiliates));
    assert_eq!((adopted("e", "a"), adopted("f", "a")), (Ok(()), Ok(())));
    assert_eq!(adopted("g", "a"), Err(Refusal::Clusters));
    first.handle_timeout(now + 2 * SECOND);
    assert_eq!(first.totals().affiliates, 0);
    assert_eq!(first.sources.affiliates(source(1)), 0, "each was counted once");
}
