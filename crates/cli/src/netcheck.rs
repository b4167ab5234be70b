//! `fairlead netcheck`: what the node program knows of the networks it is in.

use std::process::ExitCode;

use fairlead_wire::node::{
    AddressFamily, NetcheckRequest, NetcheckResponse, PortMapping, Relay, StunMapping,
};
use serde_json::{Value, json};

use crate::arguments::queries::NetcheckArguments;
use crate::output::{self, age, milliseconds, or_dash, render, table};
use crate::query::{connect, current_thread};

/// Prints what the node program knows of its networks.
///
/// # Errors
/// The node program does not answer.
pub fn run(query: &NetcheckArguments) -> anyhow::Result<ExitCode> {
    let answer = current_thread(async {
        let answer = connect(&query.socket).await?.netcheck(NetcheckRequest {}).await;
        Ok(answer.map_err(|status| anyhow::anyhow!("{}", status.message()))?.into_inner())
    })?;
    let text = render(query.output, || netcheck_json(&answer), |_| netcheck_table(&answer))?;
    output::print(&text);
    Ok(ExitCode::SUCCESS)
}

/// The answer for scripts: names and types are stable.
fn netcheck_json(answer: &NetcheckResponse) -> Value {
    let mapping = |StunMapping { server, mapped, error }: &StunMapping| json!({ "server": server, "mapped": mapped, "error": error });
    let family = |family: &AddressFamily| {
        json!({
            "family": family.name, "addresses": family.addresses, "natType": family.nat_type, "udp": family.udp,
            "stun": family.mappings.iter().map(mapping).collect::<Vec<_>>(), "seenByPeers": family.seen_by_peers,
        })
    };
    let relay = |it: &Relay| {
        json!({
            "endpoint": it.endpoint, "connected": it.connected, "error": it.error,
            "roundTripSeconds": it.round_trip_seconds,
        })
    };
    json!({
        "node": answer.node,
        "wireguard": answer.wireguard,
        "listenPort": answer.listen_port,
        "udp": answer.udp,
        "natType": answer.nat_type,
        "families": answer.families.iter().map(family).collect::<Vec<_>>(),
        "portMappings": answer.port_mappings.iter().map(port_mapping_json).collect::<Vec<_>>(),
        "relays": answer.relays.iter().map(relay).collect::<Vec<_>>(),
        "uplinkMtu": answer.uplink_mtu,
        "mtu": answer.mtu,
        "nat64Prefixes": answer.nat64_prefixes,
    })
}

fn netcheck_table(answer: &NetcheckResponse) -> String {
    let mut rows = table(&["CHECK", "RESULT"]);
    let mut row = |name: &str, result: String| {
        rows.add_row([name, &result]);
    };
    row("node", format!("{}, wireguard {} on port {}", answer.node, answer.wireguard, answer.listen_port));
    row("UDP", udp(answer));
    row("NAT", if answer.nat_type.is_empty() { "unknown".to_owned() } else { answer.nat_type.clone() });
    for family in &answer.families {
        row(&family.name, addresses(family));
        for StunMapping { server, mapped, error } in &family.mappings {
            let said = if error.is_empty() { format!("sees {mapped}") } else { error.clone() };
            row("", format!("STUN server {server}: {said}"));
        }
        for seen in &family.seen_by_peers {
            row("", format!("peers see {seen}"));
        }
    }
    row("NAT64", nat64(answer));
    if answer.port_mappings.is_empty() {
        row("port mapping", "no gateway answers, or none is asked".to_owned());
    }
    for mapping in &answer.port_mappings {
        row("port mapping", port_mapping(mapping));
    }
    if answer.relays.is_empty() {
        row("relay", "none is used".to_owned());
    }
    for Relay { endpoint, connected, error, round_trip_seconds, .. } in &answer.relays {
        let latency = round_trip_seconds.map(milliseconds).unwrap_or_default();
        let state = if *connected {
            format!("connected  {latency}")
        } else {
            format!("not connected: {}", or_dash(error))
        };
        row("relay", format!("{endpoint}  {state}"));
    }
    row("MTU", format!("{} of the uplink, {} of the mesh", answer.uplink_mtu, answer.mtu));
    format!("{rows}\n")
}

fn udp(answer: &NetcheckResponse) -> String {
    match answer.udp.as_str() {
        "blocked" => "blocked: no STUN server answers, and no peer is reached directly".to_owned(),
        "works" => "works".to_owned(),
        _ if answer.has_path_socket => {
            "unknown: no STUN server was asked, and no peer is reached directly".to_owned()
        }
        _ => "unknown: this WireGuard device can ask no STUN server".to_owned(),
    }
}

