use super::Kept;
use crate::egress::{
    Change, Client, Clients, Hello, Hold, Refusal, RegisterRequest, RegisterResponse, State, register_request,
};
use crate::egress_peers::{
    Answer, Claim, CopyBegins, CopyEnds, Flow, FlowKey, Flows, FromMember, Heartbeat, Missed, Report,
    ToMember, from_member, to_member,
};

#[test]
fn messages_between_nodes_and_gateways_are_as_they_were() {
    let mut kept = Kept::of("egress.txt");
    let client = Client {
        uid: "uid-1".to_owned(),
        namespace: "shop".to_owned(),
        name: "web-0".to_owned(),
        addresses: vec![vec![10, 244, 1, 7], vec![0xfd; 16]],
    };
    let request = |revision, kind| RegisterRequest { revision, kind: Some(kind) };
    let hello = register_request::Kind::Hello(Hello { token: "token".to_owned() });
    kept.has("RegisterRequest hello", request(1, hello));
    let all = register_request::Kind::All(Clients { clients: vec![client.clone()] });
    kept.has("RegisterRequest all", request(2, all));
    let change =
        register_request::Kind::Change(Change { set: vec![client], removed: vec!["uid-2".to_owned()] });
    kept.has("RegisterRequest change", request(300, change));
    kept.has("RegisterRequest nothing", RegisterRequest { revision: 1, kind: None });
    kept.has(
        "RegisterResponse",
        RegisterResponse {
            revision: 3,
            refused: vec![Refusal {
                uid: "uid-2".to_owned(),
                reason: "AddressInUse".to_owned(),
                message: "10.244.1.7 is that of another client".to_owned(),
            }],
            state: State::Standby.into(),
            held: vec![Hold {
                address: vec![192, 0, 2, 40],
                term: 12,
                valid_milliseconds: 3000,
                settling: true,
            }],
        },
    );
}

#[test]
fn messages_between_gateways_are_as_they_were() {
    let mut kept = Kept::of("egress_peers.txt");
    let to = |kind| ToMember { kind: Some(kind) };
    let heartbeat = Heartbeat {
        sequence: 7,
        claims: vec![Claim { slot: 1, term: 12 }],
        ready: true,
        held: 2,
        unhealthy: true,
        copies: vec![1, 300],
    };
    kept.has("ToMember heartbeat", to(to_member::Kind::Heartbeat(heartbeat)));
    let key = FlowKey {
        protocol: 6,
        client: vec![10, 244, 1, 7],
        server: vec![198, 51, 100, 9],
        client_port: 40_000,
        server_port: 443,
    };
    let flow = Flow {
        key: Some(key.clone()),
        source: vec![192, 0, 2, 40],
        source_port: 40_001,
        status: 0x18e,
        timeout_seconds: 86_400,
        tcp_state: 3,
        tcp_flags_client: 0x23,
        tcp_flags_server: 0x24,
        tcp_scale_client: 7,
        tcp_scale_server: 8,
    };
    let flows = Flows { slot: 1, term: 12, set: vec![flow], removed: vec![key] };
    kept.has("ToMember flows", to(to_member::Kind::Flows(flows)));
    let begins = CopyBegins { slot: 1, term: 12 };
    kept.has("ToMember copy_begins", to(to_member::Kind::CopyBegins(begins)));
    kept.has("ToMember copy_ends", to(to_member::Kind::CopyEnds(CopyEnds { slot: 2, term: 13 })));
    let slots = vec![
        Report { slot: 1, term: 12, promised: true, blocked_milliseconds: Some(0) },
        Report { slot: 2, term: 0, promised: false, blocked_milliseconds: None },
    ];
    let answer = Answer { sequence: 7, ready: true, held: 1, slots, unhealthy: true, copies: vec![2] };
    let from = |kind| FromMember { kind: Some(kind) };
    kept.has("FromMember answer", from(from_member::Kind::Answer(answer)));
    kept.has("FromMember missed", from(from_member::Kind::Missed(Missed { slot: 3 })));
}
