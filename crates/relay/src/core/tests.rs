use fairlead_wire::relay::{HEADER_LENGTH, MAX_BODY, parse};
use proptest::prelude::*;

use super::*;

const A: [u8; 32] = [1; 32];
const B: [u8; 32] = [2; 32];
const BUDGET: usize = 16 << 10;
const ANSWER: Registered = Registered { idle_timeout: 60 };

/// A relay and a clock.
struct Bed {
    relay: Relay,
    now: Instant,
}

impl Bed {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        Self { relay: Relay::new(limits), now: Instant::now() }
    }

    fn after(&mut self, milliseconds: u64) {
        self.now += Duration::from_millis(milliseconds);
        self.relay.handle_timeout(self.now);
    }

    fn register(&mut self, key: [u8; 32], instance: u8) -> LinkId {
        let admission = Admission { key: PublicKey(key), instance: [instance; 8], token: None };
        self.relay.register(self.now, admission, &ANSWER).unwrap()
    }

    /// All links have got the answer to their registration, and wait.
    fn settle(&mut self, links: &[LinkId]) {
        for link in links {
            assert_eq!(self.received(*link), (vec![], false));
        }
        self.relay.take_ready();
    }

    fn frame(&mut self, link: LinkId, frame: &Frame<'_>) {
        self.relay.handle_frame(self.now, link, frame);
    }

    fn send(&mut self, link: LinkId, peer: [u8; 32], payload: &[u8]) {
        self.frame(link, &Frame::Datagram { peer, payload });
    }

    /// Frames that the link is sent, and whether it then ends.
    fn received(&mut self, link: LinkId) -> (Vec<String>, bool) {
        let mut frames = Vec::new();
        loop {
            let mut out = Vec::new();
            match self.relay.poll_transmit(self.now, link, BUDGET, &mut out) {
                Transmit::Close => return (frames, true),
                Transmit::Frames => {}
                Transmit::Nothing => return (frames, false),
            }
            let mut rest = out.as_slice();
            while let Some(parsed) = parse(rest, MAX_BODY).unwrap() {
                if parsed.frame != Frame::Registered(ANSWER) {
                    frames.push(words(&parsed.frame));
                }
                rest = &rest[parsed.length..];
            }
            assert!(rest.is_empty());
        }
    }
}

fn words(frame: &Frame<'_>) -> String {
    match frame {
        Frame::Datagram { peer, payload } => format!("{} from {}", String::from_utf8_lossy(payload), peer[0]),
        Frame::Draining { close_after, .. } => format!("draining, ends in {close_after} ms"),
        Frame::Error { reason, .. } => format!("error: {reason}"),
        Frame::Notice(notice) => notice.to_string(),
        Frame::PeerGone(peer) => format!("{} is gone", peer[0]),
        Frame::Pong(data) => format!("pong {}", data[0]),
        Frame::Probe { peer, payload } => {
            format!("probe {} from {}", String::from_utf8_lossy(payload), peer[0])
        }
        other => format!("{other:?}"),
    }
}

#[test]
fn a_datagram_reaches_its_peer_with_the_senders_key() {
    let mut bed = Bed::new();
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    bed.settle(&[a, b]);
    bed.send(a, B, b"hello");
    assert_eq!(bed.relay.take_ready(), [b]);
    assert_eq!(bed.received(b), (vec!["hello from 1".to_owned()], false));
    bed.send(b, A, b"answer");
    assert_eq!(bed.relay.take_ready(), [a]);
    assert_eq!(bed.received(a).0, ["answer from 2"]);
    let counters = bed.relay.counters();
    assert_eq!((counters.datagrams, counters.bytes, counters.registrations), (2, 11, 2));
}

#[test]
fn a_link_is_named_once_until_it_has_written_everything() {
    let mut bed = Bed::new();
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    bed.settle(&[a, b]);
    for _ in 0..3 {
        bed.send(a, B, b"x");
    }
    assert_eq!(bed.relay.take_ready(), [b]);
    let mut out = Vec::new();
    assert_eq!(bed.relay.poll_transmit(bed.now, b, BUDGET, &mut out), Transmit::Frames);
    bed.send(a, B, b"y");
    assert_eq!(bed.relay.take_ready(), [], "its shell has not been told that there is nothing");
    assert_eq!(bed.received(b).0, ["y from 1"]);
    bed.send(a, B, b"z");
    assert_eq!(bed.relay.take_ready(), [b]);
}

