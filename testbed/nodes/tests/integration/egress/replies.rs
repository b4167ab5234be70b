//! `spec.originatingOnly`: connections that a machine outside opens to a client pod by a NodePort, and those that the pod opens.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed_lab::{ForeignNetwork, Host, Place as _, eventually};
use testbed_nodes::Cluster;

use crate::bed::{Pod, Room, TIMEOUT, network};
use crate::egress::BED;
use crate::egress::outside::{ask_by_udp, connect, no_client_address_was_seen, outside, route_to, run};
use crate::egress::setup::{addresses, client_on, own_egress};

/// Namespace of the Egress.
const NAMESPACE: &str = "replies-egress";
/// The node of the client. Every node that the Internet reaches has a gateway, too.
const NODE: &str = "cloud-2";
/// UDP port of tunnels.
const TUNNELS: u16 = 5555;
/// Longest wait for an answer of the pod, before another connection is tried.
const PATIENCE: Duration = Duration::from_secs(2);

/// A Service of the client pod on a port of its own of each node.
fn node_port(policy: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Service
metadata: {{name: {}}}
spec:
  type: NodePort
  externalTrafficPolicy: {policy}
  ipFamilyPolicy: RequireDualStack
  selector: {{app: client}}
  ports: [{{port: 80, targetPort: 8080}}]
---
",
        policy.to_lowercase()
    )
}

/// The port of the Service of a policy.
fn port_of(room: &Room<'_>, policy: &str) -> u16 {
    let name = policy.to_lowercase();
    room.kubectl(&format!("get service {name} -o jsonpath={{.spec.ports[0].nodePort}}"))
        .unwrap()
        .parse()
        .unwrap()
}

fn open(from: &Host, to: SocketAddr) -> Result<TcpStream> {
    let connection = from.inside(|| TcpStream::connect_timeout(&to, PATIENCE))??;
    connection.set_read_timeout(Some(PATIENCE))?;
    Ok(connection)
}

/// Source address of a connection as the pod reports it.
fn source_of(mut connection: TcpStream) -> Result<IpAddr> {
    connection.write_all(b"GET /clientip HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    let source = answer.lines().last().context("the pod answers nothing")?;
    let source: SocketAddr = source.parse().with_context(|| format!("the pod says {answer:?}"))?;
    Ok(source.ip())
}

fn ask(from: &Host, to: SocketAddr) -> Result<IpAddr> {
    source_of(open(from, to)?)
}

/// Counts in the pod what the machine outside sends to its server, and what goes back by eth0: replies of the server (`replied`), and
/// all else (`in_clear`).
fn count(place: &ForeignNetwork, outside: &[IpAddr]) {
    let of_each = |end: &str, rule: &str| -> String {
        let family = |address: &IpAddr| if address.is_ipv4() { "ip" } else { "ip6" };
        outside.iter().map(|address| format!("{} {end} {address} {rule}\n", family(address))).collect()
    };
    let arrived = of_each("saddr", "tcp dport 8080 counter name arrived");
    let replied = of_each("daddr", "tcp sport 8080 counter name replied accept");
    let in_clear = of_each("daddr", "counter name in_clear");
    let table = format!(
        "table inet judge {{
            counter arrived {{ }}
            counter replied {{ }}
            counter in_clear {{ }}
            chain arriving {{ type filter hook prerouting priority -310; iifname != eth0 accept
            {arrived} }}
            chain leaving {{ type filter hook postrouting priority 300; oifname != eth0 accept
            {replied} {in_clear} }}
        }}"
    );
    run(place, &format!("nft -f - <<'END'\n{table}\nEND")).unwrap();
}

fn counted(place: &ForeignNetwork, counter: &str) -> u64 {
    let listed = run(place, &format!("nft list counter inet judge {counter}")).unwrap();
    let number = listed.split_whitespace().skip_while(|word| *word != "packets").nth(1);
    number.unwrap().parse().unwrap()
}

