//! Gateways that lie, refuse or never stop talking. The gateway is a fake; network and sockets are real.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::common::{GATEWAY, Home, Mapper, outside, request};
use fairlead_port_mapping::{Failure, Mapping, Protocol};

/// Longest attempt, and a margin.
const ATTEMPT: Duration = Duration::from_millis(3500);

/// Answers datagrams of a port of the router.
struct Fake {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    fn start(home: &Home, port: u16, answer: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static) -> Self {
        let socket = home.router.run(|| bind(port));
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ends);
        let thread = thread::spawn(move || {
            let mut buffer = [0; 1500];
            while !until.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
                for datagram in answer(&buffer[..length]) {
                    let _ = socket.send_to(&datagram, from);
                }
            }
        });
        Self { ends, thread: Some(thread) }
    }
}

/// A child of this process has every socket from its fork(2) to its execve(2): while another test starts a program, the socket of an earlier
/// [`Fake`] may still be open.
fn bind(port: u16) -> UdpSocket {
    let start = Instant::now();
    loop {
        match UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && start.elapsed() < 10 * ATTEMPT => {
                thread::sleep(Duration::from_millis(10));
            }
            result => return result.unwrap(),
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// An answer to MAP of PCP.
fn pcp(
    request: &[u8],
    lifetime: u32,
    external: (Ipv4Addr, u16),
    change: impl Fn(&mut Vec<u8>),
) -> Vec<Vec<u8>> {
    if request.len() != 60 {
        return Vec::new();
    }
    let mut answer = request.to_vec();
    answer[1] |= 0x80;
    answer[4..8].copy_from_slice(&lifetime.to_be_bytes());
    answer[8..24].fill(0);
    answer[42..44].copy_from_slice(&external.1.to_be_bytes());
    answer[44..].copy_from_slice(&external.0.to_ipv6_mapped().octets());
    change(&mut answer);
    vec![answer]
}

fn outcome(home: &Home) -> Result<Mapping, Failure> {
    let began = Instant::now();
    let mapper = Mapper::start(&home.hosts[0], request(11));
    let outcome = mapper.next();
    assert!(began.elapsed() < ATTEMPT, "{:?}", began.elapsed());
    mapper.end(false);
    outcome
}

fn refusal(outcome: Result<Mapping, Failure>, protocol: Protocol) -> String {
    match outcome {
        Err(Failure::Refused { protocol: found, reason }) if found == protocol => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn useless_grants_are_refused_and_the_next_protocol_is_tried() {
    let home = Home::new();
    let wan = Ipv4Addr::new(11, 0, 0, 1);
    for (lifetime, external, words) in [
        (0, (wan, 4000), "for 0ns only"),
        (7200, (wan, 0), "no packet can arrive"),
        (7200, (Ipv4Addr::UNSPECIFIED, 4000), "no packet can arrive"),
        (7200, (Ipv4Addr::LOCALHOST, 4000), "no packet can arrive"),
    ] {
        let _fake = Fake::start(&home, 5351, move |request| pcp(request, lifetime, external, |_| {}));
        let reason = refusal(outcome(&home), Protocol::Pcp);
        assert!(reason.contains(words), "{reason}");
    }
    // The same gateway is right in NAT-PMP.
    let _fake = Fake::start(&home, 5351, move |request| match request {
        [0, 0] => vec![[vec![0, 0x80, 0, 0, 0, 0, 0, 1], wan.octets().to_vec()].concat()],
        [0, 1, _, _, inside @ ..] => {
            let mut answer = vec![0, 0x81, 0, 0, 0, 0, 0, 1, inside[0], inside[1]];
            answer.extend(4000_u16.to_be_bytes());
            answer.extend(600_u32.to_be_bytes());
            vec![answer]
        }
        request => pcp(request, 0, (wan, 4000), |_| {}),
    });
    let mapping = outcome(&home).unwrap();
    assert_eq!((mapping.protocol, mapping.external), (Protocol::NatPmp, outside(4000)));
}

#[test]
fn private_addresses_and_other_ports_are_for_the_caller_to_judge() {
    let home = Home::new();
    for external in [Ipv4Addr::new(100, 64, 0, 1), Ipv4Addr::new(192, 168, 7, 1)] {
        let _fake = Fake::start(&home, 5351, move |request| pcp(request, 7200, (external, 4000), |_| {}));
        assert_eq!(outcome(&home).unwrap().external, SocketAddr::from((external, 4000)));
    }
}

#[test]
fn answers_to_other_requests_and_endless_ones_are_no_answers() {
    let home = Home::new();
    let wan = Ipv4Addr::new(11, 0, 0, 1);
    let _ssdp = Fake::start(&home, 1900, |_| vec![vec![b'x'; 1400]; 200]);
    let changes: [fn(&mut Vec<u8>); 4] = [
        |answer| answer[24] ^= 1,
        |answer| answer[40] ^= 1,
        |answer| answer.truncate(59),
        |answer| answer[1] = 0,
    ];
    for change in changes {
        let _fake = Fake::start(&home, 5351, move |request| {
            std::iter::repeat_n(pcp(request, 7200, (wan, 4000), change), 100).flatten().collect()
        });
        assert_eq!(outcome(&home), Err(Failure::NoAnswer));
    }
}

#[test]
fn a_refusal_is_told_in_words() {
    let home = Home::new();
    let wan = Ipv4Addr::new(11, 0, 0, 1);
    let _fake = Fake::start(&home, 5351, move |request| pcp(request, 1800, (wan, 0), |answer| answer[3] = 2));
    assert_eq!(refusal(outcome(&home), Protocol::Pcp), "it is not allowed on this gateway");
}

/// The gateway names this location in its answers to searches.
fn ssdp(home: &Home, location: String) -> Fake {
    Fake::start(home, 1900, move |_| {
        let target = "urn:schemas-upnp-org:device:InternetGatewayDevice:1";
        vec![format!("HTTP/1.1 200 OK\r\nST: {target}\r\nLOCATION: {location}\r\n\r\n").into_bytes()]
    })
}

/// The gateway's HTTP server says `response`, `times` times, to the first request. Its port.
fn http(home: &Home, response: Vec<u8>, times: usize) -> u16 {
    let listener = home.router.run(|| TcpListener::bind((GATEWAY, 0)).unwrap());
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let _ = stream.read(&mut [0; 4096]);
        for _ in 0..times {
            if stream.write_all(&response).is_err() {
                return;
            }
        }
        thread::sleep(Duration::from_secs(5));
    });
    port
}

#[test]
fn a_description_elsewhere_or_without_sense_is_left_alone() {
    let home = Home::new();
    {
        let _ssdp = ssdp(&home, "http://192.168.1.12:5000/desc.xml".to_owned());
        let trap = home.hosts[1].run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 5000)).unwrap());
        trap.set_nonblocking(true).unwrap();
        // It goes on looking until its time is over.
        let failure = outcome(&home).unwrap_err();
        assert!(failure.to_string().contains("at another host"), "{failure}");
        assert!(trap.accept().is_err(), "nothing connects to another host");
    }
    let head = "HTTP/1.1 200 OK\r\n\r\n";
    for (response, times, words) in [
        (format!("{head}{}", "<service>".repeat(1000)), 10_000, "no service that maps ports"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<service>".to_owned(), 1, "no service that maps ports"),
        (head.to_owned(), 1, "cannot read its description"),
    ] {
        let port = http(&home, response.into_bytes(), times);
        let _ssdp = ssdp(&home, format!("http://{GATEWAY}:{port}/desc.xml"));
        let reason = refusal(outcome(&home), Protocol::Upnp);
        assert!(reason.contains(words), "{reason}");
    }
}
