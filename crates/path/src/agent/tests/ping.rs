use fairlead_keys::PrivateKey;
use x25519_dalek::StaticSecret;

use super::*;
use crate::prober::PingOutcome;

fn public(private: u8) -> PublicKey {
    PublicKey(x25519_dalek::PublicKey::from(&StaticSecret::from([private; 32])).to_bytes())
}

fn probing_agent() -> PathAgent {
    let mut agent = agent();
    let (private_key, public_key) = (PrivateKey([1; 32]), public(1));
    agent.enable_probes(Identity { private_key, public_key, epoch: [1; 16] });
    agent
}

/// Runs the agent until `end`; what it sends.
fn sent(agent: &mut PathAgent, end: Duration) -> usize {
    while let Some(at) = agent.poll_timeout().filter(|at| *at <= end) {
        agent.handle_timeout(at);
        events(agent);
    }
    std::iter::from_fn(|| agent.poll_transmit()).count()
}

#[test]
fn pings_stay_within_the_limits_on_probes() {
    let mut agent = probing_agent();
    agent.upsert_peer(SECOND, public(2), paths(&[1]));
    sent(&mut agent, 10 * SECOND);
    let mut count = 0;
    for tick in 0..200_u32 {
        let now = 10 * SECOND + tick * Duration::from_millis(5);
        assert!(agent.ping(now, &public(2)));
        count += sent(&mut agent, now);
    }
    assert!(count <= 20, "{count} probes without an answer within a second");
    let status = agent.candidates(11 * SECOND, &public(2));
    assert_eq!(status[0].ping, Some(PingOutcome::HeldBack), "{status:?}");
    assert!(agent.probe_counts().drops.held_back > 0);
    assert!(agent.probe_counts().requests_sent >= 20);
}

#[test]
fn without_probes_or_such_a_peer_there_is_no_ping() {
    let mut without = agent();
    without.upsert_peer(SECOND, key(2), paths(&[1]));
    assert!(!without.ping(SECOND, &key(2)));
    assert!(without.candidates(SECOND, &key(2)).is_empty());
    let mut agent = probing_agent();
    assert!(!agent.ping(SECOND, &public(2)));
}
