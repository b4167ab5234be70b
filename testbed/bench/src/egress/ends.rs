//! The ends of tunnels, set up by the code of the node and gateway programs in the network namespace of this process. The kernel keeps
//! them when it ends.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result, bail, ensure};
use fairlead_address::{DualStack, IpFamily};
use fairlead_api::client_routing::{ClientRoute, ClientRouting, ClientRule, Target};
use fairlead_api::fou::{Gateway, Service};
use fairlead_api::names::{FOU_PORT, TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE};
use fairlead_dataplane::egress_client;
use fairlead_dataplane::egress_gateway::SourceTable;
use fairlead_egress_gateway::plane::{Desired, Plane, PlaneSettings, prepare_host};
use fairlead_fou::{Peer, Settings, TunnelLink, Tunnels, link_name};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{RouteSocket, TABLE_MAIN};
use ipnet::IpNet;

/// The word that makes this program set up one end.
pub(crate) const END_COMMAND: &str = "egress-end";
const UPLINK: &str = "eth0";

/// One end; addresses are of IPv4 and IPv6.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// A gateway with one client.
    Gateway { own: [IpAddr; 2], client: [IpAddr; 2] },
    /// A client pod of a Service with one gateway, to which everything outside of private networks goes.
    Client { own: [IpAddr; 2], service: [IpAddr; 2], gateway: [IpAddr; 2] },
    /// One end of a tunnel that has no service, without routes.
    Peer { own: [IpAddr; 2], other: [IpAddr; 2] },
}

impl End {
    /// Command line of this end: [`END_COMMAND`], its name and its addresses.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let (name, addresses) = match self {
            Self::Gateway { own, client } => ("gateway", vec![own, client]),
            Self::Client { own, service, gateway } => ("client", vec![own, service, gateway]),
            Self::Peer { own, other } => ("peer", vec![own, other]),
        };
        let addresses = addresses.into_iter().flatten().map(ToString::to_string);
        [END_COMMAND.to_owned(), name.to_owned()].into_iter().chain(addresses).collect()
    }

    /// The reverse, without [`END_COMMAND`].
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let (name, addresses) = arguments.split_first().context("which end?")?;
        let address = |text: &String| text.parse().with_context(|| format!("{text:?} is no address"));
        let addresses: Vec<IpAddr> = addresses.iter().map(address).collect::<Result<_>>()?;
        Ok(match (name.as_str(), addresses.as_slice()) {
            ("gateway", [a, b, c, d]) => Self::Gateway { own: [*a, *b], client: [*c, *d] },
            ("client", [a, b, c, d, e, f]) => {
                Self::Client { own: [*a, *b], service: [*c, *d], gateway: [*e, *f] }
            }
            ("peer", [a, b, c, d]) => Self::Peer { own: [*a, *b], other: [*c, *d] },
            _ => bail!("{END_COMMAND} is not for {arguments:?}"),
        })
    }

    /// Sets it up in the network namespace of the calling thread.
    pub(crate) fn set_up(&self) -> Result<()> {
        match self {
            Self::Gateway { own, client } => set_up_gateway(own, client),
            Self::Client { own, service, gateway } => set_up_client(*own, *service, *gateway),
            Self::Peer { own, other } => set_up_peer(*own, *other),
        }
    }
}

fn set_up_gateway(own: &[IpAddr], clients: &[IpAddr]) -> Result<()> {
    let settings = PlaneSettings {
        uplink: UPLINK.to_owned(),
        own: own.to_vec(),
        port: FOU_PORT,
        source_port_auto: false,
    };
    let faults = prepare_host(&settings);
    ensure!(faults.is_empty(), "{faults:?}");
    let destinations = [("0.0.0.0/0".parse()?, true), ("::/0".parse()?, true)].into();
    let applied = Plane::open(settings, SourceTable::default())?.apply(&Desired {
        clients: clients.iter().copied().collect(),
        destinations,
        max_connections: None,
        sources: None,
    })?;
    ensure!(applied.refused.is_empty(), "{applied:?}");
    Ok(())
}

