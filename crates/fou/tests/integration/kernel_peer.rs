//! Tunnels whose other end is the kernel's: fou with ipip and ip6tnl. `FAIRLEAD_KERNEL_FOU=1` says that this kernel must have them;
//! without it, a kernel that lacks them must say so.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use fairlead_api::fou::{Gateway, Service};
use fairlead_fou::{Counter, Peer, Settings, TunnelLink, Tunnels, link_name};
use testbed_netns::{Namespace, skipped, try_sh_in};

const SETTINGS: Settings = Settings { port: 5555, drop_unknown: false, own: None };

/// Addresses of one family: of the links, of the service, and inside of the tunnels.
struct Family {
    ours: IpAddr,
    kernels: IpAddr,
    service: IpAddr,
    inner_ours: IpAddr,
    inner_kernels: IpAddr,
}

fn families() -> [Family; 2] {
    let of = |texts: [&str; 5]| {
        let [ours, kernels, service, inner_ours, inner_kernels] = texts.map(|text| text.parse().unwrap());
        Family { ours, kernels, service, inner_ours, inner_kernels }
    };
    [
        of(["10.0.0.1", "10.0.0.2", "10.68.0.1", "10.9.0.1", "10.9.0.2"]),
        of(["fd00::1", "fd00::2", "fd00:68::1", "fd00:9::1", "fd00:9::2"]),
    ]
}

/// One namespace with our tunnels and one with the kernel's, joined by a veth pair.
struct Bed {
    ours: Namespace,
    kernels: Namespace,
}

impl Bed {
    /// `None` if this kernel lacks fou, and need not have it: the test is skipped.
    fn new() -> Option<Self> {
        let (ours, kernels) = (Namespace::new(), Namespace::new());
        for namespace in [&ours, &kernels] {
            namespace.sh("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0");
        }
        ours.veth("eth0", &kernels, "eth0");
        for family in families() {
            for (namespace, outer, inner) in
                [(&ours, family.ours, family.inner_ours), (&kernels, family.kernels, family.inner_kernels)]
            {
                let (length, host, nodad) = if outer.is_ipv4() { (24, 32, "") } else { (64, 128, "nodad") };
                namespace.sh(&format!(
                    "ip addr add {outer}/{length} dev eth0 {nodad}; ip addr add {inner}/{host} dev lo {nodad}"
                ));
            }
        }
        let must_have = std::env::var_os("FAIRLEAD_KERNEL_FOU").is_some();
        if must_have {
            // The kernel does not load these on demand.
            kernels.sh("modprobe -a fou fou6");
        }
        let listening =
            try_sh_in(&kernels, "ip fou add port 5555 ipproto 4; ip -6 fou add port 5555 ipproto 41");
        if must_have {
            listening.as_ref().unwrap();
        }
        match listening {
            Err(error) => {
                assert!(error.contains("No such file"), "{error}");
                skipped("this kernel has no fou, and FAIRLEAD_KERNEL_FOU does not demand it");
                None
            }
            Ok(_) => Some(Self { ours, kernels }),
        }
    }

    /// The kernel's tunnels to these addresses of the families, and a route to what is behind them.
    fn add_kernel_tunnels(&self, remote: impl Fn(&Family) -> IpAddr) {
        for family in families() {
            let kind = if family.ours.is_ipv4() { "ipip" } else { "ip6tnl mode ip6ip6" };
            let name = if family.ours.is_ipv4() { "kernel4" } else { "kernel6" };
            let (local, remote, inner) = (family.kernels, remote(&family), family.inner_kernels);
            self.kernels.sh(&format!(
                "ip link add {name} type {kind} local {local} remote {remote} ttl 225 \
                     encap fou encap-sport 5555 encap-dport 5555
                 ip link set {name} up
                 ip route add {} dev {name} src {inner}",
                family.inner_ours
            ));
        }
    }

