//! Asks all candidates of a peer now, and reports how its path changed.

use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime};

use fairlead_mesh::MeshView;
use fairlead_mesh::apply::report::{PeerReport, Report};
use fairlead_path::history;
use fairlead_path::{Candidate, CandidateStatus, PingOutcome, Source};
use fairlead_wire::node::{PathChange, PingRequest, PingResponse, PingedCandidate};
use tokio::time::sleep;
use tonic::Status;

/// Time for which answers are awaited: the default, and the most that a caller may ask for.
const TIMEOUT: Duration = Duration::from_secs(1);
const MAX_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the answers are looked at.
const POLL: Duration = Duration::from_millis(5);

/// Asks the candidates of a peer and waits for their answers.
///
/// # Errors
/// There is no such peer, or no probe can be sent.
pub(super) async fn ping(mesh: &MeshView, request: PingRequest) -> Result<PingResponse, Status> {
    let report = mesh.snapshot().report;
    let report = report.ok_or_else(|| Status::failed_precondition("this node is in no mesh"))?;
    let peer = find(&report.peers, &request.peer).ok_or_else(|| no_peer(&request.peer))?;
    let paths = mesh.paths().filter(|paths| paths.ping(&peer.public_key)).ok_or_else(|| {
        Status::failed_precondition("the WireGuard device of this node gives no access to its port")
    })?;
    let timeout = Duration::from_millis(request.timeout_milliseconds.into());
    let timeout = if timeout.is_zero() { TIMEOUT } else { timeout.min(MAX_TIMEOUT) };
    let began = Instant::now();
    loop {
        sleep(POLL).await;
        let candidates = paths.candidates(&peer.public_key, Instant::now());
        let answered = |status: &CandidateStatus| matches!(status.ping, Some(PingOutcome::Answered(_)));
        if candidates.iter().all(answered) || began.elapsed() >= timeout {
            let candidates = candidates.iter().map(|status| pinged(&report, status)).collect();
            return Ok(PingResponse { peer: peer.name.clone(), candidates });
        }
    }
}

/// By its name, its key, or an address that is reached through it.
pub(super) fn find<'a>(peers: &'a [PeerReport], subject: &str) -> Option<&'a PeerReport> {
    let address: Option<IpAddr> = subject.parse().ok();
    let has_address = |peer: &PeerReport| {
        address.is_some_and(|address| peer.prefixes.iter().any(|prefix| prefix.contains(&address)))
    };
    let is_named = |peer: &PeerReport| peer.name == subject || peer.public_key.to_string() == subject;
    peers.iter().find(|peer| is_named(peer)).or_else(|| peers.iter().find(|peer| has_address(peer)))
}

/// The error where there is none.
pub(super) fn no_peer(subject: &str) -> Status {
    Status::not_found(format!("this node has no peer '{subject}'"))
}

fn pinged(report: &Report, status: &CandidateStatus) -> PingedCandidate {
    let CandidateStatus { candidate, is_in_use, ping, loses_long, .. } = *status;
    PingedCandidate {
        address: address(report, candidate),
        kind: kind(candidate.source).to_owned(),
        in_use: is_in_use,
        round_trip_seconds: match ping {
            Some(PingOutcome::Answered(round_trip)) => Some(round_trip.as_secs_f64()),
            Some(PingOutcome::HeldBack | PingOutcome::Unanswered) | None => None,
        },
        held_back: ping == Some(PingOutcome::HeldBack),
        loses_long_packets: loses_long,
    }
}

/// As ICE names candidates (RFC 8445, section 4).
fn kind(source: Source) -> &'static str {
    match source {
        Source::Host => "host",
        Source::Manual => "manual",
        Source::Nat64 => "nat64",
        Source::Observed => "srflx",
        Source::Relay => "relay",
        Source::Roamed => "prflx",
    }
}

/// That of the relay for what stands for a peer behind it.
fn address(report: &Report, Candidate { address, source }: Candidate) -> String {
    match &report.relay {
        Some(_) if source == Source::Relay && !address.ip().is_loopback() => format!("udp://{address}"),
        Some(relay) if source == Source::Relay => relay.endpoint.to_string(),
        _ => address.to_string(),
    }
}

/// The last changes of the path to a peer.
pub(super) fn path_changes(mesh: &MeshView, report: &Report, peer: &PeerReport) -> Vec<PathChange> {
    let changes = mesh.paths().map(|paths| paths.path_changes(&peer.public_key)).unwrap_or_default();
    changes.iter().map(|change| describe(report, change)).collect()
}

fn describe(report: &Report, change: &history::PathChange) -> PathChange {
    let history::PathChange { at, from, to, reason, attempts } = *change;
    PathChange {
        at_seconds: at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
        from: from.map(|from| address(report, from)).unwrap_or_default(),
        from_source: from.map(|from| from.source.to_string()).unwrap_or_default(),
        to: address(report, to),
        to_source: to.source.to_string(),
        reason: reason.name().to_owned(),
        attempts,
    }
}

#[cfg(test)]
mod tests {
    use fairlead_keys::PublicKey;
    use fairlead_path::{Reason, State, Status};
    use fairlead_topology::Sources;

    use super::*;

    fn peer(name: &str, number: u8, prefixes: &[&str]) -> PeerReport {
        let path = Status {
            state: State::Up,
            reason: Reason::SessionAlive,
            endpoint: None,
            source: None,
            message: String::new(),
            round_trip: None,
            loses_long: false,
            route_mtu: None,
        };
        PeerReport {
            name: name.to_owned(),
            public_key: PublicKey([number; 32]),
            path,
            sources: Sources::default(),
            relay_reason: None,
            plain: Vec::new(),
            encapsulated: Vec::new(),
            device: None,
            prefixes: prefixes.iter().map(|prefix| prefix.parse().unwrap()).collect(),
            published_endpoint: None,
            relay: None,
        }
    }

    #[test]
    fn a_peer_is_found_by_name_key_or_what_is_behind_it() {
        let peers = [peer("a", 1, &["10.64.0.0/27", "10.0.0.1/32"]), peer("10.0.0.1", 2, &["fd00::/64"])];
        let found = |subject: &str| find(&peers, subject).map(|peer| peer.public_key.0[0]);
        assert_eq!((found("a"), found("b"), found("")), (Some(1), None, None));
        assert_eq!((found("10.64.0.9"), found("fd00::9"), found("10.64.1.9")), (Some(1), Some(2), None));
        assert_eq!(found("10.0.0.1"), Some(2), "a name comes first");
        assert_eq!(found(&peers[1].public_key.to_string()), Some(2));
    }
}
