//! One peer of a node, with the last changes of its path.

use fairlead_wire::node::{PathChange, Peer};
use serde_json::{Value, json};

use super::local::{peer_json, reason, sources};
use crate::output::{age, milliseconds, now, or_dash, table, time};

/// The peers for scripts: names and types are stable.
pub(super) fn peers_json(peers: &[Peer]) -> Value {
    let with_changes = |peer: &Peer| {
        let mut value = peer_json(peer);
        if let Some(fields) = value.as_object_mut() {
            fields.insert("pathChanges".to_owned(), peer.path_changes.iter().map(change_json).collect());
        }
        value
    };
    json!({ "peers": peers.iter().map(with_changes).collect::<Vec<_>>() })
}

fn change_json(change: &PathChange) -> Value {
    json!({
        "at": time(change.at_seconds), "from": change.from, "fromSource": change.from_source, "to": change.to,
        "toSource": change.to_source, "reason": change.reason, "attempts": change.attempts,
    })
}

/// The peers for people.
pub(super) fn text(peers: &[Peer]) -> String {
    peers.iter().map(|peer| peer_text(peer, now())).collect::<Vec<_>>().join("\n")
}

fn peer_text(peer: &Peer, now: i64) -> String {
    let mut facts = table(&["FIELD", "VALUE"]);
    let handshake = peer.handshake_age_seconds.map(|seconds| format!("{} ago", age(seconds as i64)));
    for (name, value) in [
        ("peer", peer.name.clone()),
        ("public key", peer.public_key.clone()),
        ("state", peer.state.clone()),
        ("endpoint", or_dash(&peer.endpoint)),
        ("source", or_dash(&peer.endpoint_source)),
        ("reason", reason(peer)),
        ("handshake", handshake.unwrap_or_else(|| "never".to_owned())),
        ("round trip", peer.round_trip_seconds.map_or_else(|| "-".to_owned(), milliseconds)),
        ("prefixes", or_dash(&peer.prefixes.join(" "))),
        ("known from", sources(peer)),
    ] {
        facts.add_row([name.to_owned(), value]);
    }
    let mut changes = table(&["CHANGED", "AGE", "FROM", "TO", "REASON"]);
    for change in peer.path_changes.iter().rev() {
        let PathChange { at_seconds, from, from_source, to, to_source, reason, attempts } = change;
        let tried = if *attempts > 1 { format!("{reason} ({attempts} endpoints)") } else { reason.clone() };
        changes.add_row([
            time(*at_seconds),
            age(now.saturating_sub(*at_seconds as i64).max(0)),
            end(from, from_source),
            end(to, to_source),
            tried,
        ]);
    }
    format!("{facts}\n\n{changes}\n")
}

fn end(address: &str, source: &str) -> String {
    match source {
        "" => or_dash(address),
        source => format!("{address} ({source})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relayed() -> Peer {
        let change = |at_seconds, from: &str, to: &str, to_source: &str, reason: &str, attempts| PathChange {
            at_seconds,
            from: from.to_owned(),
            from_source: if from.is_empty() { String::new() } else { "host".to_owned() },
            to: to.to_owned(),
            to_source: to_source.to_owned(),
            reason: reason.to_owned(),
            attempts,
        };
        Peer {
            name: "home-1".to_owned(),
            state: "up".to_owned(),
            relay_reason: "both symmetric NAT".to_owned(),
            path_changes: vec![
                change(1000.25, "", "192.0.2.1:51820", "host", "NextCandidate", 4),
                change(1060.5, "192.0.2.1:51820", "tcp://relay:3340", "relay", "ProbeAnswered", 1),
            ],
            ..Peer::default()
        }
    }

    #[test]
    fn the_newest_change_comes_first_and_says_why() {
        let text = peer_text(&relayed(), 1180);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("1970")).collect();
        let [newest, oldest] = lines[..] else { panic!("{text}") };
        for (line, words) in [
            (
                newest,
                ["1970-01-01T00:17:40.500Z", "2m", "192.0.2.1:51820 (host)", "tcp://relay:3340 (relay)"],
            ),
            (
                oldest,
                ["1970-01-01T00:16:40.250Z", "3m", "192.0.2.1:51820 (host)", "NextCandidate (4 endpoints)"],
            ),
        ] {
            assert!(words.iter().all(|word| line.contains(word)), "{words:?} in {line}");
        }
        assert!(text.contains("relay: both symmetric NAT"), "{text}");
    }

    #[test]
    fn scripts_get_the_changes_in_order() {
        let value = peers_json(&[relayed()]);
        let peer = &value["peers"][0];
        assert_eq!(peer["relayReason"], "both symmetric NAT");
        assert_eq!(peer["pathChanges"][1]["at"], "1970-01-01T00:17:40.500Z");
        assert_eq!(peer["pathChanges"][1]["toSource"], "relay");
        assert_eq!(peer["pathChanges"][0]["from"], "");
    }
}
