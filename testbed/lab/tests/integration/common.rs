//! Sockets that find out what a NAT does, in the words of RFC 4787.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use testbed_lab::{Host, Lab, Namespace};

/// Long enough for a loaded machine; only bounds a failure.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);
/// Time without packets after which no packet is expected any more.
pub(crate) const SILENCE: Duration = Duration::from_millis(150);

pub(crate) fn lan(text: &str) -> ipnet::Ipv4Net {
    text.parse().unwrap()
}

/// A UDP socket inside a namespace.
pub(crate) fn socket(namespace: &Namespace, port: u16) -> UdpSocket {
    namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap()).unwrap()
}

pub(crate) fn at(address: Ipv4Addr, port: u16) -> SocketAddr {
    SocketAddr::V4(SocketAddrV4::new(address, port))
}

/// Waits for one datagram and says from where it came.
pub(crate) fn receive(socket: &UdpSocket, timeout: Duration) -> Option<(String, SocketAddr)> {
    socket.set_read_timeout(Some(timeout)).unwrap();
    let start = Instant::now();
    let mut buffer = [0; 2048];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((length, from)) => {
                return Some((String::from_utf8_lossy(&buffer[..length]).into_owned(), from));
            }
            // Someone's port was unreachable; that is not an answer.
            Err(error)
                if error.kind() == std::io::ErrorKind::ConnectionRefused && start.elapsed() < timeout => {}
            Err(_) => return None,
        }
    }
}

/// Everything that has arrived and arrives until there is silence.
pub(crate) fn drain(socket: &UdpSocket) -> Vec<(String, SocketAddr)> {
    std::iter::from_fn(|| receive(socket, SILENCE)).collect()
}

/// Sends from one socket to another's address and says what source the receiver saw.
pub(crate) fn seen(
    from: &UdpSocket,
    to: &UdpSocket,
    address: SocketAddr,
    timeout: Duration,
) -> Option<SocketAddr> {
    drain_now(to);
    from.send_to(b"who am I", address).unwrap();
    receive(to, timeout).map(|(_, source)| source)
}

/// Throws away what has arrived.
pub(crate) fn drain_now(socket: &UdpSocket) {
    while receive(socket, Duration::from_millis(1)).is_some() {}
}

/// Two public hosts with two sockets each.
pub(crate) struct Observers {
    pub(crate) hosts: [Host; 2],
    sockets: Vec<(UdpSocket, SocketAddr)>,
}

impl Observers {
    pub(crate) fn new(lab: &Lab) -> Self {
        let cloud = lab.public_site("observers");
        let hosts = ["observer-1", "observer-2"].map(|name| cloud.host(name).unwrap());
        let sockets = hosts
            .iter()
            .flat_map(|host| [4000, 4001].map(|port| (socket(host, port), at(host.address(), port))))
            .collect();
        Self { hosts, sockets }
    }

    /// Address of the socket as the first observer sees it.
    pub(crate) fn reflexive(&self, from: &UdpSocket) -> SocketAddr {
        let (observer, address) = &self.sockets[0];
        seen(from, observer, *address, TIMEOUT).expect("an observer sees the socket")
    }

    /// The socket's address as all four see it, in order: two ports of one host, two of the other.
    pub(crate) fn mappings(&self, from: &UdpSocket) -> Vec<SocketAddr> {
        self.sockets
            .iter()
            .map(|(observer, address)| {
                seen(from, observer, *address, TIMEOUT).expect("an observer sees the socket")
            })
            .collect()
    }

    /// Whether UDP gets out at all.
    pub(crate) fn hears(&self, from: &UdpSocket) -> bool {
        self.hears_within(from, false)
    }

    /// The same, waiting longer where hearing is expected.
    pub(crate) fn hears_within(&self, from: &UdpSocket, expected: bool) -> bool {
        let (observer, address) = &self.sockets[0];
        drain_now(observer);
        let timeout = if expected { TIMEOUT } else { SILENCE };
        from.send_to(b"probe", address).is_ok() && receive(observer, timeout).is_some()
    }

    /// Sends `text` from an observer's socket.
    pub(crate) fn send(&self, index: usize, text: &str, to: SocketAddr) {
        self.sockets[index].0.send_to(text.as_bytes(), to).unwrap();
    }
}

/// RFC 4787 section 4.1.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    EndpointIndependent,
    AddressDependent,
    AddressAndPortDependent,
}

/// RFC 4787 section 5.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Filtering {
    EndpointIndependent,
    AddressDependent,
    AddressAndPortDependent,
}

pub(crate) fn mapping(observers: &Observers, host: &Host, port: u16) -> Mapping {
    match observers.mappings(&socket(host, port))[..] {
        [a, b, c, d] if a == b && b == c && c == d => Mapping::EndpointIndependent,
        [a, b, c, d] if a == b && c == d => Mapping::AddressDependent,
        _ => Mapping::AddressAndPortDependent,
    }
}

/// A fresh socket sends to one endpoint only; then others try to reach it.
pub(crate) fn filtering(observers: &Observers, host: &Host, port: u16) -> Filtering {
    let inside = socket(host, port);
    let outside = observers.reflexive(&inside);
    observers.send(3, "other address", outside);
    observers.send(1, "other port", outside);
    observers.send(0, "known endpoint", outside);
    let heard: Vec<String> = drain(&inside).into_iter().map(|(text, _)| text).collect();
    let heard = |text: &str| heard.iter().any(|one| one == text);
    assert!(heard("known endpoint"), "the answer of the endpoint that was asked always arrives");
    match (heard("other address"), heard("other port")) {
        (true, true) => Filtering::EndpointIndependent,
        (false, true) => Filtering::AddressDependent,
        (false, false) => Filtering::AddressAndPortDependent,
        (true, false) => panic!("a known host's other port is filtered, an unknown host's is not"),
    }
}

/// Whether one host reaches another of its site by the external address, and the source that is seen.
pub(crate) fn hairpin(observers: &Observers, one: &Host, two: &Host) -> Option<(SocketAddr, SocketAddr)> {
    let (from, to) = (socket(one, 50_900), socket(two, 50_900));
    let (source, target) = (observers.reflexive(&from), observers.reflexive(&to));
    seen(&from, &to, target, SILENCE).map(|observed| (observed, source))
}

/// Hole punching by two sockets that know each other's reflexive addresses: `first` sends first. Each also answers whatever
/// source it hears from, and keeps sending until both have heard. True if both have. Where that is `expected`, it tries for longer.
pub(crate) fn punch(observers: &Observers, first: &UdpSocket, second: &UdpSocket, expected: bool) -> bool {
    let mut first_target = observers.reflexive(second);
    let mut second_target = observers.reflexive(first);
    let (mut first_heard, mut second_heard) = (false, false);
    for _ in 0..if expected { 60 } else { 4 } {
        first.send_to(b"punch", first_target).unwrap();
        if let Some((_, source)) = receive(second, Duration::from_millis(50)) {
            (second_heard, second_target) = (true, source);
        }
        second.send_to(b"punch", second_target).unwrap();
        if let Some((_, source)) = receive(first, Duration::from_millis(50)) {
            (first_heard, first_target) = (true, source);
        }
        if first_heard && second_heard {
            return true;
        }
    }
    false
}