fn set_up_client(own: [IpAddr; 2], services: [IpAddr; 2], gateways: [IpAddr; 2]) -> Result<()> {
    let mut tunnels = open()?;
    let (mut links, mut peers, mut sets) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut indexes = BTreeMap::new();
    for ((local, service), gateway) in own.into_iter().zip(services).zip(gateways) {
        let link = tunnels.add_link(service)?;
        indexes.insert(link_name(service), link);
        links.insert(link, TunnelLink { local, remote: Some(service), source_port: Some(FOU_PORT) });
        peers.extend([service, gateway].map(|peer| (peer, Peer::Gateway { link, service })));
        let gateways = vec![Gateway { address: gateway, is_draining: false }];
        sets.insert(service, Service { gateways, by_client: true, ..Service::default() });
    }
    tunnels.set_peers(&peers)?;
    tunnels.set_services(&sets)?;
    tunnels.set_links(&links)?;
    let [ipv4, ipv6] = services.map(routing);
    let routing = DualStack { ipv4: Some(ipv4?), ipv6: Some(ipv6?) };
    egress_client::sync(&Netns::open("/proc/thread-self/ns/net")?, &routing, &indexes)?;
    Ok(())
}

/// The rules of a client pod and its default route into the tunnel.
fn routing(service: IpAddr) -> Result<ClientRouting> {
    let (all, link_local, private): (&str, &str, &[&str]) = match IpFamily::of(service) {
        IpFamily::V4 => ("0.0.0.0/0", "169.254.0.0/16", &["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]),
        IpFamily::V6 => ("::/0", "fe80::/10", &["fc00::/7"]),
    };
    let rule = |priority, destination: &str, table| -> Result<ClientRule> {
        Ok(ClientRule { priority, destination: destination.parse()?, table })
    };
    let mut rules = vec![rule(1800, link_local, TABLE_MAIN)?, rule(1900, all, TABLE_EGRESS_NARROW)?];
    for (priority, prefix) in (2000..).zip(private) {
        rules.push(rule(priority, prefix, TABLE_MAIN)?);
    }
    rules.push(rule(2100, all, TABLE_EGRESS_WIDE)?);
    let destination: IpNet = all.parse()?;
    let route = ClientRoute {
        table: TABLE_EGRESS_WIDE,
        destination,
        target: Target::Link(link_name(service)),
        originating_only: false,
    };
    Ok(ClientRouting { rules, routes: vec![route] })
}

fn set_up_peer(own: [IpAddr; 2], others: [IpAddr; 2]) -> Result<()> {
    let mut tunnels = open()?;
    let (mut links, mut peers) = (BTreeMap::new(), BTreeMap::new());
    for (local, other) in own.into_iter().zip(others) {
        let link = tunnels.add_link(other)?;
        links.insert(link, TunnelLink { local, remote: Some(other), source_port: Some(FOU_PORT) });
        peers.insert(other, Peer::Gateway { link, service: other });
    }
    tunnels.set_links(&links)?;
    Ok(tunnels.set_peers(&peers).map(drop)?)
}

fn open() -> Result<Tunnels> {
    let uplink = RouteSocket::open()?.link_by_name(UPLINK)?.context("there is no eth0")?;
    let settings = Settings { port: FOU_PORT, drop_unknown: false, own: None };
    Ok(Tunnels::open(uplink.index, settings)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_has_words() {
        let pair = |texts: [&str; 2]| texts.map(|text| text.parse().unwrap());
        let (own, other) = (pair(["10.0.0.1", "fd00::1"]), pair(["10.0.0.2", "fd00::2"]));
        for end in [
            End::Gateway { own, client: other },
            End::Client { own, service: other, gateway: own },
            End::Peer { own, other },
        ] {
            let words = end.arguments();
            assert_eq!((words[0].as_str(), End::parse(&words[1..]).unwrap()), (END_COMMAND, end));
        }
        let error = End::parse(&["peer".to_owned(), "10.0.0.1".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("peer"), "{error}");
    }
}
