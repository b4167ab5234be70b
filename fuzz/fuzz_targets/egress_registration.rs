//! Messages between node programs and a gateway: how the gateway takes those of two Nodes, and what a node program reads in an answer. A
//! byte before each message, which is behind its length (a varint), says whose it is and what happens before.
#![no_main]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_address::is_reachable;
use fairlead_api::names::{is_dns_label, is_object_name};
use fairlead_egress_gateway::facts::Facts;
use fairlead_egress_gateway::registry::{Client, MAX_PER_NODE, Owner, Registry, StreamId, Update};
use fairlead_source_addresses::announcements::holds;
use fairlead_wire::egress::register_request::Kind;
use fairlead_wire::egress::{RegisterRequest, RegisterResponse};
use libfuzzer_sys::fuzz_target;
use prost::Message;

const NODES: [&str; 2] = ["n0", "n1"];
const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 9));

fuzz_target!(|bytes: &[u8]| {
    let mut registry = Registry::new(vec![OWN], [IpAddr::from([10, 1, 0, 7]), IpAddr::from([10, 9, 0, 7])]);
    registry.set_facts(facts());
    let mut streams = NODES.map(|node| registry.begin(node));
    let mut rest = bytes;
    while let Some((which, message)) = rest.split_first() {
        rest = message;
        let at = usize::from(which & 1);
        match which >> 5 {
            0 => streams[at] = registry.begin(NODES[at]),
            1 => registry.end(NODES[at], streams[at]),
            2 => registry.end_grace(),
            3 => {
                let Ok(answer) = RegisterResponse::decode_length_delimited(&mut rest) else { return };
                check_holds(&answer);
                continue;
            }
            _ => {}
        }
        let Ok(message) = RegisterRequest::decode_length_delimited(&mut rest) else { return };
        assert_eq!(RegisterRequest::decode(message.encode_to_vec().as_slice()).as_ref(), Ok(&message));
        take(&mut registry, at, streams[at], message);
    }
});

fn facts() -> Facts {
    let mut facts = Facts { namespaces: Some(["shop".to_owned()].into()), ..Facts::default() };
    for (node, block, range, shared) in [
        ("n0", "10.1.0.0/27", "fd00:0:0:0::/64", "10.3.0.0/24"),
        ("n1", "10.2.0.0/27", "fd00:0:0:1::/64", "10.3.0.0/24"),
    ] {
        facts.nodes.insert(node.to_owned());
        facts.blocks.add(node, block.parse().unwrap());
        facts.pod_cidrs.add(node, range.parse().unwrap());
        facts.pod_cidrs.add(node, shared.parse().unwrap());
    }
    facts
}

/// Takes a message as the gateway's session does.
fn take(registry: &mut Registry, at: usize, stream: StreamId, message: RegisterRequest) {
    let node = NODES[at];
    let Ok(()) = registry.check(node, stream, message.revision) else { return };
    let (clients, removed) = match message.kind {
        Some(Kind::All(all)) => (all.clients, None),
        Some(Kind::Change(change)) => (change.set, Some(change.removed)),
        Some(Kind::Hello(_)) | None => return,
    };
    let (mut parsed, mut refused) = (Vec::new(), Vec::new());
    for client in clients {
        match Client::try_from(client) {
            Ok(client) => parsed.push(client),
            Err(refusal) => refused.push(refusal.uid),
        }
    }
    parsed.iter().for_each(check_client);
    let update = match removed {
        None => Update::All(parsed),
        Some(removed) => Update::Change(parsed, removed.into_iter().chain(refused).collect()),
    };
    let (before, version) = (registry.owners().clone(), registry.version());
    let Ok(_) = registry.update(node, stream, update) else {
        assert_eq!((registry.owners(), registry.version()), (&before, version));
        return;
    };
    check(registry, node, &before);
    assert!(registry.version() != version || *registry.owners() == before);
}

fn check_client(client: &Client) {
    assert!((1..=128).contains(&client.uid.len()));
    assert!(is_dns_label(&client.namespace) && is_object_name(&client.name));
    assert!(!client.addresses.is_empty());
    assert!(client.addresses.iter().all(|it| it == it.to_canonical() && is_reachable(it)));
}

/// What a node program may and may not bring about.
fn check(registry: &Registry, node: &str, before: &BTreeMap<IpAddr, Owner>) {
    let (owners, facts) = (registry.owners(), facts());
    for (address, owner) in owners {
        assert!(owner.client.addresses.iter().any(|it| it == *address) && *address != OWN);
        assert!(facts.is_of(&owner.node, *address) && facts.allows(&owner.client.namespace));
        assert!(!registry.adopted().contains(address));
    }
    for (address, owner) in before.iter().filter(|(_, owner)| owner.node != node) {
        assert_eq!(owners.get(address), Some(owner), "what another Node has stays");
    }
    for node in NODES {
        let uids: std::collections::BTreeSet<&str> =
            owners.values().filter(|owner| owner.node == node).map(|it| it.client.uid.as_str()).collect();
        assert!(uids.len() <= MAX_PER_NODE);
        for refusal in registry.refusals(node) {
            assert!(!uids.contains(refusal.uid.as_str()), "refused and accepted: {refusal:?}");
            assert_eq!(refusal.to_wire().uid, refusal.uid);
        }
    }
}

/// What a node program may believe of source addresses.
fn check_holds(answer: &RegisterResponse) {
    let now = Instant::now();
    if let Ok(holds) = holds::read(&answer.held, now) {
        assert!(holds.len() <= answer.held.len() && holds.len() <= 256);
        assert!(holds.values().all(|hold| now < hold.until && hold.until <= now + Duration::from_secs(5)));
    }
}
