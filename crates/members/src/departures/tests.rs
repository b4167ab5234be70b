use fairlead_topology::ByDiscovery;

use super::*;

fn key(byte: u8) -> PublicKey {
    PublicKey([byte; 32])
}

fn member(name: &str, byte: u8) -> Member {
    let claims = vec![format!("192.0.2.{byte}/32").parse().unwrap()];
    Member { public_key: Some(key(byte)), claims, ..Member::named(name) }
}

fn record(source: Source, member: Member) -> MemberRecord {
    let discovery = ByDiscovery { is_only_source: source.is_discovery(), ..member.discovery };
    MemberRecord { member: Member { discovery, ..member }, ..MemberRecord::of_node(source, "") }
}

fn deletion(name: &str, byte: u8) -> Deletion {
    Deletion { source: Source::Kubernetes, name: name.to_owned(), public_key: key(byte), next_key: None }
}

/// Drives [`Departures`] as the mesh does.
struct Bed {
    departures: Departures,
    previous: Vec<Arc<Member>>,
    age: Duration,
    revoked: Revoked,
    session: Session,
    uses_discovery: bool,
    now: Instant,
}

impl Bed {
    fn new(previous: Vec<Member>, session: Session) -> Self {
        Self {
            departures: Departures::default(),
            previous: previous.into_iter().map(Arc::new).collect(),
            age: Duration::ZERO,
            revoked: Revoked::default(),
            session,
            uses_discovery: true,
            now: Instant::now(),
        }
    }

    /// Takes what the sources say now. Returns the names of the members that follow, with a key.
    fn step(&mut self, mut records: Vec<MemberRecord>, deletions: &[Deletion]) -> Vec<String> {
        self.departures.admit(&mut records, deletions, &self.revoked, self.now);
        let mut members = fairlead_topology::merge(records);
        let session = self.session;
        let evidence = Evidence {
            own: "self",
            previous: &self.previous,
            age: std::mem::take(&mut self.age),
            uses_discovery: self.uses_discovery,
            deletions,
            revoked: &self.revoked,
            session: &|_| session,
            now: self.now,
        };
        self.departures.follow(&mut members, &evidence);
        self.previous = members.into_iter().map(Arc::new).collect();
        let keyed = self.previous.iter().filter(|member| member.public_key.is_some());
        keyed.map(|member| member.name.clone()).collect()
    }

    fn is_waiting(&self) -> bool {
        self.departures.next_check(self.now).is_some()
    }

    fn guarded(&self) -> Vec<String> {
        self.departures.guarded(true, |_, _| true).map(ToString::to_string).collect()
    }
}

#[test]
fn who_is_missing_stays_while_its_tunnel_works_and_is_guarded_for_a_day() {
    let mut bed = Bed::new(vec![member("n1", 1), member("self", 9)], Session::Alive);
    bed.now += Duration::from_secs(3600);
    assert_eq!(bed.step(Vec::new(), &[]), ["n1"]);
    assert_eq!(bed.guarded(), Vec::<String>::new());
    assert!(bed.departures.problems().next().is_some() && bed.is_waiting());
    bed.session = Session::Ended;
    assert_eq!(bed.step(Vec::new(), &[]), Vec::<String>::new());
    assert_eq!(bed.guarded(), ["192.0.2.1/32"]);
    bed.session = Session::Alive;
    assert_eq!(
        bed.step(Vec::new(), &[]),
        Vec::<String>::new(),
        "a tunnel that was taken down has no session"
    );
    bed.now += GUARD;
    bed.step(Vec::new(), &[]);
    assert!(bed.guarded().is_empty() && !bed.is_waiting());
}

#[test]
fn who_is_told_of_again_is_guarded_no_more() {
    let mut bed = Bed::new(vec![member("n1", 1)], Session::Never);
    bed.step(Vec::new(), &[]);
    assert_eq!(bed.guarded(), ["192.0.2.1/32"]);
    assert_eq!(bed.step(vec![record(Source::Discovery, member("n1", 1))], &[]), ["n1"]);
    assert_eq!((bed.guarded(), bed.is_waiting()), (Vec::new(), false));
}

