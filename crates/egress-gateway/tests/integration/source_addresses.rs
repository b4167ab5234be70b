//! A gateway that holds source addresses, with real packets: others are played by changes of the Leases.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::bed::{Bed, families};

const FLOATING: [&str; 2] = ["198.51.100.7", "2001:db8:7::7"];

fn floating() -> [IpAddr; 2] {
    FLOATING.map(|text| text.parse().unwrap())
}

/// With an Egress that has source addresses, and their Leases.
fn bed() -> Bed {
    let bed = Bed::new();
    bed.router.sh("ip route add 198.51.100.7 via 10.20.50.1; ip -6 route add 2001:db8:7::7 via fd00:50::1");
    bed.server
        .sh("ip route add 198.51.100.7 via 203.0.113.1; ip -6 route add 2001:db8:7::7 via 2001:db8:113::1");
    let lease = |name: &str, addresses: Option<String>| {
        let annotations = addresses.map(|it| json!({ "egress.coil.cybozu.com/source-addresses": it }));
        json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {},
            "metadata": { "name": name, "namespace": "internet-egress", "resourceVersion": "1",
                "annotations": annotations.unwrap_or_else(|| json!({})) } })
    };
    let mut objects = bed.objects.lock().unwrap();
    objects.push(("leases", lease("nat-gateways", None)));
    objects.push(("leases", lease("nat-source-0", Some(FLOATING.join(",")))));
    for (_, object) in objects.iter_mut().filter(|(of, _)| *of == "egresses") {
        object["spec"]["sourceAddresses"] = json!(FLOATING);
        object["status"] = json!({ "sourceAddresses": [{ "addresses": FLOATING }] });
    }
    drop(objects);
    bed
}

fn spec(bed: &Bed) -> Value {
    let objects = bed.objects.lock().unwrap();
    let lease = objects.iter().find(|(_, object)| object["metadata"]["name"] == "nat-source-0");
    lease.unwrap().1["spec"].clone()
}

/// Another gateway has taken the slot.
fn give_to(bed: &Bed, holder: &str, term: u32) {
    let mut objects = bed.objects.lock().unwrap();
    let lease = objects.iter_mut().find(|(_, object)| object["metadata"]["name"] == "nat-source-0");
    let lease = &mut lease.unwrap().1;
    lease["spec"] = json!({ "holderIdentity": holder, "leaseTransitions": term });
    lease["metadata"]["resourceVersion"] = json!((1000 + term).to_string());
}

/// Source of a new flow of the client, as the server sees it, in each family.
fn seen(bed: &Bed) -> [Option<IpAddr>; 2] {
    families().map(|family| bed.flow(family.server).seen_as())
}

fn until_held(bed: &Bed, limit: Duration) -> Duration {
    bed.wait("the source address", limit, || seen(bed) == floating().map(Some))
}

#[test]
fn new_flows_have_the_address_that_the_gateway_holds_until_its_program_is_stuck() {
    let mut bed = bed();
    let _node = bed.registered();
    println!("held after {:?}", until_held(&bed, Duration::from_secs(20)));
    // Flows of before have the gateway's own address, and their ports may come again.
    bed.gateway.sh("conntrack -F 2>/dev/null");
    assert_eq!(
        (&spec(&bed)["holderIdentity"], &spec(&bed)["leaseTransitions"]),
        (&json!("nat-1"), &json!(1))
    );
    assert_eq!(bed.metric("coil_egress_held_source_slots"), 1);
    assert_eq!(bed.metric("coil_egress_source_slots_taken_total{cause=\"free\"}"), 1);
    let flows = families().map(|family| bed.flow(family.server));
    assert!(flows.iter().zip(floating()).all(|(flow, address)| flow.seen_as() == Some(address)));

    bed.signal("STOP");
    thread::sleep(Duration::from_millis(2000));
    assert_eq!((seen(&bed), flows.each_ref().map(|flow| flow.seen_as())), ([None; 2], [None; 2]));
    bed.signal("CONT");
    until_held(&bed, Duration::from_secs(10));
    assert!(flows.iter().zip(floating()).all(|(flow, address)| flow.seen_as() == Some(address)));
    // A busy machine shows metrics that are some seconds old.
    bed.wait("the metric", Duration::from_secs(10), || {
        bed.metric("coil_egress_nftables_not_held_packets_total{protocol=\"ipv4\",direction=\"out\"}") > 0
    });

    // A restart keeps slot and term, and the kernel goes on meanwhile.
    bed.kill();
    assert_eq!(seen(&bed), floating().map(Some));
    bed.start();
    bed.wait_ready();
    until_held(&bed, Duration::from_secs(5));
    assert_eq!(spec(&bed)["leaseTransitions"], 1);
    bed.wait("the metric", Duration::from_secs(10), || {
        bed.metric("coil_egress_source_slots_taken_total{cause=\"restart\"}") == 1
    });

    for _ in 0..5 {
        bed.gateway.sh("nft flush ruleset");
        until_held(&bed, Duration::from_secs(3));
    }
    assert_eq!(bed.leaked(), 0);
}