#[test]
fn the_sender_is_told_of_a_peer_without_a_link_but_not_too_often() {
    let mut bed = Bed::new();
    let a = bed.register(A, 1);
    bed.send(a, B, b"x");
    assert_eq!(bed.received(a).0, ["2 is gone"]);
    for _ in 0..1000 {
        bed.send(a, B, b"x");
        bed.received(a);
    }
    bed.send(a, B, b"x");
    assert_eq!(bed.received(a).0, [""; 0]);
    assert_eq!(bed.relay.counters().dropped(DropReason::NotRegistered), 1002);
}

#[test]
fn probes_and_answers_come_before_datagrams() {
    let mut bed = Bed::new();
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    bed.send(a, B, b"first");
    bed.frame(a, &Frame::Probe { peer: B, payload: b"second" });
    bed.frame(b, &Frame::Ping([3; 8]));
    assert_eq!(bed.received(b).0, ["pong 3", "probe second from 1", "first from 1"]);
}

#[test]
fn a_slow_reader_gets_the_newest_datagrams_and_no_late_ones() {
    let mut bed = Bed::new();
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    bed.send(a, B, b"late");
    bed.after(60);
    bed.send(a, B, b"in time");
    bed.after(60);
    assert_eq!(bed.received(b).0, ["in time from 1"]);
    assert_eq!(bed.relay.counters().dropped(DropReason::QueueTime), 1);

    let limit = Limits::default().queue.bytes;
    for number in 0..2 * limit / 1000 {
        bed.send(a, B, format!("{number:01000}").as_bytes());
    }
    assert!(bed.relay.links[&b].outbox.bytes() <= limit);
    let (received, _) = bed.received(b);
    assert!(received.last().unwrap().contains(&format!("{} from", 2 * limit / 1000 - 1)));
    let dropped = usize::try_from(bed.relay.counters().dropped(DropReason::QueueFull)).unwrap();
    assert_eq!(dropped + received.len(), 2 * limit / 1000);
}

#[test]
fn the_newest_registration_receives_and_the_older_one_drains() {
    let mut bed = Bed::new();
    let (old, b) = (bed.register(A, 1), bed.register(B, 1));
    bed.send(b, A, b"before");
    let new = bed.register(A, 2);
    bed.send(b, A, b"after");
    bed.send(old, B, b"from the old one");
    assert_eq!(bed.received(old), (vec!["before from 2".to_owned()], false));
    assert_eq!(bed.received(new).0, ["after from 2"]);
    assert_eq!(bed.received(b).0, ["from the old one from 1"]);
    bed.after(4_999);
    assert_eq!(bed.received(old), (vec![], false));
    bed.after(1);
    let end = "error: superseded by a newer registration of the key";
    assert_eq!(bed.received(old), (vec![end.to_owned()], true));
    assert_eq!(bed.received(new), (vec![], false));
    bed.relay.remove(old);
    assert_eq!(bed.relay.links(), 2);
}

#[test]
fn an_older_link_receives_again_if_the_newer_one_ends_first() {
    let mut bed = Bed::new();
    let (old, b) = (bed.register(A, 1), bed.register(B, 1));
    let new = bed.register(A, 1);
    bed.relay.remove(new);
    bed.send(b, A, b"x");
    assert_eq!(bed.received(old).0, ["x from 2"]);
    bed.after(10_000);
    assert_eq!(bed.received(old), (vec![], false));
}

#[test]
fn programs_that_share_a_key_are_told_and_reconnections_of_one_are_not() {
    let mut bed = Bed::new();
    let mut links = vec![];
    for instance in [1, 2, 1, 2] {
        links.push(bed.register(A, instance));
        bed.after(6_000);
    }
    assert_eq!(bed.received(links[3]), (vec![], false), "three changes are allowed");
    links.push(bed.register(A, 1));
    assert_eq!(bed.received(links[4]).0, ["duplicate key"]);
    assert_eq!(bed.received(links[3]).0, ["duplicate key"]);
    assert_eq!(bed.relay.counters().key_changes, 4);

    let mut bed = Bed::new();
    for _ in 0..10 {
        let link = bed.register(A, 1);
        bed.after(1_000);
        assert_eq!(bed.received(link), (vec![], false));
    }
    assert_eq!(bed.relay.counters().key_changes, 0);
}

