//! The core without I/O, by a clock of the test's own.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_wire::discovery::server::WatchResponse;
use proptest::prelude::*;
use prost::bytes::Bytes;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

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

/// Affiliates as a watch has been told of them.
#[derive(Debug, Default, PartialEq)]
struct View(BTreeMap<String, Affiliate>);

impl View {
    fn apply(&mut self, message: WatchResponse) {
        for affiliate in message.affiliates {
            if message.deleted {
                self.0.remove(&affiliate.id);
            } else {
                self.0.insert(affiliate.id.clone(), affiliate);
            }
        }
    }

    fn of(discovery: &Discovery) -> Self {
        let list = discovery.list("c").unwrap();
        Self(list.into_iter().map(|affiliate| (affiliate.id.clone(), affiliate)).collect())
    }
}

fn drain(discovery: &mut Discovery, watch: WatchId, view: &mut View) -> usize {
    for messages in 0.. {
        match discovery.poll_watch(watch) {
            Notification::Ended => panic!("the watch was ended"),
            Notification::Message(message) => view.apply(message),
            Notification::Nothing => return messages,
        }
    }
    unreachable!()
}

fn message(discovery: &mut Discovery, watch: WatchId) -> WatchResponse {
    match discovery.poll_watch(watch) {
        Notification::Message(message) => message,
        other => panic!("{other:?}"),
    }
}

