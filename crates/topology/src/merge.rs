//! Records of many sources to one member each.

use crate::member::{Endpoints, Member, MemberRecord};

/// Unites the records of each member, whatever order they come in. Takes `O(n log n)`.
///
/// A value that only one member can have is that of the strongest source, in the order of [`crate::Source`]; of several records of a
/// source that of the youngest. So another key for the same member is a rotation, not a second member, and claims of a record count only
/// together with its key. Blocks and endpoints of all records are put together.
///
/// Discovery services add only endpoints to a member that a stronger source knows: the secret of the cluster proves no identity, and a
/// key of theirs would get the packets for the blocks of a node.
pub fn merge(mut records: Vec<MemberRecord>) -> Vec<Member> {
    records.sort_unstable_by(|a, b| (&a.member.name, a).cmp(&(&b.member.name, b)));
    let mut members: Vec<Member> = Vec::with_capacity(records.len());
    for MemberRecord { source, mut member, .. } in records {
        member.sources = source.into();
        match members.last_mut() {
            Some(known) if known.name == member.name => complete(known, member),
            _ => members.push(member),
        }
    }
    // The list is kept until something changes.
    members.shrink_to_fit();
    members
}

/// Adds what a record with less authority knows.
fn complete(known: &mut Member, other: Member) {
    known.sources = known.sources | other.sources;
    if other.discovery.is_only_source && !known.discovery.is_only_source {
        let endpoints = Endpoints { discovered: other.endpoints.discovered, ..Endpoints::default() };
        return known.endpoints.complete(endpoints);
    }
    if known.public_key.is_none() {
        known.public_key = other.public_key;
        known.next_key = other.next_key;
        known.claims = other.claims;
        known.addresses.is_unconfirmed = other.addresses.is_unconfirmed;
    }
    let missing: Vec<_> = other.blocks.into_iter().filter(|block| !known.blocks.contains(block)).collect();
    known.blocks.extend(missing);
    if known.pod_networks.is_empty() {
        known.pod_networks = other.pod_networks;
    }
    if known.addresses.mesh.is_empty() {
        known.addresses.mesh = other.addresses.mesh;
    }
    known.addresses.node = known.addresses.node.take().or(other.addresses.node);
    known.addresses.is_control_plane |= other.addresses.is_control_plane;
    known.endpoints.complete(other.endpoints);
    known.keepalive.interval = known.keepalive.interval.or(other.keepalive.interval);
    known.keepalive.always_sends |= other.keepalive.always_sends;
    if known.entry_terms.is_empty() {
        known.entry_terms = other.entry_terms;
    }
    known.site = known.site.take().or(other.site);
    known.external = known.external.take().or(other.external);
    // The oldest record counts: another source does not make a member younger.
    known.since = known.since.take().into_iter().chain(other.since).min();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use fairlead_keys::PublicKey;
    use ipnet::IpNet;
    use proptest::prelude::*;

    use super::*;
    use crate::member::{Keepalive, Since, Source};

    fn record(source: Source, age: u64, key: Option<u8>) -> MemberRecord {
        let mut record = MemberRecord::of_node(source, "n1");
        record.age = Duration::from_secs(age);
        record.member.public_key = key.map(|byte| PublicKey([byte; 32]));
        record
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn another_key_of_a_node_is_a_rotation_and_the_youngest_counts() {
        let mut old = record(Source::Kubernetes, 60, Some(1));
        old.member.claims = vec![net("192.0.2.9/32")];
        old.member.blocks = vec![net("10.0.0.0/27")];
        let mut new = record(Source::Kubernetes, 2, Some(2));
        new.member.claims = vec![net("192.0.2.1/32")];
        let merged = merge(vec![old, new]);
        assert_eq!(merged.len(), 1);
        assert_eq!(merged[0].public_key, Some(PublicKey([2; 32])));
        assert_eq!(merged[0].claims, [net("192.0.2.1/32")], "claims go with their key");
        assert_eq!(merged[0].blocks, [net("10.0.0.0/27")], "blocks belong to the node");
    }

    #[test]
    fn what_the_program_knows_of_its_node_beats_what_it_published() {
        let published = record(Source::Kubernetes, 0, Some(1));
        let own = record(Source::Local, 0, Some(2));
        assert_eq!(merge(vec![published, own])[0].public_key, Some(PublicKey([2; 32])));
    }

    #[test]
    fn a_record_without_a_key_adds_to_that_with_one() {
        let mut blocks = record(Source::Local, 0, None);
        blocks.member.claims = vec![net("192.0.2.9/32")];
        blocks.member.keepalive.interval = Some(7);
        let mut peer = record(Source::Kubernetes, 5, Some(1));
        peer.member.claims = vec![net("192.0.2.1/32")];
        let merged = merge(vec![blocks, peer]).remove(0);
        assert_eq!((merged.public_key.is_some(), merged.keepalive.interval), (true, Some(7)));
        assert_eq!(merged.claims, [net("192.0.2.1/32")], "claims without a key count for nothing");
    }

    #[test]
    fn claims_are_as_unconfirmed_as_in_the_record_that_they_come_from() {
        let mut blocks = record(Source::Kubernetes, 0, None);
        blocks.member.blocks = vec![net("10.0.0.0/27")];
        let mut peer = record(Source::Kubernetes, 0, Some(1));
        peer.member.addresses.is_unconfirmed = true;
        assert!(merge(vec![blocks, peer.clone()])[0].addresses.is_unconfirmed);
        let of_file = record(Source::Static, 0, Some(1));
        assert!(
            merge(vec![peer, of_file.clone()])[0].addresses.is_unconfirmed,
            "the file does not speak for the cluster"
        );
        assert!(!merge(vec![of_file])[0].addresses.is_unconfirmed);
    }

    #[test]
    fn discovery_adds_only_endpoints_to_what_the_cluster_knows() {
        let mut blocks = record(Source::Kubernetes, 0, None);
        blocks.member.blocks = vec![net("10.0.0.0/27")];
        let mut found = record(Source::Discovery, 0, Some(2));
        found.member.claims = vec![net("192.0.2.9/32")];
        found.member.endpoints.discovered = vec![([192, 0, 2, 9], 1).into()];
        found.member.keepalive.interval = Some(1);
        let merged = merge(vec![found.clone(), blocks]).remove(0);
        assert_eq!(
            (merged.public_key, merged.claims, merged.discovery.is_only_source),
            (None, vec![], false)
        );
        assert_eq!((merged.blocks.len(), merged.keepalive.interval), (1, None));
        assert_eq!(merged.endpoints.discovered, found.member.endpoints.discovered);
        let mut cached = record(Source::Cache, 0, Some(3));
        cached.member.endpoints.discovered = vec![([192, 0, 2, 9], 2).into()];
        let alone = merge(vec![cached, found]).remove(0);
        assert_eq!((alone.public_key, alone.discovery.is_only_source), (Some(PublicKey([2; 32])), true));
        assert_eq!(alone.endpoints.discovered.len(), 2);
    }

    #[test]
    fn a_member_has_the_names_of_all_who_tell_of_it() {
        let of = |source| record(source, 0, Some(1));
        let merged = merge(vec![of(Source::Discovery), of(Source::Static), of(Source::Kubernetes)]);
        let sources: Vec<Source> = merged[0].sources.iter().collect();
        assert_eq!(sources, [Source::Kubernetes, Source::Static, Source::Discovery]);
        let alone = merge(vec![of(Source::Cache), of(Source::Cache)]).remove(0);
        assert!(alone.sources.iter().eq([Source::Cache]) && !alone.sources.contains(Source::Local));
    }

    #[test]
    fn a_member_that_is_no_node_is_never_taken_for_one() {
        let node = MemberRecord::of_node(Source::Kubernetes, "n1");
        let external = MemberRecord::of_external(Source::Kubernetes, "n1");
        assert_eq!(merge(vec![node, external]).len(), 2);
    }

    prop_compose! {
        fn any_record()(
            age in 0..3u64,
            source in prop::sample::select(vec![
                Source::Local, Source::Kubernetes, Source::Static, Source::Discovery, Source::Cache,
            ]),
            name in 0..4u8,
            external: bool,
            key in prop::option::of(0..3u8),
            claims in prop::collection::vec((0..4u8).prop_map(|host| net(&format!("192.0.2.{host}/32"))), 0..3),
            blocks in prop::collection::vec((0..4u8).prop_map(|block| net(&format!("10.0.{block}.0/24"))), 0..3),
            host in prop::collection::vec((1..4u16).prop_map(|port| ([192, 0, 2, 1], port).into()), 0..3),
            keepalive in prop::option::of(0..3u16),
            always_sends: bool,
            created in prop::option::of(0..3i64),
        ) -> MemberRecord {
            let name = format!("n{name}");
            let record = match external {
                true => MemberRecord::of_external(source, &name),
                false => MemberRecord::of_node(source, name),
            };
            let member = Member {
                public_key: key.map(|byte| PublicKey([byte; 32])),
                claims,
                blocks,
                endpoints: Endpoints { host, ..Endpoints::default() },
                keepalive: Keepalive { interval: keepalive, always_sends },
                since: created.map(|created| Since { created, uid: String::new() }),
                ..record.member
            };
            MemberRecord { age: Duration::from_secs(age), source, member }
        }
    }

    /// The records of a member from which more than endpoints counts.
    fn counting<'a>(records: &'a [MemberRecord], name: &str) -> Vec<&'a MemberRecord> {
        let of: Vec<_> = records.iter().filter(|record| record.member.name == name).collect();
        let has_stronger = of.iter().any(|record| !record.source.is_discovery());
        of.into_iter().filter(|record| !(has_stronger && record.source.is_discovery())).collect()
    }

    proptest! {
        #[test]
        fn the_order_of_records_does_not_matter(
            records in prop::collection::vec(any_record(), 0..12).prop_shuffle(),
        ) {
            let mut sorted = records.clone();
            sorted.sort();
            prop_assert_eq!(merge(records), merge(sorted));
        }

        #[test]
        fn saying_the_same_twice_changes_nothing(records in prop::collection::vec(any_record(), 0..12)) {
            let once: BTreeSet<String> = merge(records.clone()).into_iter().map(|member| member.name).collect();
            let twice = merge([records.clone(), records.clone()].concat());
            prop_assert_eq!(twice.len(), once.len());
            for member in &twice {
                let of = counting(&records, &member.name).into_iter();
                let blocks: BTreeSet<IpNet> = of.flat_map(|record| record.member.blocks.clone()).collect();
                prop_assert_eq!(blocks, member.blocks.iter().copied().collect());
            }
        }

        #[test]
        fn key_and_claims_come_from_one_record_and_none_is_younger(
            records in prop::collection::vec(any_record(), 0..12),
        ) {
            for member in merge(records.clone()) {
                let of = counting(&records, &member.name).into_iter();
                let keyed: Vec<&MemberRecord> = of.filter(|record| record.member.public_key.is_some()).collect();
                let Some(youngest) = keyed.iter().map(|record| (record.source, record.age)).min() else {
                    prop_assert_eq!(member.public_key, None);
                    continue;
                };
                prop_assert!(keyed.iter().any(|record| (record.source, record.age) == youngest
                    && record.member.public_key == member.public_key
                    && record.member.claims == member.claims));
            }
        }
    }
}