#[test]
fn a_gateway_without_a_slot_is_a_standby_until_the_holder_is_silent_and_releases_at_its_end() {
    let mut bed = bed();
    let _node = bed.registered();
    until_held(&bed, Duration::from_secs(20));
    give_to(&bed, "nat-2", 7);
    bed.wait("standby", Duration::from_secs(8), || seen(&bed) == [None; 2]);
    let taken = until_held(&bed, Duration::from_secs(8));
    println!("taken {taken:?} after the first flow without it");
    assert_eq!(
        (&spec(&bed)["holderIdentity"], &spec(&bed)["leaseTransitions"]),
        (&json!("nat-1"), &json!(8))
    );
    assert_eq!(bed.metric("coil_egress_source_slots_taken_total{cause=\"failure\"}"), 1);

    bed.terminate();
    let ended = (0..400).any(|_| {
        thread::sleep(Duration::from_millis(100));
        bed.has_ended()
    });
    assert!(ended, "after 40 s");
    assert_eq!(spec(&bed)["holderIdentity"], Value::Null);
    assert_eq!(bed.leaked(), 0);
}

#[test]
fn copies_of_connections_go_with_the_source_addresses_of_the_egress() {
    let bed = bed();
    let _node = bed.registered();
    until_held(&bed, Duration::from_secs(20));
    let copies = || {
        let list = |family: &str, address: &str| {
            bed.gateway.sh(&format!("conntrack -L -f {family} --reply-dst {address} 2>/dev/null"))
        };
        [list("ipv4", FLOATING[0]), list("ipv6", FLOATING[1])].map(|text| text.lines().count())
    };
    assert!(copies().iter().all(|count| *count > 0));
    // Another one takes it again and again: it would lose it to this one by its silence.
    let mut terms = (7..).step_by(10);
    let mut wait = |what: &str, is_so: &dyn Fn() -> bool| {
        let mut given = Instant::now();
        give_to(&bed, "nat-2", terms.next().unwrap());
        bed.wait(what, Duration::from_secs(10), || {
            if given.elapsed() > Duration::from_secs(1) {
                given = Instant::now();
                give_to(&bed, "nat-2", terms.next().unwrap());
            }
            is_so()
        });
    };
    wait("copies", &|| bed.metric("coil_egress_flow_copies") > 0);
    assert!(copies().iter().all(|count| *count > 0));
    let mut objects = bed.objects.lock().unwrap();
    for (_, object) in objects.iter_mut().filter(|(of, _)| *of == "egresses") {
        object["spec"].as_object_mut().unwrap().remove("sourceAddresses");
        object["status"] = json!({});
        object["metadata"]["resourceVersion"] = json!("1001");
    }
    drop(objects);
    wait("the end of the copies", &|| copies() == [0, 0]);
    assert_eq!(bed.metric("coil_egress_flow_copies"), 0);
}