fn ids(message: &WatchResponse) -> Vec<&str> {
    message.affiliates.iter().map(|affiliate| affiliate.id.as_str()).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Update { affiliate: u8, data: u8, endpoints: Vec<u8>, ttl: u64 },
    Delete(u8),
    Wait(u64),
    Poll(usize),
    Watch,
    Unwatch(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let update = (0..6_u8, 0..3_u8, proptest::collection::vec(1..5_u8, 0..3), 0..20_u64)
        .prop_map(|(affiliate, data, endpoints, ttl)| Step::Update { affiliate, data, endpoints, ttl });
    let step = prop_oneof![
        4 => update,
        1 => (0..6_u8).prop_map(Step::Delete),
        2 => (1..8_u64).prop_map(Step::Wait),
        3 => (0..4_usize).prop_map(Step::Poll),
        1 => Just(Step::Watch),
        1 => (0..4_usize).prop_map(Step::Unwatch),
    ];
    proptest::collection::vec(step, 0..80)
}

proptest! {
    /// Property, however slowly they read: each watch ends with what `List` says, and is woken for it.
    #[test]
    fn watches_converge_on_the_list(steps in steps()) {
        let mut discovery = Discovery::new(Limits::default());
        let mut now = Instant::now();
        let mut watches: Vec<(WatchId, View, bool)> = Vec::new();
        for step in steps {
            match step {
                Step::Update { affiliate, data, endpoints, ttl } => {
                    let data = vec![data; usize::from(data)];
                    let update = update(&affiliate.to_string(), &data, &endpoints, Duration::from_secs(ttl));
                    discovery.update(source(1), &update, now).unwrap();
                }
                Step::Delete(affiliate) => discovery.delete("c", &affiliate.to_string()).unwrap(),
                Step::Wait(seconds) => {
                    now += Duration::from_secs(seconds);
                    discovery.handle_timeout(now);
                    prop_assert!(discovery.poll_timeout().is_none_or(|next| next > now));
                }
                Step::Poll(n) => if let Some((id, view, is_waiting)) = watches.get_mut(n) {
                    match discovery.poll_watch(*id) {
                        Notification::Ended => prop_assert!(false, "ended"),
                        Notification::Message(message) => {
                            prop_assert!(!*is_waiting, "a change without a wake");
                            view.apply(message);
                        }
                        Notification::Nothing => *is_waiting = true,
                    }
                },
                Step::Watch => if watches.len() < 4 {
                    let id = discovery.watch(source(2), "c", now).unwrap();
                    watches.push((id, View::default(), false));
                },
                Step::Unwatch(n) => if n < watches.len() {
                    discovery.unwatch(watches.remove(n).0);
                },
            }
            for id in discovery.take_ready() {
                watches.iter_mut().filter(|(watch, ..)| *watch == id).for_each(|(.., waiting)| *waiting = false);
            }
            let totals = discovery.totals();
            prop_assert_eq!(totals.affiliates, discovery.list("c").unwrap().len());
            prop_assert_eq!(totals.clusters, usize::from(totals.affiliates + totals.watches > 0));
        }
        for (id, mut view, _) in watches {
            drain(&mut discovery, id, &mut view);
            prop_assert_eq!(view, View::of(&discovery));
        }
    }

    #[test]
    fn what_is_stored_is_restored(steps in steps()) {
        let mut discovery = Discovery::new(Limits::default());
        let now = Instant::now();
        for step in steps {
            if let Step::Update { affiliate, data, endpoints, ttl } = step {
                let data = vec![data + 1];
                let update = update(&affiliate.to_string(), &data, &endpoints, Duration::from_secs(ttl + 1));
                discovery.update(source(1), &update, now).unwrap();
            }
        }
        let mut restored = Discovery::new(Limits::default());
        let mut stored = discovery.stored(now);
        prop_assert_eq!(restored.restore(&stored, now), stored.len());
        let mut again = restored.stored(now);
        stored.sort_by(|a, b| a.affiliate.cmp(&b.affiliate));
        again.sort_by(|a, b| a.affiliate.cmp(&b.affiliate));
        prop_assert_eq!(again, stored);
    }
}

#[test]
fn an_endpoint_that_expires_leaves_its_affiliate() {
    let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
    discovery.update(source(1), &update("a", b"x", &[1], 10 * MINUTE), now).unwrap();
    let watch = discovery.watch(source(1), "c", now).unwrap();
    assert_eq!(message(&mut discovery, watch).affiliates[0].endpoints.len(), 1);
    let later = now + 5 * MINUTE;
    discovery.update(source(1), &update("a", b"y", &[2], 10 * MINUTE), later).unwrap();
    discovery.handle_timeout(now + 10 * MINUTE);
    let told = message(&mut discovery, watch);
    assert!(!told.deleted && told.affiliates[0].endpoints == [Bytes::from(vec![2; 16])], "{told:?}");
    assert_eq!(discovery.counters().expired_endpoints, 1);
    discovery.handle_timeout(now + 15 * MINUTE);
    let told = message(&mut discovery, watch);
    assert!(told.deleted && told.expired && ids(&told) == ["a"], "{told:?}");
    assert_eq!(discovery.poll_watch(watch), Notification::Nothing);
}

#[test]
fn a_deletion_is_told_apart_from_an_expiry() {
    let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
    for id in ["a", "b", "c"] {
        discovery.update(source(1), &update(id, b"x", &[], MINUTE), now).unwrap();
    }
    let watch = discovery.watch(source(1), "c", now).unwrap();
    assert_eq!(ids(&message(&mut discovery, watch)), ["a", "b", "c"]);
    discovery.delete("c", "b").unwrap();
    discovery.delete("c", "unknown").unwrap();
    discovery.handle_timeout(now + MINUTE);
    let told = message(&mut discovery, watch);
    assert!(told.deleted && !told.expired && ids(&told) == ["b"], "{told:?}");
    let told = message(&mut discovery, watch);
    assert!(told.deleted && told.expired && ids(&told) == ["a", "c"], "{told:?}");
}

#[test]
fn the_first_message_is_the_whole_cluster_even_if_that_is_empty() {
    let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
    let watch = discovery.watch(source(1), "c", now).unwrap();
    assert_eq!(message(&mut discovery, watch), WatchResponse::default());
    assert_eq!(discovery.poll_watch(watch), Notification::Nothing);
    discovery.unwatch(watch);
    assert_eq!(discovery.totals(), Totals::default(), "no cluster is left behind");
    assert_eq!(discovery.list("other").unwrap(), []);
    assert_eq!(discovery.totals(), Totals::default());
}

#[test]
fn a_large_cluster_is_told_in_several_messages() {
    let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
    for n in 0..1000 {
        discovery.update(source(1), &update(&format!("{n:04}"), &[7; 2048], &[1, 2], MINUTE), now).unwrap();
    }
    let watch = discovery.watch(source(1), "c", now).unwrap();
    let (mut view, mut messages) = (View::default(), 0);
    loop {
        let told = message(&mut discovery, watch);
        let continues = told.snapshot_continues;
        view.apply(told);
        messages += 1;
        if !continues {
            break;
        }
    }
    assert_eq!((view.0.len(), messages), (1000, 34));
    assert_eq!(discovery.poll_watch(watch), Notification::Nothing);
    discovery.update(source(1), &update("0001", b"new", &[], MINUTE), now).unwrap();
    assert!(!message(&mut discovery, watch).snapshot_continues);
}

#[test]
fn a_watch_that_reads_slowly_gets_the_latest_state_and_costs_no_queue() {
    let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
    let watch = discovery.watch(source(1), "c", now).unwrap();
    discovery.update(source(1), &update("steady", b"0", &[], MINUTE), now).unwrap();
    message(&mut discovery, watch);
    for n in 0..20_000_u32 {
        discovery.update(source(1), &update("busy", &n.to_be_bytes(), &[], MINUTE), now).unwrap();
        // Comes and goes between two messages: the watch need not know.
        let passing = format!("passing {n}");
        discovery.update(source(1), &update(&passing, b"x", &[], MINUTE), now).unwrap();
        discovery.delete("c", &passing).unwrap();
    }
    let told = message(&mut discovery, watch);
    assert_eq!(ids(&told), ["busy"]);
    assert_eq!(told.affiliates[0].data, 19_999_u32.to_be_bytes()[..]);
    assert_eq!(discovery.poll_watch(watch), Notification::Nothing);
    assert_eq!(discovery.counters().watches_ended, 0);
}

#[test]
fn a_watch_that_reads_nothing_while_whole_clusters_are_deleted_is_ended() {
    let limits = Limits { affiliates: 100, ..Limits::default() };
    let (mut discovery, now) = (Discovery::new(limits), Instant::now());
    let mut stalled = Vec::new();
    for round in 0..10 {
        for n in 0..100 {
            discovery.update(source(1), &update(&format!("{round} {n}"), b"x", &[], MINUTE), now).unwrap();
        }
        let watch = discovery.watch(source(1), "c", now).unwrap();
        message(&mut discovery, watch);
        stalled.push(watch);
        for n in 0..100 {
            discovery.delete("c", &format!("{round} {n}")).unwrap();
        }
    }
    assert_eq!(discovery.poll_watch(stalled[0]), Notification::Ended);
    assert!(discovery.take_ready().contains(&stalled[0]));
    let told = message(&mut discovery, stalled[9]);
    assert_eq!((told.deleted, told.affiliates.len()), (true, 100));
    assert!(discovery.counters().watches_ended > 0);
}

#[test]
fn what_is_beyond_a_limit_is_refused_and_leaves_nothing() {
    let limits = Limits {
        clusters: 2,
        affiliates: 2,
        affiliates_per_source: 3,
        watches: 2,
        watches_per_source: 1,
        ..Limits::default()
    };
    let (mut discovery, now) = (Discovery::new(limits), Instant::now());
    let mut attempt = |cluster: &str, affiliate: &str, from: u8| {
        let update = Update { cluster: cluster.to_owned(), ..update(affiliate, b"x", &[], MINUTE) };
        discovery.update(source(from), &update, now)
    };
    assert_eq!(attempt("c", "a", 1), Ok(()));
    assert_eq!(attempt("c", "b", 1), Ok(()));
    assert_eq!(attempt("c", "c", 1), Err(Refusal::Affiliates));
    assert_eq!(attempt("d", "a", 1), Ok(()));
    assert_eq!(attempt("d", "b", 1), Err(Refusal::SourceAffiliates));
    assert_eq!(attempt("e", "a", 2), Err(Refusal::Clusters));
    assert_eq!(attempt("c", "b", 2), Ok(()), "what is there may be renewed");
    assert_eq!(attempt("", "b", 2), Err(Refusal::ClusterId));
    assert_eq!(attempt(&"c".repeat(257), "b", 2), Err(Refusal::ClusterId));
    assert_eq!(attempt("c", "", 2), Err(Refusal::AffiliateId));
    discovery.watch(source(1), "c", now).unwrap();
    assert_eq!(discovery.watch(source(1), "c", now), Err(Refusal::SourceWatches));
    assert_eq!(discovery.watch(source(3), "f", now), Err(Refusal::Clusters));
    discovery.watch(source(2), "c", now).unwrap();
    assert_eq!(discovery.watch(source(3), "c", now), Err(Refusal::Watches));
    assert_eq!(discovery.totals().clusters, 2);
    discovery.handle_timeout(now + 2 * MINUTE);
    assert_eq!((discovery.totals().affiliates, discovery.totals().clusters), (0, 1));
}

#[test]
fn callers_of_many_addresses_together_fill_no_more_than_the_server_holds() {
    let limits = Limits { affiliates_in_all: 3, ..Limits::default() };
    let (mut discovery, now) = (Discovery::new(limits), Instant::now());
    let attempt = |discovery: &mut Discovery, cluster: &str, from: u8, now| {
        let update = Update { cluster: cluster.to_owned(), ..update("a", b"x", &[], MINUTE) };
        discovery.update(source(from), &update, now)
    };
    for number in 1..=3u8 {
        assert_eq!(attempt(&mut discovery, &number.to_string(), number, now), Ok(()));
    }
    assert_eq!(attempt(&mut discovery, "4", 4, now), Err(Refusal::ServerAffiliates));
    assert_eq!(attempt(&mut discovery, "3", 4, now), Ok(()), "what is there may be renewed");
    assert_eq!((discovery.totals().affiliates, discovery.totals().clusters), (3, 3));
    discovery.handle_timeout(now + 2 * MINUTE);
    assert_eq!(attempt(&mut discovery, "4", 4, now + 2 * MINUTE), Ok(()));
}

#[test]
fn hostile_blobs_are_refused_and_change_nothing() {
    let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
    let many: Vec<u8> = (1..=64).collect();
    discovery.update(source(1), &update("a", b"x", &many, MINUTE), now).unwrap();
    let before = discovery.stored(now);
    let mut refused = |change: &dyn Fn(&mut Update)| {
        let mut update = update("a", b"y", &[], 2 * MINUTE);
        change(&mut update);
        discovery.update(source(1), &update, now).unwrap_err()
    };
    for length in [0, 1, 15, 17, 33, 48] {
        assert_eq!(refused(&|update| update.endpoints = vec![vec![1; length].into()]), Refusal::Endpoint);
    }
    assert_eq!(refused(&|update| update.endpoints = vec![vec![99; 16].into()]), Refusal::Endpoints);
    assert_eq!(refused(&|update| update.endpoints = vec![vec![1; 16].into(); 65]), Refusal::Endpoints);
    assert_eq!(refused(&|update| update.data = Some(vec![0; 2049].into())), Refusal::Data);
    assert_eq!(refused(&|update| update.ttl = 31 * MINUTE), Refusal::Ttl);
    assert_eq!(discovery.stored(now), before);
}

#[test]
fn an_address_may_ask_at_a_rate_and_waits_beyond_it() {
    let limits = Limits { rate: 10, burst: 20, ..Limits::default() };
    let (mut discovery, now) = (Discovery::new(limits), Instant::now());
    let waits: Vec<_> = (0..100).map(|_| discovery.admit(source(1), now)).collect();
    assert!(waits[..20].iter().all(|wait| *wait == Ok(Duration::ZERO)));
    assert_eq!(waits[20], Ok(Duration::from_millis(100)));
    assert_eq!(waits[69], Ok(Duration::from_secs(5)));
    assert_eq!(waits[70], Err(Refusal::Rate));
    assert_eq!(discovery.admit(source(2), now), Ok(Duration::ZERO), "another address");
    assert_eq!(discovery.admit(source(1), now + MINUTE), Ok(Duration::ZERO));
    let of = |text: &str| Source::of(text.parse().unwrap());
    assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
    assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    assert_eq!(of("::ffff:192.0.2.1"), source(1));
}
