//! Rotation by a test clock, and two replicas that race for one Secret.

use super::super::issue::generation;
use super::*;

const POLICY: Policy =
    Policy { lifetime: Duration::from_secs(365 * 86_400), propagation: Duration::from_secs(3600) };

fn start() -> Timestamp {
    "2026-11-21T12:00:00Z".parse().unwrap()
}

/// Decides and applies.
fn step(material: Option<Material>, published: bool, now: Timestamp) -> (Decision, Option<Material>) {
    let decision = decide(material.as_ref(), published, POLICY, now);
    let result = apply(decision, material.clone(), now, || generation(POLICY, now)).unwrap();
    (decision, result.or(material))
}

fn first(now: Timestamp) -> Material {
    step(None, false, now).1.unwrap()
}

fn hours(hours: u64) -> Duration {
    Duration::from_secs(hours * 3600)
}

#[test]
fn the_first_generation_is_issued_once() {
    let (decision, material) = step(None, false, start());
    assert_eq!(decision, Decision::Create);
    let material = material.unwrap();
    assert_eq!((material.authorities.len(), &material.next), (1, &None));
    for days in [0, 1, 100, 240] {
        let now = later(start(), hours(24 * days));
        assert_eq!(decide(Some(&material), true, POLICY, now), Decision::Keep, "day {days}");
    }
    assert_eq!(Material::from_secret(&material.to_secret()).unwrap(), material);
}

/// Ten years in steps of half an hour. API servers and replicas observe each step up to half an hour late; every replica's
/// certificate must be trusted by every API server.
#[test]
fn the_served_certificate_is_trusted_through_ten_years() {
    let mut material = first(start());
    let (mut before, mut rotations) = (material.clone(), 0);
    let mut now = start();
    // Days without a rotation are skipped, to keep the test fast.
    while now < later(start(), hours(24 * 3650)) {
        let (decision, result) = step(Some(material.clone()), true, now);
        let after = result.unwrap();
        assert_ne!(decision, Decision::Create, "{now}");
        rotations += usize::from(decision == Decision::Promote);
        for serving in [&before, &material, &after] {
            for trusting in [&before, &material, &after] {
                assert!(serving.serving.trusted(&trusting.authorities, now), "{now}: {decision:?}");
            }
        }
        assert!(after.authorities.len() <= 2 && after.serving.ends > later(now, hours(24 * 100)), "{now}");
        (before, material) = (material, after);
        let busy = material.next.is_some() || material.authorities.len() > 1 || before != material;
        now = later(now, if busy { Duration::from_secs(1800) } else { hours(24) });
    }
    assert!((13..=16).contains(&rotations), "{rotations}");
}

#[test]
fn a_certificate_is_served_after_its_authority_is_published_everywhere() {
    let material = first(start());
    let due = later(start(), hours(24 * 250));
    let (decision, prepared) = step(Some(material.clone()), true, due);
    let prepared = prepared.unwrap();
    assert_eq!((decision, prepared.authorities.len()), (Decision::Prepare, 2));
    assert_eq!(prepared.serving, material.serving);
    assert_eq!(decide(Some(&prepared), true, POLICY, later(due, hours(1) / 2)), Decision::Keep);
    assert_eq!(decide(Some(&prepared), false, POLICY, later(due, hours(48))), Decision::Keep);
    let (decision, promoted) = step(Some(prepared), true, later(due, hours(1)));
    let promoted = promoted.unwrap();
    assert_eq!((decision, promoted.authorities.len()), (Decision::Promote, 2));
    assert_ne!(promoted.serving, material.serving);
    assert_eq!(decide(Some(&promoted), true, POLICY, later(due, hours(1))), Decision::Keep);
    assert_eq!(decide(Some(&promoted), false, POLICY, later(due, hours(48))), Decision::Keep);
    let (decision, alone) = step(Some(promoted.clone()), true, later(due, hours(2)));
    let alone = alone.unwrap();
    assert_eq!((decision, &alone.serving), (Decision::Prune, &promoted.serving));
    assert_eq!(alone.authorities, promoted.authorities[1..]);
}

#[test]
fn after_a_long_outage_a_prepared_generation_is_served_and_an_expired_one_replaced() {
    let material = first(start());
    let late = later(start(), hours(24 * 400));
    let (decision, renewed) = step(Some(material.clone()), true, late);
    let renewed = renewed.unwrap();
    assert_eq!((decision, renewed.authorities.len()), (Decision::Create, 1));
    assert!(renewed.serving.trusted(&renewed.authorities, late));
    // Stopped in the middle of a rotation.
    let prepared = step(Some(material), true, later(start(), hours(24 * 300))).1.unwrap();
    let (decision, promoted) = step(Some(prepared), false, late);
    assert_eq!(decision, Decision::Promote);
    let promoted = promoted.unwrap();
    assert!(promoted.serving.trusted(&promoted.authorities, late));
}

#[test]
fn an_unusable_secret_is_replaced() {
    let good = first(start()).to_secret();
    let mut foreign = first(start()).to_secret();
    foreign.insert(AUTHORITIES.to_owned(), good[AUTHORITIES].clone());
    let foreign = Material::from_secret(&foreign).unwrap();
    assert_eq!(decide(Some(&foreign), true, POLICY, start()), Decision::Create);
    for (key, text) in
        [(CERTIFICATE, ""), (CERTIFICATE, "garbage"), (KEY, ""), (KEY, "-----BEGIN PRIVATE KEY-----")]
    {
        let mut broken = good.clone();
        broken.insert(key.to_owned(), ByteString(text.as_bytes().to_vec()));
        assert!(Material::from_secret(&broken).is_err(), "{key}: {text}");
    }
    let mut mixed = good.clone();
    mixed.insert(KEY.to_owned(), first(start()).to_secret()[KEY].clone());
    assert!(Material::from_secret(&mixed).is_err(), "a key of another certificate");
}

/// The Secret in an API server: a write is accepted only under the stored version.
#[test]
fn racing_replicas_agree_on_the_first_write() {
    let mut stored: Option<(u64, Material)> = None;
    let mut write = |seen: Option<u64>, material: Material| match &mut stored {
        None if seen.is_none() => stored = Some((1, material)),
        Some((version, present)) if seen == Some(*version) => {
            (*version, *present) = (*version + 1, material);
        }
        _ => {}
    };
    let (one, two) = (first(start()), first(start()));
    write(None, one.clone());
    write(None, two);
    assert_eq!(stored.as_ref().unwrap().1, one);
    // Both decide on the same version.
    let due = later(start(), hours(24 * 250));
    let (version, present) = stored.clone().unwrap();
    let prepared: Vec<Material> = (0..2).map(|_| step(Some(present.clone()), true, due).1.unwrap()).collect();
    let mut write = |seen: u64, material: Material| {
        let (version, present) = stored.as_mut().unwrap();
        if *version == seen {
            (*version, *present) = (seen + 1, material);
        }
    };
    write(version, prepared[0].clone());
    write(version, prepared[1].clone());
    assert_eq!(stored.unwrap(), (2, prepared[0].clone()));
}

proptest::proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200), at in 0usize..700) {
        let good = first(start());
        let mut der = good.serving.chain[0].to_vec();
        let at = at % der.len();
        der[at] ^= bytes.first().copied().unwrap_or(1) | 1;
        let _ = Pair::parse(pem("CERTIFICATE", &der).as_bytes(), &good.serving.key);
        let _ = Pair::parse(&bytes, &bytes);
        let _ = Pair::parse(pem("CERTIFICATE", &bytes).as_bytes(), pem("PRIVATE KEY", &bytes).as_bytes());
    }
}
