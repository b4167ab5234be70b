//! The machine outside of the cluster, the routes to gateways, and the count of packets that should not be there.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed_lab::{Host, Place};
use testbed_nodes::Cluster;

use crate::setup::{DOMESTIC, INTERNET, gateways};

/// TCP and UDP port of its servers.
pub(crate) const PORT: u16 = 7000;
/// Its address in the domestic network.
pub(crate) const IN_DOMESTIC: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 10, 5));
/// How long an answer may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// A machine on the Internet, and in the domestic network, with servers that tell clients which address they come from: by TCP as the
/// first line, after which everything is echoed; by UDP as the answer.
pub(crate) struct Outside {
    pub(crate) host: Host,
}

static OUTSIDE: OnceLock<Outside> = OnceLock::new();

/// The one of the cluster, with routes to the gateways that there are now.
pub(crate) fn outside(cluster: &Cluster) -> &'static Outside {
    let outside = OUTSIDE.get_or_init(|| Outside::start(cluster).unwrap());
    outside.route_to_gateways(cluster).unwrap();
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
        for address in outside.addresses().into_iter().chain([IN_DOMESTIC]) {
            let (tcp, udp) = outside.host.inside(|| -> Result<_> {
                Ok((TcpListener::bind((address, PORT))?, UdpSocket::bind((address, PORT))?))
            })??;
            std::thread::spawn(move || serve_tcp(&tcp));
            std::thread::spawn(move || serve_udp(&udp));
        }
        Ok(outside)
    }

    /// Its public addresses, IPv4 first.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let ipv6 = self.host.address6().map(IpAddr::from);
        std::iter::once(IpAddr::from(self.host.address())).chain(ipv6).collect()
    }

    /// As BGP would announce them: the Internet and the router of the cloud lead packets to the node of each gateway.
    fn route_to_gateways(&self, cluster: &Cluster) -> Result<()> {
        let cloud = cluster.sites().first().context("no network")?.router();
        let lan6 = cloud.lan6().context("no IPv6 in the cloud")?;
        for gateway in [INTERNET, DOMESTIC].into_iter().flat_map(|it| gateways(cluster, it)).flatten() {
            let node = cluster.node(&gateway.node)?;
            for address in &gateway.addresses {
                let same = |other: &&IpAddr| other.is_ipv4() == address.is_ipv4();
                let via = node.addresses().iter().find(same).context("the node has no such address")?;
                let (option, lan) = if address.is_ipv4() {
                    ("-4", cloud.lan().to_string())
                } else {
                    ("-6", lan6.to_string())
                };
                cloud.shell(&format!("ip {option} route replace {address} via {via}"))?;
                let through = format!(
                    "ip {option} route show {lan} | head -1 | grep -o 'via .*' | sed 's/ metric.*//'"
                );
                cluster
                    .lab()
                    .internet()
                    .shell(&format!("ip {option} route replace {address} $({through}) onlink"))?;
            }
        }
        Ok(())
    }
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

/// Until the test program ends.
fn serve_tcp(listener: &TcpListener) {
    while let Ok((connection, from)) = listener.accept() {
        std::thread::spawn(move || echo(connection, from));
    }
}

fn echo(mut connection: TcpStream, from: SocketAddr) {
    let _ = connection.set_nonblocking(false);
    let _ = connection.set_nodelay(true);
    let mut buffer = vec![0; 1 << 16];
    let mut outcome = writeln!(connection, "{}", from.ip());
    while outcome.is_ok() {
        match connection.read(&mut buffer) {
            // `curl` wants to see an end.
            Ok(4..) if buffer.starts_with(b"GET ") => return,
            Ok(length @ 1..) => outcome = connection.write_all(buffer.get(..length).unwrap_or_default()),
            _ => return,
        }
    }
}

/// Until the test program ends.
fn serve_udp(socket: &UdpSocket) {
    let mut buffer = [0; 64];
    loop {
        // A refused answer is reported at the next call.
        if let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(from.ip().to_string().as_bytes(), from);
        }
    }
}

/// A connection to a server of [`Outside`], and the address that the server sees.
pub(crate) fn connect(from: &impl Place, to: IpAddr) -> Result<(TcpStream, IpAddr)> {
    let target = SocketAddr::from((to, PORT));
    let connection = from.inside(|| TcpStream::connect_timeout(&target, PATIENCE))??;
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.set_nodelay(true)?;
    let mut line = String::new();
    let mut byte = [0];
    let mut reader = connection.try_clone()?;
    while byte != *b"\n" {
        reader.read_exact(&mut byte)?;
        line.extend(byte.map(char::from));
    }
    let seen = line.trim().parse().with_context(|| format!("the server wrote {line:?}"))?;
    Ok((connection, seen))
}

/// The address that the UDP server of [`Outside`] sees.
pub(crate) fn ask_by_udp(from: &impl Place, to: IpAddr) -> Result<IpAddr> {
    let any = if to.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = from.inside(|| UdpSocket::bind((any, 0)))??;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send_to(b"who am I", (to, PORT))?;
    let mut buffer = [0; 64];
    let (length, _) = socket.recv_from(&mut buffer)?;
    Ok(std::str::from_utf8(buffer.get(..length).unwrap_or_default())?.parse()?)
}

/// Sends bytes and reads them back.
pub(crate) fn echoed(connection: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let mut writer = connection.try_clone()?;
    let mut answer = vec![0; bytes.len()];
    std::thread::scope(|scope| {
        let writing = scope.spawn(move || writer.write_all(bytes));
        connection.read_exact(&mut answer)?;
        writing.join().map_err(|_| anyhow::anyhow!("panicked"))??;
        ensure!(answer == bytes, "the echo is another");
        Ok(())
    })
}

/// Runs a shell script in a network namespace.
pub(crate) fn run(place: &impl Place, script: &str) -> Result<String> {
    let output = place.inside(|| Command::new("sh").args(["-c", script]).output())??;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{script}: {text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}
