//! Independent programs inspect the mesh: `wg`, `nft`, `ip`, `kubectl` and an HTTP client must see what the seeds
//! describe, and what `fairlead status` says. One world; the steps follow each other.

mod command_line;
mod http;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::{Result, ensure};
use fairlead_demo::World;
use fairlead_demo::cni::Pod;
use fairlead_demo::node::Node;
use fairlead_demo::objects::{PEERS, POOLS};
use ipnet::IpNet;
use serde_json::Value;

use crate::monitor::Monitors;
use crate::outage;
use crate::outage::{TIMEOUT, node, pod};

/// The first rule of the seed, narrowed to what WireGuard and the node program send.
const OWN_PACKETS: [&str; 2] = [
    "meta mark 0x00000020 accept",
    "meta mark & 0x00000020 == 0x00000020 udp sport 51820 meta mark set meta mark | 0x00000060 accept",
];

/// Time for which the mesh must be quiet.
const QUIET: Duration = Duration::from_secs(15);
/// Seed 000, at its end, word for word.
const SEED_RULES: [&str; 2] = [
    "ip daddr @kubespan_targets_ipv4 meta mark set meta mark & 0xffffffdf | 0x00000040 accept",
    "ip6 daddr @kubespan_targets_ipv6 meta mark set meta mark & 0xffffffdf | 0x00000040 accept",
];

#[test]
fn independent_programs_see_what_was_promised() {
    let mut world = outage::mesh();
    all_nodes_are_up(&world);
    for name in ["home-2", "cloud-1"] {
        let (node, pod) = (node(&world, name), pod(&world, name));
        wg_agrees_with_status(node);
        the_key_file_is_private(node);
        nft_has_the_lines_of_the_seed(node);
        rules_lead_to_the_tables(node);
        tables_have_pods_blocks_and_the_mesh(&world, node, pod);
        the_link_names_its_pod(node, pod);
        a_pod_has_the_routes_of_the_seed(pod);
        http::metrics_and_health_are_served(node);
    }
    command_line::kubectl_shows_columns(&world);
    command_line::status_exits_with_its_codes(&world);
    command_line::the_graph_is_one_for_graphviz(&world);
    an_unchanged_mesh_changes_nothing(&world);
    a_pod_that_goes_takes_its_link_along(&mut world);
}

