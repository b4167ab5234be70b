//! Replacing the programs of another version, in a namespace.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Mutex, PoisonError};

use fairlead_api::fou::Service;
use fairlead_netlink::route::{FilterHook, RouteSocket};
use ipnet::IpNet;
use testbed_netns::Namespace;

use super::*;

const SETTINGS: Settings = Settings { port: 5555, drop_unknown: true, own: None };

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// IDs of the programs at both hooks of a link.
fn programs(namespace: &Namespace, link: u32) -> Vec<u32> {
    let mut socket = namespace.run(RouteSocket::open).unwrap();
    let hooks = [FilterHook::Egress, FilterHook::Ingress];
    hooks.iter().flat_map(|hook| socket.bpf_filters(link, *hook).unwrap()).map(|it| it.program).collect()
}

/// Desired contents of the links and maps.
struct Wanted {
    links: BTreeMap<u32, TunnelLink>,
    peers: BTreeMap<IpAddr, Peer>,
    services: BTreeMap<IpAddr, Service>,
    allowed: BTreeMap<IpNet, bool>,
}

impl Wanted {
    fn with(link: u32) -> Self {
        let gateway = ip("10.0.0.1");
        let tunnel = TunnelLink { local: ip("10.0.0.2"), remote: Some(gateway), source_port: None };
        let allowed = [("10.0.0.0/8", true), ("10.1.0.0/16", false)];
        Self {
            links: BTreeMap::from([(link, tunnel)]),
            peers: BTreeMap::from([(gateway, Peer::Gateway { link, service: gateway })]),
            services: BTreeMap::from([(gateway, Service::default())]),
            allowed: allowed.into_iter().map(|(text, allowed)| (text.parse().unwrap(), allowed)).collect(),
        }
    }

    /// Number of changes of each kind.
    fn apply(&self, tunnels: &mut Tunnels) -> [usize; 4] {
        [
            tunnels.set_links(&self.links).unwrap(),
            tunnels.set_peers(&self.peers).unwrap(),
            tunnels.set_services(&self.services).unwrap(),
            tunnels.set_allowed(&self.allowed).unwrap(),
        ]
    }
}

/// `changes_sent` counts those of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn programs_of_another_version_are_replaced_and_flows_are_kept() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let namespace = Namespace::new();
    namespace.veth("eth0", &namespace, "other");
    let uplink: u32 = namespace.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap();
    let open =
        |version| namespace.run(|| Tunnels::open_version(uplink, SETTINGS, version, Programs::load)).unwrap();
    let mut first = open(1);
    let link = first.add_link(ip("10.0.0.1")).unwrap();
    let wanted = Wanted::with(link);
    // Of the link the map entry and the filter.
    assert_eq!(wanted.apply(&mut first), [2, 1, 1, 2]);
    let origins = [("0.0.0.0/0", None), ("203.0.113.0/24", Some(ip("10.0.0.1")))];
    let origins: BTreeMap<IpNet, Option<IpAddr>> =
        origins.into_iter().map(|(prefix, service)| (prefix.parse().unwrap(), service)).collect();
    assert_eq!(first.set_origins(&origins).unwrap(), 2);
    first.insert_flow([7; 56], [7; 24]);
    first.insert_flow([0; 56], [9; 24]);
    let flows = first.flows().unwrap();
    assert_eq!(flows.len(), 1, "one has no protocol number");
    drop(first);

    let attached = || [programs(&namespace, uplink), programs(&namespace, link)];
    let before = attached();
    assert_eq!(before.each_ref().map(Vec::len), [2, 1]);
    drop(open(1));
    assert_eq!(attached(), before, "adopted");

    let mut second = open(2);
    let after = attached();
    assert_eq!(after.each_ref().map(Vec::len), [2, 1], "one filter at each hook");
    assert!(after.iter().flatten().all(|id| !before[0].contains(id)), "{before:?} {after:?}");
    assert_eq!(second.flows().unwrap(), flows);
    let sent = fairlead_netlink::changes_sent();
    assert_eq!((wanted.apply(&mut second), second.set_origins(&origins).unwrap()), ([0; 4], 0));
    second.add_link(ip("10.0.0.1")).unwrap();
    drop(second);
    drop(open(2));
    assert_eq!(fairlead_netlink::changes_sent(), sent, "the same state sends nothing");
}