fn nat64(answer: &NetcheckResponse) -> String {
    if answer.nat64_prefixes.is_empty() {
        return "none; one is looked for where there is no IPv4 default route".to_owned();
    }
    format!("IPv4 through {}", answer.nat64_prefixes.join(" "))
}

fn addresses(family: &AddressFamily) -> String {
    if family.addresses.is_empty() {
        return "no address".to_owned();
    }
    let nat = if family.nat_type.is_empty() { String::new() } else { format!("  NAT {}", family.nat_type) };
    format!("{}{nat}", family.addresses.join(" "))
}

/// A port mapping for scripts, as `fairlead status` has it too.
pub(crate) fn port_mapping_json(it: &PortMapping) -> Value {
    json!({
        "gateway": it.gateway, "protocol": it.protocol, "external": it.external, "error": it.error,
        "lifetimeSeconds": it.lifetime_seconds,
    })
}

fn port_mapping(mapping: &PortMapping) -> String {
    let PortMapping { gateway, protocol, external, error, lifetime_seconds } = mapping;
    if !error.is_empty() {
        return format!("{gateway}: {error}");
    }
    let lifetime = lifetime_seconds.map(|seconds| age(i64::try_from(seconds).unwrap_or(i64::MAX)));
    let lifetime = lifetime.map(|lifetime| format!(" for {lifetime}, renewed")).unwrap_or_default();
    format!("{gateway}: {external} by {protocol}{lifetime}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> NetcheckResponse {
        let mapping = |server: &str, mapped: &str, error: &str| StunMapping {
            server: server.to_owned(),
            mapped: mapped.to_owned(),
            error: error.to_owned(),
        };
        let ipv4 = AddressFamily {
            name: "IPv4".to_owned(),
            nat_type: "cone".to_owned(),
            addresses: vec!["192.168.1.10:51820".to_owned()],
            mappings: vec![
                mapping("192.0.2.1:3478", "203.0.113.7:40000", ""),
                mapping("192.0.2.2:3478", "", "no answer"),
            ],
            ..AddressFamily::default()
        };
        let ipv6 = AddressFamily { name: "IPv6".to_owned(), ..AddressFamily::default() };
        NetcheckResponse {
            node: "home-1".to_owned(),
            udp: "works".to_owned(),
            families: vec![ipv4, ipv6],
            port_mappings: vec![PortMapping {
                gateway: "192.168.1.1".to_owned(),
                protocol: "PCP".to_owned(),
                external: "203.0.113.7:51820".to_owned(),
                lifetime_seconds: Some(7200),
                ..PortMapping::default()
            }],
            relays: vec![Relay {
                endpoint: "tcp://relay:3340".to_owned(),
                connected: true,
                round_trip_seconds: Some(0.0123),
                ..Relay::default()
            }],
            uplink_mtu: 1500,
            mtu: 1420,
            nat64_prefixes: vec!["64:ff9b::/96".to_owned()],
            ..NetcheckResponse::default()
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_finding() {
        let text = netcheck_table(&answer());
        for words in [
            "192.168.1.10:51820  NAT cone",
            "STUN server 192.0.2.1:3478: sees 203.0.113.7:40000",
            "STUN server 192.0.2.2:3478: no answer",
            "no address",
            "IPv4 through 64:ff9b::/96",
            "192.168.1.1: 203.0.113.7:51820 by PCP for 120m, renewed",
            "tcp://relay:3340  connected  12.3 ms",
            "1500 of the uplink, 1420 of the mesh",
        ] {
            assert!(text.contains(words), "{words} is not in\n{text}");
        }
        let blocked = NetcheckResponse { udp: "blocked".to_owned(), ..NetcheckResponse::default() };
        let text = netcheck_table(&blocked);
        assert!(text.contains("blocked: no STUN server") && text.contains("none is used"), "{text}");
        let text = netcheck_table(&NetcheckResponse::default());
        assert!(
            text.contains("can ask no STUN server") && text.contains("none; one is looked for"),
            "{text}"
        );
    }

    #[test]
    fn json_has_the_same_with_numbers() {
        let value = netcheck_json(&answer());
        assert_eq!((value["uplinkMtu"].as_u64(), value["mtu"].as_u64()), (Some(1500), Some(1420)));
        assert_eq!(value["families"][0]["stun"][1]["error"], "no answer");
        assert_eq!(value["nat64Prefixes"][0], "64:ff9b::/96");
        assert_eq!(value["portMappings"][0]["lifetimeSeconds"], 7200);
        assert_eq!(value["relays"][0]["roundTripSeconds"], 0.0123);
    }
}
