//! Pods reach a server on the Internet, also from behind a home router, as their node does. Across sites they keep their own
//! addresses. Nothing is fake but the kubelet.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use crate::outage::{TIMEOUT, node, pod};
use anyhow::{Context, Result, ensure};
use fairlead_demo::World;
use fairlead_demo::cni::Pod;
use fairlead_demo::topology::{self, Topology};
use testbed_lab::{Ipv6, Place, Progress};

/// A public node, and one behind a router that translates IPv4 and drops new connections of IPv6 from outside. The router
/// knows no route to pods.
fn dual_stack() -> Topology {
    let mut topology = topology::two_sites();
    topology.sites.iter_mut().for_each(|site| site.ipv6 = Ipv6::Global);
    topology
}

/// The source that a server at `to` sees of a datagram whose answer arrives.
fn source(from: &impl Place, server: &impl Place, to: IpAddr) -> Result<IpAddr> {
    const WAIT: Option<Duration> = Some(Duration::from_secs(3));
    let bind = |address: SocketAddr| {
        let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
        socket.set_read_timeout(WAIT)?;
        Ok::<_, anyhow::Error>(socket)
    };
    let listener = server.inside(|| bind(SocketAddr::new(to, 0)))??;
    let any: SocketAddr = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" }.parse()?;
    let client = from.inside(|| bind(any))??;
    client.send_to(b"question", listener.local_addr()?)?;
    let mut buffer = [0; 16];
    let (_, seen) = listener.recv_from(&mut buffer).with_context(|| format!("nothing arrived at {to}"))?;
    listener.send_to(b"answer", seen)?;
    let (length, _) = client.recv_from(&mut buffer).with_context(|| format!("no answer from {to}"))?;
    ensure!(buffer.get(..length) == Some(b"answer"), "another answer");
    Ok(seen.ip())
}

fn seen_as(world: &World, from: &Pod, server: &impl Place, to: IpAddr, expected: IpAddr) {
    let seen = world.wait_for(TIMEOUT, |_| source(from, server, to)).unwrap();
    assert_eq!(seen, expected, "{} at {to}", from.name);
}

#[test]
fn pods_behind_a_home_router_reach_the_internet_and_keep_their_addresses_across_sites() {
    let mut world = World::start(&dual_stack(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let server = world.lab().dual_stack_site("elsewhere").host("server").unwrap();
    let server_addresses = [IpAddr::from(server.address()), server.address6().unwrap().into()];
    for name in ["cloud-1", "office-1"] {
        let host = &node(&world, name).host;
        let expected = [IpAddr::from(host.public_address()), host.address6().unwrap().into()];
        for (to, expected) in server_addresses.into_iter().zip(expected) {
            seen_as(&world, pod(&world, name), &*server, to, expected);
        }
    }
    let off = r#"{"spec": {"masquerade": false}}"#;
    world.plane.kubectl(&["patch", "wirekubemesh", "default", "--type=merge", "-p", off]).unwrap();
    let cut_off = |to: IpAddr| {
        let answered = source(pod(&world, "office-1"), &*server, to);
        ensure!(answered.is_err(), "{to} still answers");
        Ok(())
    };
    for to in server_addresses {
        world.wait_for(TIMEOUT, |_| cut_off(to)).unwrap();
    }
    for (from, to) in [("office-1", "cloud-1"), ("cloud-1", "office-1")] {
        let (from, to) = (pod(&world, from), pod(&world, to));
        for (own, address) in from.addresses.iter().zip(&to.addresses) {
            seen_as(&world, from, to, *address, *own);
        }
    }
}