    /// Our tunnels to the kernel's end, and a route to what is behind them.
    fn open_ours(&self) -> Tunnels {
        let mut tunnels = self.ours.run(|| Tunnels::open(uplink(&self.ours), SETTINGS)).unwrap();
        let (mut links, mut peers) = (BTreeMap::new(), BTreeMap::new());
        for family in families() {
            let link = tunnels.add_link(family.kernels).unwrap();
            let remote = Some(family.kernels);
            links.insert(link, TunnelLink { local: family.ours, remote, source_port: Some(5555) });
            peers.insert(family.kernels, Peer::Gateway { link, service: family.kernels });
            let (name, source) = (link_name(family.kernels), family.inner_ours);
            self.ours.sh(&format!("ip route add {} dev {name} src {source}", family.inner_kernels));
        }
        tunnels.set_links(&links).unwrap();
        tunnels.set_peers(&peers).unwrap();
        tunnels
    }

    /// Echo requests and TCP in both directions.
    fn check(&self, tunnels: &Tunnels) {
        for family in families() {
            let ends = [
                (&self.ours, family.inner_kernels, &self.kernels),
                (&self.kernels, family.inner_ours, &self.ours),
            ];
            for (from, address, to) in ends {
                from.sh(&format!("ping -c 3 -i 0.2 -W 2 {address}"));
                exchange(from, to, address);
            }
        }
        let counters = tunnels.counters().unwrap();
        assert!(
            counters.of(Counter::Encapsulated) > 100 && counters.of(Counter::Decapsulated) > 100,
            "{counters:?}"
        );
        let failures = [Counter::Failed, Counter::Fragment].map(|counter| counters.of(counter));
        assert_eq!(failures, [0, 0], "{counters:?}");
    }
}

fn uplink(namespace: &Namespace) -> u32 {
    namespace.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap()
}

/// Sends 1 MiB by TCP and receives it again.
fn exchange(from: &Namespace, to: &Namespace, address: IpAddr) {
    let limit = Duration::from_secs(20);
    let listener = to.run(|| TcpListener::bind((address, 9000))).unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(limit)).unwrap();
            let mut reader = stream.try_clone().unwrap();
            std::io::copy(&mut reader, &mut stream).unwrap();
        });
        let mut stream =
            from.run(|| TcpStream::connect_timeout(&SocketAddr::new(address, 9000), limit)).unwrap();
        stream.set_read_timeout(Some(limit)).unwrap();
        let mut writer = stream.try_clone().unwrap();
        let data = &data;
        scope.spawn(move || {
            writer.write_all(data).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        assert!(received == *data, "{} bytes from {address}", received.len());
    });
}

/// The kernel's ip6tnl sends the tunnel encapsulation limit by default, so this shows that the option is accepted.
#[test]
fn our_tunnels_and_the_kernels_understand_each_other() {
    let Some(bed) = Bed::new() else { return };
    bed.add_kernel_tunnels(|family| family.ours);
    let tunnels = bed.open_ours();
    bed.check(&tunnels);
}

#[test]
fn a_gateway_is_chosen_for_the_kernels_tunnels_to_a_service_address() {
    let Some(bed) = Bed::new() else { return };
    bed.add_kernel_tunnels(|family| family.service);
    let tunnels = bed.open_ours();
    let mut client = bed.kernels.run(|| Tunnels::open(uplink(&bed.kernels), SETTINGS)).unwrap();
    let (mut services, mut peers) = (BTreeMap::new(), BTreeMap::new());
    for family in families() {
        bed.kernels.sh(&format!("ip route add {} via {}", family.service, family.ours));
        let gateways = vec![Gateway { address: family.ours, is_draining: false }];
        services.insert(family.service, Service { gateways, ..Service::default() });
        peers.insert(family.ours, Peer::KernelGateway { service: family.service });
    }
    client.set_services(&services).unwrap();
    client.set_peers(&peers).unwrap();
    bed.check(&tunnels);
    let counters = client.counters().unwrap();
    assert!(counters.of(Counter::Chosen) >= 4, "{counters:?}");
    assert_eq!(counters.of(Counter::Failed), 0, "{counters:?}");
}
