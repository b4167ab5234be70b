use fairlead_wire::discovery::KubeSpan;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";

fn secret() -> ClusterSecret {
    ClusterSecret::new([7; 32])
}

fn affiliate(id: &str, key: &str) -> server::Affiliate {
    let kubespan = KubeSpan { public_key: key.to_owned(), ..Default::default() };
    let plaintext = Affiliate { node_id: id.to_owned(), kubespan: Some(kubespan), ..Default::default() };
    server::Affiliate {
        id: id.to_owned(),
        data: secret().seal_data([1; 12], &plaintext.encode()).unwrap().into(),
        endpoints: vec![secret().seal_endpoint("192.0.2.1:51820".parse().unwrap()).into()],
    }
}

fn there(affiliates: Vec<server::Affiliate>) -> WatchResponse {
    WatchResponse { affiliates, ..Default::default() }
}

fn ids(members: &Members) -> Vec<&str> {
    members.iter().map(|(id, _)| id).collect()
}

fn told(members: &mut Members, message: WatchResponse) {
    members.apply(message, "own", &secret(), Instant::now());
}

#[test]
fn members_come_change_and_go() {
    let mut members = Members::default();
    members.begin(true);
    told(&mut members, there(vec![affiliate("a", KEY), affiliate("b", KEY), affiliate("own", KEY)]));
    assert_eq!(ids(&members), ["a", "b"]);
    let a = members.member("a").unwrap();
    assert_eq!((a.public_key, a.endpoints.len(), a.rejections.len()), (KEY.parse().ok(), 1, 0));
    let gone = |id, expired| WatchResponse { deleted: true, expired, ..there(vec![affiliate(id, KEY)]) };
    told(&mut members, gone("a", false));
    told(&mut members, gone("b", true));
    told(&mut members, gone("unknown", false));
    assert_eq!(ids(&members), [] as [&str; 0]);
    assert_eq!(members.deleted().map(|(id, _)| id).collect::<Vec<_>>(), ["a"]);
    told(&mut members, there(vec![affiliate("a", KEY)]));
    assert_eq!((ids(&members), members.deleted().count()), (vec!["a"], 0));
}

#[test]
fn members_have_no_more_bytes_than_a_cluster_needs_and_make_room_when_they_go() {
    let large = |id: usize| {
        let names = (0..60).map(|number| format!("{number:030}")).collect::<Vec<_>>().concat();
        let plaintext = Affiliate { node_id: format!("n{id}"), hostname: names, ..Default::default() };
        let data = secret().seal_data([1; 12], &plaintext.encode()).unwrap().into();
        server::Affiliate { id: format!("n{id}"), data, endpoints: Vec::new() }
    };
    let mut members = Members { tells_expiry: true, ..Members::default() };
    for id in 0..3_000 {
        told(&mut members, there(vec![large(id)]));
    }
    let known = members.iter().count();
    assert!((2_000..2_400).contains(&known), "{known}");
    assert!(members.bytes <= MAX_BYTES && members.rejected().next().is_some());
    assert!(members.rejected().all(|(_, rejection)| rejection == Rejection::Members));
    told(&mut members, there(vec![large(0)]));
    assert_eq!(members.iter().count(), known, "one that is there may change");
    told(&mut members, WatchResponse { deleted: true, ..there(vec![large(0)]) });
    told(&mut members, there(vec![large(2_999)]));
    assert!(members.member("n2999").is_some(), "another takes its place");
    members.begin(true);
    told(&mut members, there(vec![large(5)]));
    assert_eq!((members.iter().count(), members.bytes), (1, size(&large(5))));
}

#[test]
fn a_node_notices_that_the_server_does_not_have_it() {
    let mut members = Members::default();
    assert!(!members.is_own_missing(), "without a connection");
    members.begin(true);
    told(&mut members, WatchResponse { snapshot_continues: true, ..there(vec![affiliate("a", KEY)]) });
    assert!(!members.is_own_missing(), "it may come yet");
    told(&mut members, there(vec![affiliate("b", KEY)]));
    assert!(members.is_own_missing());
    told(&mut members, there(vec![affiliate("own", KEY)]));
    assert!(!members.is_own_missing());
    for expired in [false, true] {
        let gone = WatchResponse { deleted: true, expired, ..there(vec![affiliate("own", KEY)]) };
        told(&mut members, gone);
        assert!(members.is_own_missing(), "expired: {expired}");
        told(&mut members, there(vec![affiliate("own", KEY)]));
    }
    let mut replaced = affiliate("own", KEY);
    replaced.data = vec![0; 60].into();
    told(&mut members, there(vec![replaced]));
    assert!(members.is_own_missing(), "a client without the secret replaced it");
    members.begin(true);
    told(&mut members, there(vec![affiliate("own", KEY)]));
    assert_eq!((members.is_own_missing(), ids(&members)), (false, vec![]));
}

#[test]
fn absence_counts_once_a_snapshot_is_complete() {
    let mut members = Members::default();
    members.begin(true);
    told(&mut members, there(vec![affiliate("a", KEY), affiliate("b", KEY), affiliate("c", KEY)]));
    members.begin(true);
    assert_eq!(ids(&members), ["a", "b", "c"], "between two connections");
    told(&mut members, WatchResponse { snapshot_continues: true, ..there(vec![affiliate("b", KEY)]) });
    assert_eq!(ids(&members), ["a", "b", "c"]);
    told(&mut members, there(vec![affiliate("c", KEY)]));
    assert_eq!((ids(&members), members.deleted().count()), (vec!["b", "c"], 0));
    told(&mut members, there(vec![]));
    assert_eq!(ids(&members), ["b", "c"], "not a first message");
}

