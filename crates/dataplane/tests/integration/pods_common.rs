//! A host and its pods as network namespaces, for the tests of pod links.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;

use fairlead_dataplane::pods::{self, Error, PodLinks, PodSpec};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::{routes, uplink};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{RouteSocket, VethEnd, add_veth, set_up};
use testbed_netns::sh_in;

pub(crate) const NODE: &str = "192.0.2.10";
pub(crate) const NODE_V6: &str = "2001:db8::10";

/// A network namespace that is the host, with an uplink that has the node's addresses.
pub(crate) struct Host {
    pub(crate) netns: Netns,
    pub(crate) network: Netns,
}

impl Host {
    pub(crate) fn new() -> Self {
        Self::make(true)
    }

    /// One on which IPv6 is disabled.
    pub(crate) fn without_ipv6() -> Self {
        Self::make(false)
    }

    fn make(ipv6: bool) -> Self {
        let (netns, network) = (Netns::create().unwrap(), Netns::create().unwrap());
        let mut socket = RouteSocket::open_in(&netns).unwrap();
        let end = |name| VethEnd { name, mac: None, mtu: None, group: 0 };
        socket.apply(&[set_up(1, true), add_veth(&end("uplink"), &end("far"), network.as_fd())]).unwrap();
        let host = Self { netns, network };
        host.sh("ip link set uplink up");
        host.sh(&format!("ip addr add {NODE}/24 dev uplink"));
        if ipv6 {
            host.sh(&format!("ip addr add {NODE_V6}/64 dev uplink nodad"));
        } else {
            host.sh("for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do test ! -e $file || echo 1 >$file; done");
        }
        host.at(|| uplink::enable_forwarding().unwrap());
        host.at(|| routes::ensure_rules(&routes::pod_rules(RoutingIds::default())).unwrap());
        host
    }

    pub(crate) fn at<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.netns.run(work).unwrap()
    }

    pub(crate) fn sh(&self, command: &str) -> String {
        sh_in(&self.netns, command)
    }

    pub(crate) fn add(&self, spec: &PodSpec) -> Result<PodLinks, Error> {
        self.at(|| pods::add(spec))
    }

    pub(crate) fn table(&self, family: &str) -> String {
        self.sh(&format!("ip {family} route show table 116"))
    }
}

/// One packet, one chance, and time only to bound a failure.
pub(crate) fn ping(from: &Netns, to: &str) {
    sh_in(from, &format!("ping -c 1 -W 10 {to}"));
}

pub(crate) fn spec(pod: &Netns, container_id: &str, ipv4: Option<&str>, ipv6: Option<&str>) -> PodSpec {
    PodSpec {
        container_id: container_id.to_owned(),
        ifname: "eth0".to_owned(),
        netns: PathBuf::from(format!("/proc/self/fd/{}", pod.as_fd().as_raw_fd())),
        pool: "default".to_owned(),
        addresses: [ipv4, ipv6].into_iter().flatten().map(|text| text.parse().unwrap()).collect(),
        mtu: Some(1400),
        link_name: None,
        ids: RoutingIds::default(),
    }
}

pub(crate) fn links(netns: &Netns) -> usize {
    RouteSocket::open_in(netns).unwrap().links_of_kind("veth").unwrap().len()
}
