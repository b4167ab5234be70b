//! A home network in namespaces: two hosts behind a router with NAT, and a stranger outside.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fairlead_port_mapping::{Failure, Mapping, Nonce, PortMapper, Request};
use tempfile::TempDir;
use testbed_netns::Namespace;

/// The router's address outside. miniupnpd refuses addresses of documentation.
pub(crate) const WAN: Ipv4Addr = Ipv4Addr::new(11, 0, 0, 1);
/// Inside.
pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 168, 1, 1);
/// The port that is mapped.
pub(crate) const PORT: u16 = 51820;
/// Only bounds a test that hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) struct Home {
    pub(crate) router: Namespace,
    pub(crate) hosts: [Namespace; 2],
    pub(crate) stranger: Namespace,
    directory: TempDir,
}

/// A program of a test, killed with its handle.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Home {
    pub(crate) fn new() -> Self {
        let [router, one, two, stranger] = [(); 4].map(|()| Namespace::new());
        router.sh("ip link add lan type bridge mcast_snooping 0; ip link set lan up; ip addr add 192.168.1.1/24 dev lan; ip addr add 2a00:1:2:3::1/64 dev lan nodad");
        for (number, host) in [(11, &one), (12, &two)] {
            router.veth(&format!("lan{number}"), host, "eth0");
            router.sh(&format!("ip link set lan{number} master lan"));
            host.sh(&format!(
                "ip addr add 192.168.1.{number}/24 dev eth0; ip route add default via 192.168.1.1; ip addr add 2a00:1:2:3::{number}/64 dev eth0 nodad; ip route add default via 2a00:1:2:3::1"
            ));
        }
        router.veth("wan", &stranger, "eth0");
        router.sh(&format!("ip addr add {WAN}/24 dev wan; ip addr add 2a00:1:2:4::1/64 dev wan nodad; sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"));
        stranger.sh("ip addr add 11.0.0.9/24 dev eth0; ip addr add 2a00:1:2:4::9/64 dev eth0 nodad; ip route add default via 2a00:1:2:4::1");
        router.sh(
            "nft -f - <<END
table inet home {
  chain input { type filter hook input priority 0; iifname wan meta l4proto icmpv6 accept; iifname wan drop; }
  chain forward { type filter hook forward priority 0; iifname wan ct state established accept; iifname wan ct status dnat accept; jump opened; iifname wan drop; }
  chain postrouting { type nat hook postrouting priority 100; oifname wan meta nfproto ipv4 masquerade fully-random; jump postrouting_miniupnpd; }
  chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
  chain opened { }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
}
END",
        );
        Self { router, hosts: [one, two], stranger, directory: TempDir::new().unwrap() }
    }

    /// miniupnpd on the router, with these lines of configuration.
    pub(crate) fn miniupnpd(&self, options: &str) -> Running {
        let file = |name: &str| self.directory.path().join(name);
        let configuration = format!(
            "ext_ifname=wan\nlistening_ip=lan\nhttp_port=0\nsystem_uptime=no\nmin_lifetime=60\n\
             upnp_table_name=home\nupnp_nat_table_name=home\nupnp_forward_chain=opened\n\
             upnp_nat_chain=prerouting_miniupnpd\nupnp_nat_postrouting_chain=postrouting_miniupnpd\n\
             uuid=00000000-0000-4000-8000-000000000001\n{options}\n\
             allow 1024-65535 192.168.1.0/24 1024-65535\ndeny 0-65535 0.0.0.0/0 0-65535\n"
        );
        std::fs::write(file("conf"), configuration).unwrap();
        let log = File::options().create(true).append(true).open(file("log")).unwrap();
        let mut command = Command::new("miniupnpd");
        command.arg("-d").arg("-f").arg(file("conf")).arg("-P").arg(file("pid"));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let child = self.router.run(|| command.spawn());
        let running = Running(child.expect("miniupnpd is installed: apt-get install miniupnpd-nftables"));
        eventually(|| {
            self.router.sh("ss -Hlnut").contains("192.168.1.1").then_some(()).or_else(|| self.listens())
        });
        running
    }

    fn listens(&self) -> Option<()> {
        let sockets = self.router.sh("ss -Hlnut");
        (sockets.contains(":5351") || sockets.contains(":1900")).then_some(())
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Whether a datagram from a stranger to `external` arrives at this host's port.
    pub(crate) fn arrives(&self, external: SocketAddr, host: usize) -> bool {
        let any: IpAddr =
            if external.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        // A child of another test that was forked and is not executed yet keeps what was closed here open for a moment.
        let inside = eventually(|| self.hosts[host].run(|| UdpSocket::bind((any, PORT)).ok()));
        let outside = self.stranger.run(|| UdpSocket::bind((any, 0)).unwrap());
        inside.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        outside.send_to(b"anyone there?", external).unwrap();
        inside.recv(&mut [0; 64]).is_ok()
    }
}

pub(crate) fn request(host: u8) -> Request {
    Request {
        gateway: GATEWAY.into(),
        link: "eth0".to_owned(),
        link_index: 0,
        source: None,
        port: PORT,
        nonce: Nonce([host; 12]),
        mark: 0x20,
    }
}

/// A mapper that runs on a thread of its own in a namespace, and what it reports.
pub(crate) struct Mapper {
    pub(crate) reports: std::sync::mpsc::Receiver<Result<Mapping, Failure>>,
    stop: Option<tokio::sync::oneshot::Sender<bool>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Mapper {
    pub(crate) fn start(namespace: &Namespace, request: Request) -> Self {
        let (sender, reports) = std::sync::mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let descriptor = File::open(namespace.path()).unwrap();
        let work = move || {
            nix::sched::setns(&descriptor, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut mapper = PortMapper::default();
                let releases = tokio::select! {
                    () = mapper.run(&request, |outcome| drop(sender.send(outcome))) => false,
                    releases = stopped => releases.unwrap_or(false),
                };
                if releases {
                    mapper.release().await;
                }
            });
        };
        Self { reports, stop: Some(stop), thread: Some(thread::spawn(work)) }
    }

    pub(crate) fn next(&self) -> Result<Mapping, Failure> {
        self.reports.recv_timeout(TIMEOUT).expect("the mapper reports")
    }

    /// Ends it, with or without releasing the mapping.
    pub(crate) fn end(mut self, releases: bool) {
        let _ = self.stop.take().unwrap().send(releases);
        self.thread.take().unwrap().join().unwrap();
    }
}

pub(crate) fn eventually<T>(mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "not in time");
        thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) fn outside(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(WAN), port)
}