#[test]
fn another_key_of_a_name_is_a_rotation() {
    let mut bed = Bed::new(vec![member("n1", 1)], Session::Alive);
    assert_eq!(bed.step(vec![record(Source::Kubernetes, member("n1", 2))], &[]), ["n1"]);
    assert_eq!((bed.previous[0].public_key, bed.is_waiting()), (Some(key(2)), false));
}

#[test]
fn a_deletion_that_was_seen_frees_addresses_at_once_and_beats_weaker_sources() {
    let mut bed = Bed::new(vec![member("n1", 1)], Session::Alive);
    let weaker = |number| {
        let sources = [Source::Static, Source::Discovery, Source::Cache];
        sources.map(|source| record(source, member("n1", number))).to_vec()
    };
    assert!(bed.step(weaker(1), &[deletion("n1", 1)]).is_empty());
    assert!(bed.guarded().is_empty());
    assert!(bed.step(weaker(2), &[]).is_empty(), "another key in its name");
    let renamed = record(Source::Discovery, member("n2", 1));
    assert!(bed.step(vec![renamed], &[]).is_empty(), "its key under another name");
    // The node publishes itself again.
    assert_eq!(bed.step(vec![record(Source::Kubernetes, member("n1", 1))], &[]), ["n1"]);
    assert_eq!(bed.step(weaker(1), &[]), ["n1"], "the deletion counts no more");
}

#[test]
fn who_is_revoked_is_refused_by_name_and_key_in_all_sources_and_keeps_its_blocks() {
    let mut bed = Bed::new(vec![member("n1", 1)], Session::Alive);
    bed.revoked = Revoked { keys: [key(1)].into(), names: ["n1".to_owned()].into() };
    let block = Member { blocks: vec!["10.0.0.0/27".parse().unwrap()], ..Member::named("n1") };
    let records = vec![
        record(Source::Kubernetes, member("n1", 1)),
        record(Source::Kubernetes, block),
        record(Source::Kubernetes, member("n2", 1)),
        record(Source::Discovery, member("n1", 3)),
        record(Source::Local, member("self", 9)),
        record(Source::Kubernetes, member("n3", 3)),
    ];
    assert_eq!(bed.step(records.clone(), &[]), ["n3", "self"]);
    let blocks: Vec<_> = bed.previous.iter().filter(|member| !member.blocks.is_empty()).collect();
    assert_eq!((blocks.len(), blocks[0].claims.len(), bed.guarded().len()), (1, 0, 0));
    bed.revoked = Revoked::default();
    assert_eq!(bed.step(records, &[]), ["n1", "n2", "n3", "self"]);
}

#[test]
fn who_copies_a_key_and_is_deleted_takes_nothing_from_its_owner() {
    let mut bed = Bed::new(vec![member("n1", 1), member("thief", 1)], Session::Alive);
    let both = [record(Source::Kubernetes, member("n1", 1)), record(Source::Discovery, member("n1", 1))];
    let mut found = both[1].clone();
    found.member.endpoints.discovered = vec![([192, 0, 2, 1], 7).into()];
    assert_eq!(bed.step(vec![both[0].clone(), found], &[deletion("thief", 1)]), ["n1"]);
    assert_eq!(bed.previous[0].endpoints.discovered.len(), 1);
}

#[test]
fn revocation_ends_a_guard() {
    let mut bed = Bed::new(vec![member("n1", 1)], Session::Never);
    bed.step(Vec::new(), &[]);
    assert_eq!(bed.guarded().len(), 1);
    bed.revoked.names.insert("n1".to_owned());
    bed.step(Vec::new(), &[]);
    assert_eq!(bed.guarded().len(), 0);
}

