//! `fairlead ping`: which candidates of a peer answer now.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use fairlead_wire::node::{PingRequest, PingResponse, PingedCandidate};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};

use crate::arguments::queries::PingArguments;
use crate::output::{Output, milliseconds, render, table};
use crate::query::{connect, current_thread};

/// Asks round after round. Tables are printed as they come, data for scripts at the end.
///
/// # Errors
/// The node program does not answer, or knows no such peer.
pub fn run(query: &PingArguments) -> anyhow::Result<ExitCode> {
    let is_table = matches!(query.output, Output::Table | Output::Wide);
    let mut stdout = std::io::stdout();
    let rounds = current_thread(async {
        let mut node = connect(&query.socket).await?;
        let mut ticks = interval(query.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut rounds = Vec::new();
        for number in 1..=query.count {
            ticks.tick().await;
            let request = PingRequest {
                peer: query.peer.clone(),
                timeout_milliseconds: milliseconds_of(query.timeout),
            };
            let answer =
                node.ping(request).await.map_err(|status| anyhow::anyhow!("{}", status.message()))?;
            let answer = answer.into_inner();
            // A closed pipe (`| head`) is not a failure.
            if is_table && stdout.write_all(round_table(number, &answer).as_bytes()).is_err() {
                break;
            }
            rounds.push(answer);
        }
        Ok(rounds)
    })?;
    let summary = Summary::new(&rounds);
    let text = render(query.output, || ping_json(&rounds), |_| summary.text())?;
    drop(stdout.write_all(text.as_bytes()));
    Ok(if summary.answered > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn milliseconds_of(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1)
}

/// Number of rounds, and of candidates that answered in any of them.
struct Summary {
    rounds: usize,
    candidates: usize,
    answered: usize,
}

impl Summary {
    fn new(rounds: &[PingResponse]) -> Self {
        let mut answered: BTreeMap<&str, bool> = BTreeMap::new();
        for candidate in rounds.iter().flat_map(|round| &round.candidates) {
            *answered.entry(&candidate.address).or_default() |= candidate.round_trip_seconds.is_some();
        }
        let candidates = answered.len();
        Self { rounds: rounds.len(), candidates, answered: answered.values().filter(|it| **it).count() }
    }

    fn text(&self) -> String {
        let Self { rounds, candidates, answered } = self;
        let unit = if *rounds == 1 { "round" } else { "rounds" };
        format!("{rounds} {unit}, {answered} of {candidates} candidates answered\n")
    }
}

fn round_table(number: u32, round: &PingResponse) -> String {
    let mut rows = table(&["CANDIDATE", "KIND", "ANSWER", "IN USE"]);
    for candidate in &round.candidates {
        let in_use = if candidate.in_use { "yes" } else { "-" };
        let PingedCandidate { address, kind, .. } = candidate;
        rows.add_row([address, kind, &answer(candidate), in_use]);
    }
    format!("round {number}: {}\n{rows}\n\n", round.peer)
}

fn answer(candidate: &PingedCandidate) -> String {
    match candidate.round_trip_seconds {
        Some(round_trip) if candidate.loses_long_packets => {
            format!("{}, loses long packets", milliseconds(round_trip))
        }
        Some(round_trip) => milliseconds(round_trip),
        None if candidate.held_back => "not asked: too many probes".to_owned(),
        None => "no answer".to_owned(),
    }
}

/// The rounds for scripts: names and types are stable.
fn ping_json(rounds: &[PingResponse]) -> Value {
    let candidate = |candidate: &PingedCandidate| {
        json!({
            "address": candidate.address, "kind": candidate.kind, "inUse": candidate.in_use,
            "answered": candidate.round_trip_seconds.is_some(), "roundTripSeconds": candidate.round_trip_seconds,
            "heldBack": candidate.held_back, "losesLongPackets": candidate.loses_long_packets,
        })
    };
    let rounds_json: Vec<Value> = rounds
        .iter()
        .map(|round| json!({ "candidates": round.candidates.iter().map(candidate).collect::<Vec<_>>() }))
        .collect();
    json!({ "peer": rounds.first().map(|round| &round.peer), "rounds": rounds_json })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::tests::arguments;

    fn candidate(address: &str, kind: &str, round_trip_seconds: Option<f64>) -> PingedCandidate {
        let (address, kind) = (address.to_owned(), kind.to_owned());
        PingedCandidate { address, kind, round_trip_seconds, ..PingedCandidate::default() }
    }

    fn round() -> PingResponse {
        let direct = candidate("192.0.2.1:51820", "host", None);
        let relay = PingedCandidate { in_use: true, ..candidate("tcp://relay:3340", "relay", Some(0.0301)) };
        let held_back = PingedCandidate { held_back: true, ..candidate("192.0.2.2:51820", "srflx", None) };
        PingResponse { peer: "home-1".to_owned(), candidates: vec![direct, relay, held_back] }
    }

    #[test]
    fn each_candidate_says_whether_it_answered_and_which_is_used() {
        let text = round_table(1, &round());
        let line = |word: &str| text.lines().find(|line| line.contains(word)).unwrap().to_owned();
        assert!(line("192.0.2.1").contains("no answer"), "{text}");
        assert!(line("tcp://relay").contains("30.1 ms") && line("tcp://relay").contains("yes"), "{text}");
        assert!(line("192.0.2.2").contains("not asked"), "{text}");
        let narrow =
            PingedCandidate { loses_long_packets: true, ..candidate("192.0.2.1:1", "host", Some(0.0121)) };
        assert_eq!(answer(&narrow), "12.1 ms, loses long packets");
        let summary = Summary::new(&[round(), round()]);
        assert_eq!(summary.text(), "2 rounds, 1 of 3 candidates answered\n");
        assert_eq!(Summary::new(&[]).answered, 0);
    }

    #[test]
    fn scripts_get_every_round() {
        let value = ping_json(&[round(), round()]);
        assert_eq!((value["peer"].as_str(), value["rounds"].as_array().unwrap().len()), (Some("home-1"), 2));
        let candidates = &value["rounds"][1]["candidates"];
        assert_eq!(
            candidates[1],
            json!({
                "address": "tcp://relay:3340", "kind": "relay", "inUse": true, "answered": true,
                "roundTripSeconds": 0.0301, "heldBack": false, "losesLongPackets": false,
            })
        );
        assert!(candidates[0]["roundTripSeconds"].is_null());
    }

    #[test]
    fn an_interval_that_is_a_flood_is_refused() {
        let parse = arguments::<PingArguments>;
        for words in ["", "home-1 -c 0", "home-1 -i 100ms", "home-1 -i nonsense"] {
            assert_eq!(parse(words).unwrap_err().exit_code(), 2, "{words}");
        }
        let query = parse("home-1 -c 5 -i 200ms -o json").unwrap();
        assert_eq!(
            (query.count, query.interval, query.output),
            (5, Duration::from_millis(200), Output::Json)
        );
    }
}
