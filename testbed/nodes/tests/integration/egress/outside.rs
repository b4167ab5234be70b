//! The machine outside of the cluster, the routes to gateways, and the count of packets that should not be there.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::OnceLock;

use anyhow::{Context, Result};
use testbed_lab::Host;
use testbed_nodes::Cluster;

pub(crate) use crate::bed::outside::{PORT, ask_by_udp, connect, echoed, run};
use crate::bed::outside::{addresses_of, serve};
use crate::egress::setup::{DOMESTIC, Gateway, INTERNET, gateways};

/// Address of the machine outside in the domestic network.
pub(crate) const IN_DOMESTIC: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 10, 5));

/// A machine on the Internet, and in the domestic network.
pub(crate) struct Outside {
    pub(crate) host: Host,
}

static OUTSIDE: OnceLock<Outside> = OnceLock::new();

/// The one of the cluster, with routes to the gateways that there are now.
pub(crate) fn outside(cluster: &Cluster) -> &'static Outside {
    let outside = OUTSIDE.get_or_init(|| Outside::start(cluster).unwrap());
    for gateways in [INTERNET, DOMESTIC].into_iter().flat_map(|it| gateways(cluster, it)) {
        route_to(cluster, &gateways).unwrap();
    }
    outside
}

impl Outside {
    fn start(cluster: &Cluster) -> Result<Self> {
        let host = cluster.lab().dual_stack_site("outside").host("outside")?;
        host.shell(&format!("ip address add {IN_DOMESTIC}/32 dev lo"))?;
        let address = host.address();
        cluster.lab().internet().shell(&format!(
            "device=$(ip route show {address}/32 | grep -o 'dev [^ ]*')\n\
             ip route replace 192.168.10.0/24 via {address} $device onlink\n{COUNT}"
        ))?;
        let outside = Self { host };
        serve(&outside.host, outside.addresses().into_iter().chain([IN_DOMESTIC]))?;
        Ok(outside)
    }

    /// Public addresses of the machine, IPv4 first.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        addresses_of(&self.host)
    }
}

/// As BGP would announce them: the Internet and the router of the cloud lead packets to the node of each gateway.
pub(crate) fn route_to(cluster: &Cluster, gateways: &[Gateway]) -> Result<()> {
    let cloud = cluster.sites().first().context("no network")?.router();
    let lan6 = cloud.lan6().context("no IPv6 in the cloud")?;
    for gateway in gateways {
        let node = cluster.node(&gateway.node)?;
        for address in &gateway.addresses {
            let same = |other: &&IpAddr| other.is_ipv4() == address.is_ipv4();
            let via = node.addresses().iter().find(same).context("the node has no such address")?;
            let (option, lan) =
                if address.is_ipv4() { ("-4", cloud.lan().to_string()) } else { ("-6", lan6.to_string()) };
            cloud.shell(&format!("ip {option} route replace {address} via {via}"))?;
            let through =
                format!("ip {option} route show {lan} | head -1 | grep -o 'via .*' | sed 's/ metric.*//'");
            cluster
                .lab()
                .internet()
                .shell(&format!("ip {option} route replace {address} $({through}) onlink"))?;
        }
    }
    Ok(())
}

/// Counts packets from or to addresses of pods that are no gateways, on the Internet.
const COUNT: &str = "\
nft add table inet judge
nft 'add chain inet judge forward { type filter hook forward priority -300; }'
nft 'add rule inet judge forward ip saddr 10.64.0.0/16 counter'
nft 'add rule inet judge forward ip daddr 10.64.0.0/16 counter'
nft 'add rule inet judge forward ip6 saddr fd02:fa1e::/112 counter'
nft 'add rule inet judge forward ip6 daddr fd02:fa1e::/112 counter'
";

/// No packet with the address of a client pod was on the Internet so far.
pub(crate) fn no_client_address_was_seen(cluster: &Cluster) {
    let rules = cluster.lab().internet().shell("nft list chain inet judge forward").unwrap();
    let counters: Vec<&str> = rules.lines().filter(|line| line.contains("counter")).collect();
    assert!(counters.len() == 4 && counters.iter().all(|line| line.contains("packets 0 ")), "{rules}");
}