#[test]
fn what_a_server_of_another_make_calls_deleted_stays_if_the_server_has_it() {
    let mut members = Members::default();
    members.begin(false);
    told(&mut members, there(vec![affiliate("a", KEY), affiliate("b", KEY), affiliate("c", KEY)]));
    // It says nothing but the identifier.
    let bare = |id: &str| server::Affiliate { id: id.to_owned(), ..Default::default() };
    let gone = |id| WatchResponse { deleted: true, ..there(vec![bare(id)]) };
    assert_eq!(members.open_claim(), None);
    told(&mut members, gone("unknown"));
    assert_eq!(members.open_claim(), None, "of no member");
    for id in ["a", "b", "c"] {
        told(&mut members, gone(id));
    }
    assert_eq!(ids(&members), ["a", "b", "c"], "it is asked first");
    let asked = members.open_claim().unwrap();
    // Meanwhile the watch goes on: one is told of again, another is called deleted once more.
    told(&mut members, there(vec![affiliate("c", KEY)]));
    told(&mut members, gone("b"));
    let mut changed = affiliate("a", KEY);
    changed.endpoints.clear();
    members.decide(asked, vec![changed.clone()], &secret(), Instant::now());
    assert_eq!(ids(&members), ["a", "b", "c"], "the list is older than what was said of two of them");
    assert_eq!(members.member("a").unwrap().endpoints, []);
    let asked = members.open_claim().unwrap();
    members.decide(asked, vec![changed, affiliate("c", KEY)], &secret(), Instant::now());
    assert_eq!((ids(&members), members.open_claim()), (vec!["a", "c"], None));
    assert_eq!(members.deleted().count(), 0, "it may have expired");
}

#[test]
fn what_cannot_be_used_is_named_and_replaces_nothing_good() {
    let mut members = Members::default();
    members.begin(true);
    told(&mut members, there(vec![affiliate("a", KEY), affiliate("b", KEY)]));
    let mut swapped = affiliate("a", KEY);
    swapped.data = affiliate("b", KEY).data;
    let mut garbage = affiliate("b", KEY);
    garbage.data = vec![0; 60].into();
    let keyless = affiliate("c", "none");
    let mut hostile = affiliate("d", KEY);
    let endpoint = |text: &str| secret().seal_endpoint(text.parse().unwrap()).into();
    hostile.endpoints.extend([
        vec![].into(),
        vec![9; 16].into(),
        endpoint("127.0.0.1:1"),
        endpoint("[fe80::1]:1"),
    ]);
    told(&mut members, there(vec![swapped, garbage, keyless, hostile, affiliate("", KEY)]));
    assert_eq!(ids(&members), ["a", "b", "c", "d"]);
    let rejected: Vec<_> = members.rejected().collect();
    let expected = [
        ("", Rejection::Identifier),
        ("a", Rejection::Identity),
        ("b", Rejection::Data(OpenError::Decryption)),
    ];
    assert_eq!(rejected, expected);
    let c = members.member("c").unwrap();
    assert_eq!((c.public_key, &c.affiliate.kubespan), (None, &None));
    assert_eq!(c.rejections.iter().collect::<Vec<_>>(), [&Rejection::PublicKey]);
    let d = members.member("d").unwrap();
    assert_eq!(d.endpoints, ["192.0.2.1:51820".parse().unwrap()]);
    assert!(d.rejections.contains(&Rejection::Endpoint(OpenError::Length)), "{:?}", d.rejections);
    assert!(d.rejections.contains(&Rejection::EndpointAddress), "{:?}", d.rejections);
}

#[test]
fn a_server_cannot_fill_the_memory() {
    let mut members = Members { tells_expiry: true, ..Members::default() };
    for n in 0..3000 {
        let mut garbage = affiliate("a", KEY);
        garbage.id = format!("garbage {n}");
        told(&mut members, there(vec![garbage]));
        told(&mut members, there(vec![affiliate("x", KEY)]));
        let renamed = format!("{n}");
        told(&mut members, there(vec![affiliate(&renamed, KEY)]));
        told(&mut members, WatchResponse { deleted: true, ..there(vec![affiliate(&renamed, KEY)]) });
    }
    assert_eq!((members.rejected().count(), members.deleted().count()), (MAX_OTHERS, MAX_OTHERS));
}

proptest! {
    #[test]
    fn hostile_messages_never_panic(
        affiliates in vec((".{0,4}", vec(any::<u8>(), 0..80), vec(vec(any::<u8>(), 0..40), 0..4)), 0..5),
        flags: [bool; 3], tells_expiry: bool,
    ) {
        let mut members = Members::default();
        members.begin(tells_expiry);
        let affiliates = affiliates.into_iter().map(|(id, data, endpoints)| server::Affiliate {
            id,
            data: data.into(),
            endpoints: endpoints.into_iter().map(Into::into).collect(),
        });
        let [deleted, expired, snapshot_continues] = flags;
        let affiliates = affiliates.collect();
        told(&mut members, WatchResponse { affiliates, deleted, expired, snapshot_continues });
        prop_assert_eq!(members.iter().count(), 0);
    }
}