/// Lists of the prefixes of a country are that long, and change.
#[test]
fn ten_thousand_sources_of_gateways_are_replaced_by_as_many_others() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let namespace = Namespace::new();
    namespace.veth("eth0", &namespace, "other");
    let uplink: u32 = namespace.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap();
    let mut tunnels = namespace.run(|| Tunnels::load(uplink, SETTINGS)).unwrap();
    let origins = |first: u8| -> BTreeMap<IpNet, Option<IpAddr>> {
        let prefix = |number: u32| {
            let address = Ipv4Addr::from_bits((u32::from(first) << 24) | (number << 8));
            IpNet::new(address.into(), 24).unwrap()
        };
        (0..10_000).map(|number| (prefix(number), Some(ip("10.0.0.1")))).collect()
    };
    assert_eq!(tunnels.set_origins(&origins(20)).unwrap(), 10_000);
    assert_eq!(tunnels.set_origins(&origins(30)).unwrap(), 20_000);
    assert_eq!(tunnels.set_origins(&origins(30)).unwrap(), 0);
}

#[test]
fn loaded_programs_replace_those_of_an_earlier_process_once_they_are_attached() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let namespace = Namespace::new();
    namespace.veth("eth0", &namespace, "other");
    let uplink: u32 = namespace.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap();
    let load = || namespace.run(|| Tunnels::load(uplink, SETTINGS)).unwrap();
    let mut first = load();
    let link = first.add_link(ip("10.0.0.1")).unwrap();
    let wanted = Wanted::with(link);
    assert_eq!(programs(&namespace, uplink), Vec::<u32>::new());
    assert_eq!(wanted.apply(&mut first), [2, 1, 1, 2]);
    assert_eq!((first.is_attached().unwrap(), first.attach().unwrap()), (false, 2));
    assert_eq!((first.is_attached().unwrap(), first.attach().unwrap()), (true, 0));
    drop(first);
    let before = programs(&namespace, uplink);
    assert_eq!(before.len(), 2);

    let mut second = load();
    assert_eq!(wanted.apply(&mut second), [2, 1, 1, 2], "maps of its own, and the filter of the link");
    assert_eq!(programs(&namespace, uplink), before);
    assert_eq!(second.attach().unwrap(), 2);
    let after = programs(&namespace, uplink);
    assert!(after.len() == 2 && after.iter().all(|id| !before.contains(id)), "{before:?} {after:?}");
    namespace.sh("tc qdisc del dev eth0 clsact");
    assert_eq!((second.is_attached().unwrap(), second.attach().unwrap()), (false, 2));
}

#[test]
fn programs_that_were_loaded_ahead_are_attached_in_any_namespace() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let [mut first, mut second] = [Programs::load().unwrap(), Programs::load().unwrap()].map(Some);
    for loaded in [&mut first, &mut second] {
        let namespace = Namespace::new();
        namespace.veth("eth0", &namespace, "other");
        let uplink: u32 = namespace.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap();
        let ids = loaded.as_ref().unwrap().ids();
        let open = |loaded: Option<Programs>| {
            let settings = Settings { drop_unknown: false, ..SETTINGS };
            namespace.run(|| Tunnels::open_with(uplink, settings, || Ok(loaded.unwrap()))).unwrap()
        };
        let mut tunnels = open(loaded.take());
        assert_eq!(programs(&namespace, uplink), ids);
        let link = tunnels.add_link(ip("10.0.0.1")).unwrap();
        let wanted = Wanted::with(link);
        assert_eq!(wanted.apply(&mut tunnels), [2, 1, 1, 2], "nothing of another namespace is in the maps");
        drop(tunnels);
        // Adopted: none are asked for.
        assert_eq!(wanted.apply(&mut open(None)), [0; 4]);
        assert_eq!(programs(&namespace, uplink), ids);
    }
}