#[test]
fn of_discovery_only_who_had_a_tunnel_is_guarded_and_whom_it_deleted_is_not() {
    let found = Member {
        discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
        ..member("n1", 1)
    };
    let mut bed = Bed::new(vec![found.clone()], Session::Never);
    bed.step(Vec::new(), &[]);
    assert!(bed.guarded().is_empty());
    let mut bed = Bed::new(vec![found.clone()], Session::Ended);
    bed.step(Vec::new(), &[]);
    assert_eq!(bed.guarded().len(), 1);
    let by_discovery = Deletion { source: Source::Discovery, ..deletion("n1", 1) };
    let mut bed = Bed::new(vec![found.clone()], Session::Alive);
    assert!(bed.step(Vec::new(), &[by_discovery]).is_empty() && bed.guarded().is_empty());
    let again = record(Source::Discovery, member("n1", 1));
    assert_eq!(bed.step(vec![again], &[]), ["n1"], "what a service deletes it may tell of again");
    let mut bed = Bed::new(vec![found], Session::Alive);
    bed.uses_discovery = false;
    assert!(bed.step(Vec::new(), &[]).is_empty() && bed.guarded().is_empty());
}

#[test]
fn after_a_restart_the_rest_of_the_day_is_guarded() {
    let mut bed = Bed::new(vec![member("n1", 1)], Session::Unknown);
    bed.age = GUARD - Duration::from_secs(60);
    assert_eq!(bed.step(Vec::new(), &[]), ["n1"], "its tunnel may work");
    bed.session = Session::Never;
    bed.step(Vec::new(), &[]);
    assert_eq!(bed.guarded().len(), 1);
    bed.now += Duration::from_secs(61);
    bed.step(Vec::new(), &[]);
    assert_eq!(bed.guarded().len(), 0);
}

#[test]
fn a_deletion_is_forgotten_after_a_week_and_only_the_newest_are_kept() {
    let mut bed = Bed::new(Vec::new(), Session::Never);
    bed.step(Vec::new(), &[deletion("n1", 1)]);
    bed.now += KEEP_DELETIONS;
    assert_eq!(bed.step(vec![record(Source::Discovery, member("n1", 1))], &[]), ["n1"]);
    for number in 0..=MAX_DELETIONS {
        bed.now += Duration::from_millis(1);
        bed.step(Vec::new(), &[deletion(&format!("m{number}"), 1)]);
    }
    assert_eq!(bed.departures.deleted.len(), MAX_DELETIONS);
    assert!(!bed.departures.deleted.contains_key("m0"));
}

proptest::proptest! {
    /// Prefixes of a member that the cluster told of are not lost to clear text without a deletion or a revocation, whatever sources
    /// withhold.
    #[test]
    fn no_prefix_is_lost_without_a_reason(
        told in proptest::collection::vec(proptest::collection::vec(proptest::bool::ANY, 4), 1..8),
        alive in proptest::collection::vec(proptest::bool::ANY, 8),
    ) {
        let all: Vec<Member> = (1..=4).map(|number| member(&format!("n{number}"), number)).collect();
        let mut bed = Bed::new(all.clone(), Session::Alive);
        for (told, alive) in told.iter().zip(alive) {
            bed.session = if alive { Session::Alive } else { Session::Ended };
            bed.now += Duration::from_secs(60);
            let records = all.iter().zip(told).filter(|(_, told)| **told);
            bed.step(records.map(|(member, _)| record(Source::Kubernetes, member.clone())).collect(), &[]);
            for member in &all {
                let claim = member.claims[0];
                let is_member = bed.previous.iter().any(|known| known.claims.contains(&claim));
                let is_guarded = bed.departures.guarded(true, |_, _| true).any(|guarded| *guarded == claim);
                proptest::prop_assert!(is_member ^ is_guarded, "{}", claim);
            }
        }
    }
}

#[test]
fn what_the_controller_tells_again_and_again_changes_nothing_and_counts_for_a_node_that_was_off() {
    let mut bed = Bed::new(vec![member("n1", 1)], Session::Ended);
    bed.age = Duration::from_secs(3600);
    let told = [deletion("n1", 1)];
    let by_service = || record(Source::Discovery, member("n1", 1));
    assert_eq!(bed.step(vec![by_service()], &told), Vec::<String>::new());
    assert!(bed.guarded().is_empty(), "its addresses are free");
    let before = bed.departures.clone();
    bed.now += Duration::from_secs(60);
    bed.step(vec![by_service()], &told);
    assert_eq!(bed.departures, before);
    // It is published again before the controller takes it out.
    assert_eq!(bed.step(vec![record(Source::Kubernetes, member("n1", 2))], &told), ["n1"]);
}

