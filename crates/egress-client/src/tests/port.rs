//! An application in a client pod that uses the UDP port of tunnels, 5555. Tunnels have no socket, so it can bind it.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use fairlead_api::names::FOU_PORT;
use serde_json::json;

use super::bed::{BEHIND, Bed, Objects, POD, Pod, SERVICE, egress, gateways, service, shown};
use super::{INTERNET, SECOND, reaches_gateways};

const CHOSEN: &[(&str, &str)] = &[("internet", "nat")];
/// Gateways, one of each family, and other hosts that the pod has heard nothing of.
const GATEWAYS: [&str; 2] = ["192.168.10.1", "fd10::1"];
const OTHERS: [&str; 2] = ["203.0.113.1", "2001:db8::1"];

/// An application that has the port in both families.
fn application(pod: &Pod) -> UdpSocket {
    let socket = pod.inside.run(|| UdpSocket::bind(("::", FOU_PORT)).unwrap());
    socket.set_read_timeout(Some(SECOND)).unwrap();
    socket
}

/// It receives what others send to it, and nothing of gateways, and its own packets go to gateways.
#[track_caller]
fn has_the_port(pod: &Pod, application: &UdpSocket) {
    for ((address, gateway), other) in POD.into_iter().zip(GATEWAYS).zip(OTHERS) {
        let at = |host: &str, port| SocketAddr::new(host.parse().unwrap(), port).to_string();
        let to = at(address, FOU_PORT);
        pod.send_from_outside(&at(gateway, 7000), &to);
        pod.send_from_outside(&at(other, 7000), &to);
        let (_, from) = application.recv_from(&mut [0; 1]).unwrap();
        assert_eq!(from.ip().to_canonical(), other.parse::<IpAddr>().unwrap());
    }
    application.set_nonblocking(true).unwrap();
    let more = application.recv_from(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(more, Err(ErrorKind::WouldBlock));
    application.set_nonblocking(false).unwrap();
    let before = pod.counted("encapsulated");
    assert!(BEHIND.iter().all(|to| application.send_to(b"x", to).is_ok()));
    assert_eq!((pod.counted("encapsulated"), pod.counted("in_clear")), (before + 2, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_application_keeps_the_port_of_tunnels_and_its_pod_reaches_gateways() {
    let objects = Objects {
        egresses: vec![egress(INTERNET, &["0.0.0.0/0", "::/0"])],
        services: vec![service(INTERNET, &SERVICE)],
        pods: vec![shown(CHOSEN, &json!({}))],
        ..Objects::default()
    };
    let (bed, pod) = (Bed::new(objects), Pod::new());
    pod.open_from_outside();
    // The check of sources would drop what others send, since routes to them lead into tunnels.
    pod.inside.sh("for name in all eth0; do echo 0 > /proc/sys/net/ipv4/conf/$name/rp_filter; done");
    bed.gateways.set(INTERNET, gateways(&GATEWAYS));
    // It has the port before the pod gets its tunnels, as after a late annotation.
    let early = application(&pod);
    bed.add(&pod, CHOSEN).await.unwrap();
    has_the_port(&pod, &early);
    reaches_gateways(&pod);
    assert_eq!(bed.egress.check(&pod.key).await.unwrap(), Vec::<String>::new());
    drop(early);
    let late = application(&pod);
    has_the_port(&pod, &late);
    reaches_gateways(&pod);
}