#[test]
fn changes_are_remembered_for_a_minute_and_then_forgotten() {
    let mut bed = Bed::new();
    for instance in 0..8 {
        let link = bed.register(A, instance);
        assert_eq!(bed.received(link), (vec![], false));
        bed.after(20_000);
        bed.frame(link, &Frame::Pong([0; 8]));
    }
    for id in bed.relay.ids(|_| true) {
        bed.relay.remove(id);
    }
    assert!(!bed.relay.keys.is_empty());
    bed.after(60_000);
    assert!(bed.relay.keys.is_empty());
}

#[test]
fn links_of_one_key_are_few() {
    let mut bed = Bed::new();
    let links: Vec<LinkId> = (0..5).map(|_| bed.register(A, 1)).collect();
    let ended: Vec<bool> = links.iter().map(|link| bed.received(*link).1).collect();
    assert_eq!(ended, [true, true, false, false, false]);
}

#[test]
fn a_silent_link_ends_and_one_that_pings_does_not() {
    let mut bed = Bed::new();
    let (silent, alive) = (bed.register(A, 1), bed.register(B, 1));
    for _ in 0..4 {
        bed.after(15_000);
        bed.frame(alive, &Frame::Ping([1; 8]));
        assert_eq!(bed.received(alive), (vec!["pong 1".to_owned()], false));
    }
    assert_eq!(bed.received(silent), (vec!["error: idle for too long".to_owned()], true));
    bed.send(alive, A, b"x");
    assert_eq!(bed.received(alive).0, ["1 is gone"], "what ends does not receive");
}

#[test]
fn a_client_that_is_not_allowed_any_more_is_told_and_ends() {
    let mut bed = Bed::new();
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    bed.send(b, A, b"never read");
    bed.relay.retain(|admission| admission.key == PublicKey(B));
    assert_eq!(bed.received(a), (vec!["error: key or token no longer allowed".to_owned()], true));
    assert_eq!(bed.received(b), (vec![], false));
    bed.frame(a, &Frame::Ping([1; 8]));
    bed.send(a, B, b"x");
    assert_eq!(bed.received(b), (vec![], false), "what ends sends nothing");
}

#[test]
fn the_rate_of_a_client_is_limited_and_it_is_told() {
    let mut bed = Bed::with(Limits { client_rate: Some(100_000), ..Limits::default() });
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    let payload = [0; 1000];
    for _ in 0..300 {
        bed.send(a, B, &payload);
        bed.send(b, A, b"small");
    }
    let received = bed.received(b).0.len();
    assert_eq!(received, 131, "the burst");
    let told = bed.received(a).0;
    assert_eq!(told.iter().filter(|frame| *frame == "rate limited").count(), 1, "{told:?}");
    bed.after(1_000);
    for _ in 0..300 {
        bed.send(a, B, &payload);
    }
    assert_eq!(bed.received(b).0.len(), 100);
}

#[test]
fn a_full_relay_refuses_further_clients() {
    let mut bed = Bed::with(Limits { links: 1, ..Limits::default() });
    let a = bed.register(A, 1);
    let admission = Admission { key: PublicKey(B), instance: [1; 8], token: None };
    assert_eq!(bed.relay.register(bed.now, admission, &ANSWER), Err(ErrorReason::Full));
    assert_eq!(bed.relay.keys.len(), 1);
    bed.relay.remove(a);
    bed.register(B, 1);
}