#[test]
fn connections_to_a_node_port_are_answered_by_eth0_and_the_pods_own_leave_by_its_gateways() {
    let cluster = BED.shared();
    let (_egress, gateways) = own_egress(&cluster, NAMESPACE);
    let outside = outside(&cluster);
    route_to(&cluster, &gateways).unwrap();
    let room = Room::new(&cluster, "replies");
    let pod = client_on(&room, NAMESPACE, NODE);
    room.apply(&(node_port("Local") + &node_port("Cluster"))).unwrap();
    let ports = ["Local", "Cluster"].map(|policy| port_of(&room, policy));
    let place = network(&cluster, &pod);
    count(&place, &outside.addresses());

    goes_unanswered(&cluster, &place, ports);
    let patch = r#"{"spec":{"originatingOnly":true}}"#;
    cluster.kubectl(&["-n", NAMESPACE, "patch", "egress", "nat", "--type=merge", "-p", patch]).unwrap();
    is_answered(&cluster, &pod, ports);
    assert!(counted(&place, "replied") > 0, "the replies left by another link");

    // While connections of the machine outside are open, the pod opens some to the same machine.
    let local = |address: &IpAddr| open(&outside.host, (*address, ports[0]).into()).unwrap();
    let opened: Vec<TcpStream> = cluster.node(NODE).unwrap().addresses().iter().map(local).collect();
    opens_by(&place, &outside.addresses(), &addresses(&gateways));
    for (connection, from) in opened.into_iter().zip(outside.addresses()) {
        assert_eq!(source_of(connection).unwrap(), from);
    }
    println!("{} packets of replies by eth0", counted(&place, "replied"));
    assert_eq!(counted(&place, "in_clear"), 0, "what the pod sends on its own left by eth0");
    no_client_address_was_seen(&cluster);
}

/// Packets with the address of the machine outside are answered through a gateway, which knows no such connection.
fn goes_unanswered(cluster: &Cluster, place: &ForeignNetwork, [local, translated]: [u16; 2]) {
    let host = &outside(cluster).host;
    let node = cluster.node(NODE).unwrap().addresses()[0];
    eventually(TIMEOUT, || ask(host, (node, translated).into())).unwrap();
    let answer = eventually(TIMEOUT, || {
        let answer = ask(host, (node, local).into());
        ensure!(counted(place, "arrived") > 0, "nothing came to the pod by the NodePort: {answer:?}");
        Ok(answer)
    })
    .unwrap();
    assert!(answer.is_err(), "without originatingOnly the pod answered {answer:?}");
    assert_eq!(counted(place, "replied"), 0, "without originatingOnly replies left by eth0");
}

/// In both families: with `Local` the pod sees who asks, and with `Cluster`, at any node, an address of the cluster.
fn is_answered(cluster: &Cluster, pod: &Pod, [local, translated]: [u16; 2]) {
    let outside = outside(cluster);
    let begun = Instant::now();
    for (node, from) in cluster.node(NODE).unwrap().addresses().iter().zip(outside.addresses()) {
        let seen = eventually(TIMEOUT, || ask(&outside.host, (*node, local).into()))
            .with_context(|| cluster.explain())
            .unwrap();
        assert_eq!(seen, from, "{pod:?}");
    }
    println!("originatingOnly: the pod answers after {:.2?}", begun.elapsed());
    for name in ["cloud-1", NODE] {
        for node in cluster.node(name).unwrap().addresses() {
            let seen = eventually(TIMEOUT, || ask(&outside.host, (*node, translated).into())).unwrap();
            assert!(!outside.addresses().contains(&seen), "{name} did not translate {seen}");
        }
    }
}

/// The pod's own connections have addresses of gateways, also while an application of the pod has the UDP port of tunnels, to which none of
/// their packets is given.
fn opens_by(place: &ForeignNetwork, to: &[IpAddr], gateways: &BTreeSet<IpAddr>) {
    let application = place.inside(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, TUNNELS))).unwrap().unwrap();
    for to in to {
        let (_, seen) = connect(place, *to).unwrap();
        assert!(gateways.contains(&seen), "TCP to {to} came from {seen}, not of {gateways:?}");
        let seen = ask_by_udp(place, *to).unwrap();
        assert!(gateways.contains(&seen), "UDP to {to} came from {seen}, not of {gateways:?}");
    }
    application.set_nonblocking(true).unwrap();
    let received = application.recv_from(&mut [0; 1]);
    assert_eq!(received.map_err(|error| error.kind()), Err(ErrorKind::WouldBlock));
}