#[test]
fn the_key_that_a_deleted_or_revoked_node_was_about_to_use_is_refused_too() {
    let mut bed = Bed::new(Vec::new(), Session::Never);
    let told = [Deletion { next_key: Some(key(2)), ..deletion("n1", 1) }];
    assert_eq!(bed.step(vec![record(Source::Discovery, member("fresh", 2))], &told), Vec::<String>::new());
    bed.revoked.keys.insert(key(3));
    let announcing = Member { next_key: Some(key(3)), ..member("n4", 4) };
    assert_eq!(bed.step(vec![record(Source::Kubernetes, announcing)], &[]), ["n4"]);
    assert_eq!(bed.previous[0].next_key, None);
}

fn with_blocks(member: Member, blocks: &[&str]) -> Member {
    Member { blocks: blocks.iter().map(|block| block.parse().unwrap()).collect(), ..member }
}

#[test]
fn a_released_block_is_guarded_until_a_member_has_it_again_or_a_day_has_passed() {
    let both = ["10.64.0.0/26", "10.64.0.64/26"];
    let own = |blocks: &[&str]| record(Source::Kubernetes, with_blocks(member("self", 9), blocks));
    let other = |blocks: &[&str]| record(Source::Kubernetes, with_blocks(member("n1", 1), blocks));
    let before = vec![with_blocks(member("n1", 1), &[]), with_blocks(member("self", 9), &both)];
    let mut bed = Bed::new(before, Session::Alive);
    bed.age = Duration::from_secs(3600);
    let blocks = |bed: &Bed| bed.guarded().iter().map(ToString::to_string).collect::<Vec<_>>();
    bed.step(vec![own(&both[1..]), other(&[])], &[]);
    assert_eq!(blocks(&bed), both[..1], "this node had it before it rebooted");
    bed.step(vec![own(&both[1..]), other(&both[..1])], &[]);
    assert_eq!(blocks(&bed), [""; 0], "another node has it");
    bed.step(vec![own(&both[1..]), other(&[])], &[]);
    assert_eq!(blocks(&bed), both[..1], "that one released it, too");
    let end = bed.now + GUARD;
    assert_eq!(bed.departures.next_check(bed.now), Some(end), "where nothing else changes meanwhile");
    bed.now = end - Duration::from_secs(1);
    bed.step(vec![own(&[]), other(&[])], &[]);
    assert_eq!(blocks(&bed), both);
    let told = |excluded: &str| bed.departures.released().outside(&[excluded.parse().unwrap()]);
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    assert_eq!(told("10.64.0.0/25"), [], "they are left to others");
    assert_eq!(told("10.64.0.64/26"), [(net(both[0]), end)]);
    assert_eq!(told("10.64.0.0/27"), [(net(both[0]), end), (net(both[1]), bed.now + GUARD)]);
    bed.now = end;
    bed.step(vec![own(&[]), other(&[])], &[]);
    assert_eq!(blocks(&bed), both[1..]);
}

#[test]
fn of_many_released_blocks_the_newest_are_guarded() {
    let blocks: Vec<String> = (0..5000_u32).map(|at| format!("10.{}.{}.0/24", at / 256, at % 256)).collect();
    let of = |blocks: &[String]| {
        with_blocks(member("n1", 1), &blocks.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let mut bed = Bed::new(vec![of(&blocks)], Session::Alive);
    for left in [4000, 2500, 0] {
        bed.now += Duration::from_secs(1);
        bed.step(vec![record(Source::Kubernetes, of(&blocks[..left]))], &[]);
    }
    let guarded = bed.guarded();
    assert_eq!(guarded.len(), 4096);
    let newest = guarded.iter().filter(|block| blocks[..4000].contains(&block.to_string())).count();
    assert_eq!(newest, 4000);
}