#[test]
fn clients_of_a_relay_that_ends_are_told_to_come_back_at_different_moments() {
    let mut bed = Bed::new();
    let links: Vec<LinkId> = (0..10).map(|number| bed.register([number; 32], 1)).collect();
    bed.relay.drain(Duration::from_secs(10));
    let mut delays = Vec::new();
    for link in links {
        let mut out = Vec::new();
        bed.relay.poll_transmit(bed.now, link, BUDGET, &mut out);
        let parsed = parse(&out[HEADER_LENGTH + 2..], MAX_BODY).unwrap().unwrap();
        let Frame::Draining { reconnect_after, close_after: 10_000 } = parsed.frame else {
            panic!("{parsed:?}")
        };
        delays.push(reconnect_after);
    }
    delays.sort_unstable();
    assert_eq!(delays, (0..10).map(|number| number * 500).collect::<Vec<u32>>());
}

#[test]
fn a_million_bogus_frames_cost_no_memory() {
    let mut bed = Bed::new();
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    for number in 0..1_000_000_u64 {
        let mut peer = [9; 32];
        peer[..8].copy_from_slice(&number.to_be_bytes());
        match number % 4 {
            0 => bed.send(a, peer, b"x"),
            1 => bed.frame(a, &Frame::Ping([0; 8])),
            2 => bed.frame(a, &Frame::Unknown(0x77)),
            _ => bed.send(a, B, &[0; 1400]),
        }
    }
    let relay = &bed.relay;
    assert_eq!((relay.links.len(), relay.keys.len(), relay.ready.len()), (2, 2, 2));
    let limits = Limits::default().queue;
    assert!(relay.links[&a].outbox.bytes() < 32 * 64, "{}", relay.links[&a].outbox.bytes());
    assert!(relay.links[&b].outbox.bytes() <= limits.bytes);
}

#[test]
fn frames_that_only_a_relay_sends_end_a_link() {
    let mut bed = Bed::new();
    let a = bed.register(A, 1);
    bed.frame(a, &Frame::PeerGone(B));
    assert_eq!(bed.received(a), (vec!["error: unexpected frame".to_owned()], true));
}

proptest! {
    /// Delivered datagrams were sent, queues stay within their limits, and links that ended are forgotten, whatever clients
    /// do.
    #[test]
    fn no_order_of_events_breaks_the_relay(events in proptest::collection::vec((0_u8..7, 0_u8..4, 0_u8..4), 0..200)) {
        let mut bed = Bed::with(Limits { links: 6, ..Limits::default() });
        let mut links: Vec<LinkId> = Vec::new();
        for (event, which, other) in events {
            let link = links.get(usize::from(which) % links.len().max(1)).copied();
            match (event, link) {
                (0, _) => {
                    let admission = Admission { key: PublicKey([which; 32]), instance: [other; 8], token: None };
                    links.extend(bed.relay.register(bed.now, admission, &ANSWER));
                }
                (1, Some(link)) => bed.send(link, [other; 32], &[which; 100]),
                (2, Some(link)) => bed.frame(link, &Frame::Ping([other; 8])),
                (3, Some(link)) => {
                    bed.relay.remove(link);
                    links.retain(|each| *each != link);
                }
                (4, _) => bed.after(u64::from(which) * 3_000),
                (5, Some(link)) => {
                    if bed.received(link).1 {
                        bed.relay.remove(link);
                        links.retain(|each| *each != link);
                    }
                }
                _ => bed.relay.retain(|admission| admission.key != PublicKey([other; 32])),
            }
            prop_assert_eq!(bed.relay.links(), links.len());
            for links in bed.relay.keys.values() {
                prop_assert!(links.local().is_none_or(|here| bed.relay.links.contains_key(&here.link)));
            }
        }
        for link in links {
            bed.relay.remove(link);
        }
        bed.after(61_000);
        prop_assert!(bed.relay.keys.is_empty() && bed.relay.ready.is_empty());
    }
}

#[test]
fn the_budget_is_exceeded_by_one_frame_at_most() {
    let mut bed = Bed::new();
    let (a, b) = (bed.register(A, 1), bed.register(B, 1));
    for _ in 0..100 {
        bed.send(a, B, &[0; 1000]);
    }
    let mut out = Vec::new();
    bed.relay.poll_transmit(bed.now, b, BUDGET, &mut out);
    assert!(out.len() >= BUDGET && out.len() < BUDGET + 1000 + 32 + HEADER_LENGTH, "{}", out.len());
}
