//! The metadata service of EC2 at its address, in a namespace. The service is a fake; network and sockets are real.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::thread;
use std::time::Instant;

use fairlead_port_mapping::ec2;
use testbed_netns::Namespace;

/// A host whose metadata service answers each connection with the next of these; after them it stays silent.
struct Instance {
    namespace: Namespace,
    requests: std::sync::mpsc::Receiver<String>,
}

impl Instance {
    fn new(answers: &'static [&'static str]) -> Self {
        let namespace = Namespace::new();
        namespace.sh("ip link set lo up; ip addr add 169.254.169.254/32 dev lo");
        let listener = namespace.run(|| TcpListener::bind(ec2::SERVICE).unwrap());
        let (sender, requests) = std::sync::mpsc::channel();
        // It ends with the process: nothing it holds outlives the test.
        thread::spawn(move || {
            let mut silent = Vec::new();
            for number in 0.. {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let mut buffer = [0; 4096];
                let length = stream.read(&mut buffer).unwrap_or_default();
                let _ = sender.send(String::from_utf8_lossy(&buffer[..length]).into_owned());
                match answers.get(number) {
                    Some(answer) => drop(stream.write_all(answer.as_bytes())),
                    None => silent.push(stream),
                }
            }
        });
        Self { namespace, requests }
    }

    fn public_ipv4(&self) -> std::io::Result<Option<Ipv4Addr>> {
        self.namespace.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(ec2::public_ipv4(ec2::SERVICE))
        })
    }
}

const TOKEN: &str = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nAQAEAP==";

#[test]
fn the_public_address_is_asked_for_with_a_token() {
    let instance = Instance::new(&[TOKEN, "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n198.51.100.7"]);
    assert_eq!(instance.public_ipv4().unwrap(), Some(Ipv4Addr::new(198, 51, 100, 7)));
    let (put, get) = (instance.requests.recv().unwrap(), instance.requests.recv().unwrap());
    assert!(put.starts_with("PUT /latest/api/token HTTP/1.1\r\n"), "{put}");
    assert!(
        get.starts_with("GET /latest/meta-data/public-ipv4 ") && get.contains("-token: AQAEAP=="),
        "{get}"
    );
}

#[test]
fn an_instance_without_a_public_address_has_none() {
    let instance = Instance::new(&[TOKEN, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"]);
    assert_eq!(instance.public_ipv4().unwrap(), None);
}

#[test]
fn a_service_that_lies_or_is_silent_gives_nothing_within_three_seconds() {
    for answers in [
        &["HTTP/1.1 403 Forbidden\r\n\r\n"][..],
        &["HTTP/1.1 200 OK\r\n\r\na\r\nHost: evil"],
        &[TOKEN, "HTTP/1.1 200 OK\r\n\r\n10.0.0.7"],
        &[TOKEN, "HTTP/1.1 200 OK\r\n\r\n127.0.0.1"],
        &[TOKEN],
    ] {
        let began = Instant::now();
        let error = Instance::new(answers).public_ipv4().unwrap_err();
        println!("{error} after {:?}", began.elapsed());
    }
}
