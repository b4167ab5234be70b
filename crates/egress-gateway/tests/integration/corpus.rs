//! Every input that the fuzz targets `egress_peers` and `egress_registration` keep is read again, without a fuzzer.

use std::path::Path;

use fairlead_egress_gateway::registry::Client;
use fairlead_egress_gateway::source_addresses::peers::frames;
use fairlead_source_addresses::copies::copied;
use fairlead_wire::egress::register_request::Kind;
use fairlead_wire::egress::{self as wire, RegisterRequest, RegisterResponse};
use fairlead_wire::egress_peers::{FromMember, ToMember, to_member};
use prost::Message;

/// The kept inputs of a target with their names, in order.
fn kept(target: &str) -> Vec<(String, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let mut inputs: Vec<_> = files
        .map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap()))
        .collect();
    inputs.sort();
    inputs
}

fn named<const N: usize>(expected: [(&str, usize, usize); N]) -> [(String, usize, usize); N] {
    expected.map(|(name, first, second)| (name.to_owned(), first, second))
}

fn clients(message: RegisterRequest) -> Vec<wire::Client> {
    match message.kind {
        Some(Kind::All(all)) => all.clients,
        Some(Kind::Change(change)) => change.set,
        Some(Kind::Hello(_)) | None => Vec::new(),
    }
}

#[test]
fn kept_registrations_never_panic_and_some_are_good() {
    let mut results = Vec::new();
    for (name, bytes) in kept("egress_registration") {
        let (mut good, mut bad, mut rest) = (0, 0, bytes.as_slice());
        while let Some((which, message)) = rest.split_first() {
            rest = message;
            if which >> 5 == 3 {
                // For a node program.
                RegisterResponse::decode_length_delimited(&mut rest).unwrap();
                continue;
            }
            let Ok(message) = RegisterRequest::decode_length_delimited(&mut rest) else { break };
            for client in clients(message) {
                let is_good = Client::try_from(client).is_ok();
                good += usize::from(is_good);
                bad += usize::from(!is_good);
            }
        }
        results.push((name, good, bad));
    }
    let expected = [
        ("all_then_changes", 3, 0),
        ("answer_with_holds", 0, 0),
        ("answer_with_short_address", 0, 0),
        ("change_first_and_old_revision", 1, 0),
        ("cut_off", 0, 0),
        ("new_stream_and_adopted", 3, 0),
        ("refused_clients", 3, 7),
        ("two_nodes_claim_an_address", 3, 0),
    ];
    assert_eq!(results, named(expected));
}

/// Number of connections of a message that could be copied.
fn flows(message: &ToMember) -> usize {
    match &message.kind {
        Some(to_member::Kind::Flows(flows)) => {
            flows.set.iter().filter(|flow| copied::decode(flow).is_some()).count()
        }
        _ => 0,
    }
}

#[tokio::test]
async fn kept_messages_of_members_never_panic_and_some_are_good() {
    let mut results = Vec::new();
    for (name, bytes) in kept("egress_peers") {
        let (mut messages, mut copied, mut rest, mut buffer) = (0, 0, bytes.as_slice(), Vec::new());
        while let Some((which, frame)) = rest.split_first() {
            rest = frame;
            let read = if which & 2 == 0 {
                frames::read::<ToMember>(&mut rest, &mut buffer).await.map(|message| flows(&message))
            } else {
                frames::read::<FromMember>(&mut rest, &mut buffer).await.map(|_| 0)
            };
            let Ok(count) = read else { break };
            messages += 1;
            copied += count;
        }
        results.push((name, messages, copied));
    }
    let expected = [
        ("answers", 3, 0),
        ("full_copy", 7, 5),
        ("heartbeats", 2, 0),
        ("later_version", 2, 0),
        ("no_message", 0, 0),
        ("refused_flows", 4, 7),
        ("too_long", 0, 0),
        ("too_many_and_taken_over", 6, 9),
    ];
    assert_eq!(results, named(expected));
}