/// Waits until nodes and controller have nothing more to say.
fn all_nodes_are_up(world: &World) {
    world
        .wait_for(TIMEOUT, |world| {
            for peer in world.plane.get(PEERS)?["items"].as_array().into_iter().flatten() {
                let status = &peer["status"];
                ensure!(status["connected"] == true && status["natType"].is_string(), "{status:#}");
            }
            let pool = world.plane.get(&format!("{POOLS}/default"))?;
            ensure!(pool["status"]["blocks"] == 6, "{pool:#}");
            for node in &world.nodes {
                let status = node.status()?;
                let peers = status["peers"].as_array().cloned().unwrap_or_default();
                ensure!(peers.len() == 5 && peers.iter().all(|peer| peer["state"] == "up"), "{status:#}");
            }
            Ok(())
        })
        .unwrap();
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn json(node: &Node, command: &str) -> Vec<Value> {
    let text = node.host.shell(command).unwrap();
    // `ip -j` prints nothing at all for an empty table.
    if text.trim().is_empty() { Vec::new() } else { serde_json::from_str(&text).unwrap() }
}

fn wg_agrees_with_status(node: &Node) {
    let text = node.host.shell("wg show wire_kube").unwrap();
    println!("--- {}: wg show wire_kube\n{text}", node.name);
    for line in ["interface: wire_kube", "  listening port: 51820", "  fwmark: 0x20"] {
        assert!(text.lines().any(|found| found == line), "{line:?} is missing:\n{text}");
    }
    assert_eq!(text.matches("persistent keepalive: every 25 seconds").count(), 5, "{text}");
    assert_eq!(text.matches("latest handshake: ").count(), 5, "{text}");

    let status = node.status().unwrap();
    assert_eq!(status["interface"], "wire_kube");
    assert_eq!(status["listenPort"], 51820);
    let dump = node.host.shell("wg show wire_kube dump").unwrap();
    let mut lines = dump.lines().map(|line| line.split('\t').collect::<Vec<_>>());
    assert_eq!(lines.next().unwrap()[1..], [status["publicKey"].as_str().unwrap(), "51820", "0x20"]);
    // Public key, preshared key, endpoint, prefixes, handshake, received, sent, keepalive (wg(8)).
    let by_key: BTreeMap<&str, Vec<&str>> = lines.map(|line| (line[0], line)).collect();
    let peers = status["peers"].as_array().unwrap();
    assert_eq!(by_key.len(), peers.len());
    for peer in peers {
        let line = &by_key[peer["publicKey"].as_str().unwrap()];
        assert_eq!(line[2], peer["endpoint"].as_str().unwrap(), "{peer}");
        let allowed: BTreeSet<String> = line[3].split(',').map(str::to_owned).collect();
        assert_eq!(allowed, texts(&peer["prefixes"]).into_iter().collect(), "{peer}");
        assert!(line[4].parse::<u64>().unwrap() > 0, "no handshake: {line:?}");
        assert!(peer["handshakeAgeSeconds"].as_f64().is_some_and(|age| age < 3600.0), "{peer}");
        assert!(peer["rxBytes"].as_u64().unwrap() > 0 && peer["txBytes"].as_u64().unwrap() > 0, "{peer}");
        assert_eq!(line[7], "25");
    }
}

fn the_key_file_is_private(node: &Node) {
    let path = node.directory.join("state/wireguard.key");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let public = node.host.shell(&format!("wg pubkey < {}", path.display())).unwrap();
    assert_eq!(public.trim(), node.status().unwrap()["publicKey"]);
}

fn nft_has_the_lines_of_the_seed(node: &Node) {
    let text = node.host.shell("nft list table inet talos_kubespan").unwrap();
    println!("--- {}: nft list table inet talos_kubespan\n{text}", node.name);
    let chains = [
        ("kubespan_prerouting", "type filter hook prerouting priority filter; policy accept;"),
        ("kubespan_outgoing", "type route hook output priority filter; policy accept;"),
    ];
    for (name, hook) in chains {
        let (_, rest) = text.split_once(&format!("chain {name} {{")).expect(name);
        let (body, _) = rest.split_once('}').unwrap();
        let mut lines = body.lines().map(str::trim).filter(|line| !line.is_empty());
        assert_eq!(lines.next(), Some(hook));
        // Beside the seed's: segments that fit the mesh, what stays on this host or its link, and answers past the mesh.
        let stays = [
            r#"oifname "lo" fib daddr type local accept"#,
            "icmpv6 type 133-137 accept",
            "ct direction reply ip saddr != @fairlead_own_ipv4 ct original ip daddr != @fairlead_own_ipv4 ct original ip daddr != @kubespan_targets_ipv4 meta mark set meta mark | 0x00000060 accept",
            "ct direction reply ip6 saddr != @fairlead_own_ipv6 ct original ip6 daddr != @fairlead_own_ipv6 ct original ip6 daddr != @kubespan_targets_ipv6 meta mark set meta mark | 0x00000060 accept",
        ];
        let own = |line: &&str| line.contains(" tcp option maxseg ") || stays.contains(line);
        let rules: Vec<&str> = lines.filter(|line| !own(line)).collect();
        let past_the_mesh = |line: &&&str| line.contains(" tcp dport ") || line.contains(" tcp sport ");
        let api_server: Vec<&str> = rules.iter().filter(past_the_mesh).copied().collect();
        only_nodes_pass_to_the_api_server(&api_server, name == "kubespan_outgoing");
        let rules: Vec<&str> = rules.iter().filter(|line| !past_the_mesh(line)).copied().collect();
        // Only this host sends WireGuard's packets; elsewhere the mark is another program's.
        let own: &[&str] = if name == "kubespan_outgoing" { &OWN_PACKETS } else { &[] };
        let expected: Vec<&str> = own.iter().chain(&SEED_RULES).copied().collect();
        assert_eq!(rules, expected, "{name}");
    }
    // A third one gives packets of this host sources that peers accept, and a fourth one marks what comes past the mesh.
    assert_eq!(text.matches("\tchain ").count(), 4, "{text}");
    assert!(
        text.contains("\tchain fairlead_sources ") && text.contains("\tchain fairlead_arriving "),
        "{text}"
    );
    assert_eq!(text.matches("\tset kubespan_targets_").count(), 2, "{text}");
    // Other nodes have addresses of both families.
    assert_eq!(text.matches("\tset fairlead_nodes_").count(), 2, "{text}");
    let status = node.status().unwrap();
    let prefixes = status["peers"].as_array().unwrap().iter().flat_map(|peer| texts(&peer["prefixes"]));
    let prefixes: Vec<IpNet> = prefixes.map(|text| text.parse().unwrap()).collect();
    for (set, ipv4) in [("kubespan_targets_ipv4", true), ("kubespan_targets_ipv6", false)] {
        let of_family = prefixes.iter().filter(|net| net.addr().is_ipv4() == ipv4);
        let expected = union(of_family.map(|net| (number(net.network()), number(net.broadcast()))));
        assert_eq!(union(elements(node, set).into_iter()), expected, "{set} of {}", node.name);
        assert!(!expected.is_empty());
    }
}

/// A node's own connections to the API server, and its answers to nodes, do not need the mesh that they build.
fn only_nodes_pass_to_the_api_server(lines: &[&str], expected: bool) {
    if !expected {
        assert!(lines.is_empty(), "{lines:?}");
        return;
    }
    let marked = " meta mark set meta mark | 0x00000060 accept";
    let endpoint = lines[0].strip_prefix("ip daddr ").and_then(|rest| rest.strip_suffix(marked)).unwrap();
    let (address, port) = endpoint.split_once(" tcp dport ").unwrap();
    let answers = format!("ip saddr {address} tcp sport {port} ip daddr @fairlead_nodes_ipv4 accept");
    assert_eq!(lines[1..], [answers], "{lines:?}");
}

/// Elements of a set, each as first and last address.
fn elements(node: &Node, set: &str) -> Vec<(u128, u128)> {
    let text = node.host.shell(&format!("nft -j list set inet talos_kubespan {set}")).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    let address = |value: &Value| value.as_str().unwrap().parse::<IpAddr>().unwrap();
    let element = |element: &Value| {
        if let Some(range) = element["range"].as_array() {
            return (number(address(&range[0])), number(address(&range[1])));
        }
        if let Some(prefix) = element["prefix"].as_object() {
            let length = u8::try_from(prefix["len"].as_u64().unwrap()).unwrap();
            let net = IpNet::new(address(&prefix["addr"]), length).unwrap();
            return (number(net.network()), number(net.broadcast()));
        }
        (number(address(element)), number(address(element)))
    };
    let sets =
        answer["nftables"].as_array().unwrap().iter().filter_map(|object| object["set"]["elem"].as_array());
    sets.flatten().map(element).collect()
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

/// The same addresses in as few ranges as possible: how they are split does not matter.
fn union(ranges: impl Iterator<Item = (u128, u128)>) -> Vec<(u128, u128)> {
    let mut sorted: Vec<(u128, u128)> = ranges.collect();
    sorted.sort_unstable();
    let mut whole: Vec<(u128, u128)> = Vec::new();
    for (first, last) in sorted {
        match whole.last_mut() {
            Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
            _ => whole.push((first, last)),
        }
    }
    whole
}

fn rules_lead_to_the_tables(node: &Node) {
    for family in ["-4", "-6"] {
        let rules = node.host.shell(&format!("ip {family} rule")).unwrap();
        for rule in [
            "2000:\tfrom all lookup 116",
            "32500:\tfrom all fwmark 0x40/0x60 lookup 180",
            "32800:\tfrom all fwmark 0/0x60 lookup 180 suppress_prefixlength 0",
        ] {
            let found = rules.lines().filter(|line| line.strip_suffix(" proto 30").unwrap_or(line) == rule);
            assert_eq!(found.count(), 1, "{rule:?} in ip {family} rule:\n{rules}");
        }
    }
}

/// Destination, device and protocol of the routes of a table that are of a kind, in both families.
fn routes(node: &Node, table: u32, kind: &str) -> BTreeSet<(String, String, String)> {
    let list = |family| json(node, &format!("ip -j {family} route show table {table} type {kind}"));
    let listed = ["-4", "-6"].map(list);
    let text = |route: &Value, key: &str| route[key].as_str().unwrap_or_default().to_owned();
    let route = |route: Value| {
        assert!(route.get("gateway").is_none(), "{route}");
        (text(&route, "dst"), text(&route, "dev"), text(&route, "protocol"))
    };
    listed.into_iter().flatten().map(route).collect()
}

fn tables_have_pods_blocks_and_the_mesh(world: &World, node: &Node, pod: &Pod) {
    for family in ["-4", "-6"] {
        let mesh = node.host.shell(&format!("ip {family} route show table 180")).unwrap();
        let is_default = |route: &&str| route.contains("default ");
        let (defaults, others): (Vec<&str>, Vec<&str>) = mesh.lines().partition(is_default);
        // Elsewhere the kernel finds the default route before packets of this host are marked.
        let has_default = !node.host.shell(&format!("ip {family} route show default")).unwrap().is_empty();
        assert_eq!(others.is_empty(), has_default, "{mesh}");
        assert!(others.iter().all(|route| route.contains(" dev wire_kube proto 30 ")), "{mesh}");
        // While the device is away, what is marked for it must not follow the main table.
        let [device, unreachable] = defaults[..] else { panic!("{mesh}") };
        assert!(device.starts_with("default dev wire_kube "), "{mesh}");
        assert!(unreachable.starts_with("unreachable default "), "{mesh}");
    }
    let pods = routes(node, 116, "unicast");
    let destinations: Vec<&str> = pods.iter().map(|(destination, ..)| destination.as_str()).collect();
    let mut addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
    addresses.sort();
    // `ip` leaves out the /32 and the /128 of a host route.
    assert_eq!(destinations, addresses, "{pods:?}");
    assert!(
        pods.iter().all(|(_, device, protocol)| device.starts_with("veth") && protocol == "30"),
        "{pods:?}"
    );

    let selector = format!("coil.cybozu.com/node={}", node.name);
    let listed = world.plane.kubectl(&["get", "addressblocks", "-l", &selector, "-o", "json"]).unwrap();
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let blocks: BTreeSet<(String, String, String)> = listed["items"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|block| [block["ipv4"].as_str(), block["ipv6"].as_str()])
        .flatten()
        .map(|prefix| (prefix.to_owned(), "lo".to_owned(), "30".to_owned()))
        .collect();
    assert!(blocks.len() >= 2);
    assert_eq!(routes(node, 119, "unicast"), blocks);
    let prefixes = |routes: BTreeSet<(String, String, String)>| {
        routes.into_iter().map(|(destination, ..)| destination).collect::<BTreeSet<_>>()
    };
    // Set after the table for routing daemons, by another task.
    let expected = prefixes(blocks);
    let is_refused = || {
        let refused = prefixes(routes(node, 116, "unreachable"));
        ensure!(refused == expected, "{}: refused {refused:?}, not {expected:?}", node.name);
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, is_refused).unwrap();
}

/// The node's link of a pod: that to which table 116 leads.
fn link_of(node: &Node, pod: &Pod) -> Option<String> {
    let address = pod.addresses[0].to_string();
    routes(node, 116, "unicast")
        .into_iter()
        .find(|(destination, ..)| *destination == address)
        .map(|(_, device, _)| device)
}

fn the_link_names_its_pod(node: &Node, pod: &Pod) {
    let link = link_of(node, pod).unwrap();
    let shown = json(node, &format!("ip -j -d link show dev {link}"));
    assert_eq!(shown[0]["ifalias"], format!("COIL:default:{}:eth0", pod.container.id));
}

fn a_pod_has_the_routes_of_the_seed(pod: &Pod) {
    let routes = pod.namespace.shell("ip route").unwrap();
    let mut lines: Vec<&str> = routes.lines().map(str::trim).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["169.254.1.1 dev eth0 scope link", "default via 169.254.1.1 dev eth0"]);
    let routes = pod.namespace.shell("ip -6 route").unwrap();
    let default: Vec<&str> = routes.lines().filter(|line| line.starts_with("default ")).collect();
    assert!(matches!(default[..], [line] if line.starts_with("default via fe80::1 dev eth0 ")), "{routes}");
    assert_eq!(pod.namespace.shell("ip -6 addr show tentative").unwrap(), "");
    let addresses = pod.namespace.shell("ip -o addr show dev eth0 scope global").unwrap();
    for address in &pod.addresses {
        let length = if address.is_ipv4() { 32 } else { 128 };
        assert!(addresses.contains(&format!(" {address}/{length} ")), "{address}: {addresses}");
    }
}

fn netlink_changes(world: &World) -> Result<Vec<(String, u64)>> {
    let of = |node: &Node| {
        let changes = node.status()?["netlinkChanges"].as_u64();
        Ok((node.name.clone(), changes.ok_or_else(|| anyhow::anyhow!("{} counts nothing", node.name))?))
    };
    world.nodes.iter().map(of).collect()
}

/// The kernel itself reports no change of any node, and the node programs count none.
fn an_unchanged_mesh_changes_nothing(world: &World) {
    let mut monitors: Vec<Monitors> = world.nodes.iter().map(|node| Monitors::start(world, node)).collect();
    let before = netlink_changes(world).unwrap();
    std::thread::sleep(QUIET);
    let after = netlink_changes(world).unwrap();
    println!("netlink messages that changed something since the start: {after:?}");
    assert_eq!(after, before, "a quiet mesh sent something in {QUIET:?}");
    monitors.iter_mut().for_each(Monitors::saw_nothing);
}

fn a_pod_that_goes_takes_its_link_along(world: &mut World) {
    let pod = world.start_pod("short-lived", "home-2").unwrap().clone();
    let node = node(world, "home-2");
    let used = outage::used(node);
    let link = link_of(node, &pod).unwrap();
    the_link_names_its_pod(node, &pod);

    node.plugin().unwrap().del(&pod.container).unwrap();
    assert!(node.host.shell(&format!("ip link show dev {link}")).is_err(), "{link} is still there");
    assert_eq!(link_of(node, &pod), None);
    assert_eq!(pod.namespace.shell("ip -o link show type veth").unwrap(), "", "the pod kept its end");
    assert_eq!(outage::used(node), used - 1);
    node.plugin().unwrap().del(&pod.container).unwrap();
    assert_eq!(outage::used(node), used - 1);

    let other = self::pod(world, "home-2");
    assert!(link_of(node, other).is_some(), "the other pod of the node lost its route");
}
