//! The Internet: one namespace that routes between point-to-point uplinks.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use ipnet::{Ipv4Net, Ipv6Net};

use crate::lock;
use crate::namespace::Namespace;

/// First and last octet given to hosts and routers of 203.0.113.0/24 (TEST-NET-3, RFC 5737).
const FIRST: u8 = 10;
const LAST: u8 = 250;
/// The Internet's own address on every uplink, the default gateway of all.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// The same for IPv6.
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// The `number`-th public IPv4 address.
pub(crate) fn public_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(203, 0, 113, number)
}

/// The `number`-th public IPv6 address (documentation prefix, RFC 3849).
pub(crate) fn public_address6(number: u8) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(number))
}

/// The /64 routed to the site with this number.
pub(crate) fn routed_prefix6(number: u8) -> Ipv6Net {
    let network = Ipv6Addr::new(0x2001, 0xdb8, 0, u16::from(number), 0, 0, 0, 0);
    Ipv6Net::new_assert(network, 64)
}

/// The settings of a namespace to attach.
#[derive(Debug, Clone, Default)]
pub(crate) struct Uplink {
    /// Name of the interface inside.
    pub interface: &'static str,
    /// Give it a public IPv6 address too.
    pub ipv6: bool,
    /// MTU in bytes of an IP packet; the kernel's default if `None`.
    pub mtu: Option<u32>,
    /// An IPv4 range routed to it without NAT.
    pub routed: Option<Ipv4Net>,
}

/// A cable from a namespace to what it is plugged into: a port there, which can be pulled and plugged in again.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub switch: Namespace,
    pub port: String,
    /// `ip -batch` lines that the kernel forgets when the port goes down.
    pub restore: Vec<String>,
    /// `ip -batch` lines for the namespace at the other end.
    pub inside: String,
    pub address: Ipv4Addr,
    pub address6: Option<Ipv6Addr>,
}

impl Attachment {
    /// Pulls the cable: both ends lose their carrier.
    pub(crate) fn pull(&self) -> Result<()> {
        self.switch.ip(&format!("link set {} down\n", self.port))
    }

    /// Plugs it in again.
    pub(crate) fn plug(&self) -> Result<()> {
        self.switch.ip(&format!("link set {} up\n{}", self.port, self.restore.concat()))
    }
}

/// The line that makes a cable between `port` (here) and `interface` in the namespace held by `process`.
pub(crate) fn cable(port: &str, interface: &str, process: u32, mtu: Option<u32>) -> String {
    let mtu = mtu.map(|bytes| format!(" mtu {bytes}")).unwrap_or_default();
    format!("link add {port}{mtu} type veth peer name {interface}{mtu} netns {process}\n")
}

#[derive(Debug)]
pub(crate) struct Internet {
    namespace: Namespace,
    next: Mutex<u8>,
}

impl Internet {
    pub(crate) fn new(namespace: Namespace) -> Result<Self> {
        namespace.set_sysctls(FORWARDING)?;
        // Packets to unused addresses are dropped, as by most networks.
        namespace.ip(
            "route add blackhole 203.0.113.0/24\nroute add blackhole 2001:db8::/32\naddr add 2001:db8::1/128 dev lo\n",
        )?;
        Ok(Self { namespace, next: Mutex::new(FIRST) })
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// A unique number; it stands for an IPv4 address, an IPv6 address and an IPv6 prefix.
    pub(crate) fn allocate(&self) -> Result<u8> {
        let mut next = lock(&self.next);
        let number = *next;
        ensure!(number <= LAST, "the lab's Internet is full: it has {} public addresses", LAST - FIRST + 1);
        *next = number.saturating_add(1);
        Ok(number)
    }

    /// Plugs a namespace in and configures its end.
    pub(crate) fn attach(&self, namespace: &Namespace, uplink: &Uplink) -> Result<Attachment> {
        let number = self.allocate()?;
        let Uplink { interface, ipv6, mtu, routed } = uplink;
        let (address, address6) = (public_address(number), ipv6.then(|| public_address6(number)));
        let port = format!("p{number}");
        let mut restore = vec![
            format!("addr replace {GATEWAY}/32 dev {port}\naddr replace {GATEWAY6}/64 dev {port} nodad\n"),
            format!("route replace {address}/32 dev {port}\n"),
        ];
        restore.extend(routed.map(|range| route_through(range, address, &port)));
        let mut inside = format!(
            "link set {interface} up\naddr add {address}/32 dev {interface}\n\
             route add default via {GATEWAY} dev {interface} onlink\n"
        );
        if let Some(address6) = address6 {
            let prefix = routed_prefix6(number);
            restore.push(format!("route replace {address6}/128 dev {port}\n"));
            restore.push(format!("route replace {prefix} via {address6} dev {port} onlink\n"));
            inside += &format!(
                "addr add {address6}/128 dev {interface} nodad\nroute add default via {GATEWAY6} dev {interface}\n"
            );
        }
        let switch = self.namespace.clone();
        let attachment = Attachment { switch, port, restore, inside, address, address6 };
        let port = &attachment.port;
        let lines = cable(port, interface, namespace.holder_pid(), *mtu);
        attachment
            .switch
            .ip(&format!("{lines}link set {port} up\n{}", attachment.restore.concat()))
            .with_context(|| format!("cannot attach {} to the Internet", namespace.name()))?;
        Ok(attachment)
    }

    /// Routes one more address to what is attached, and remembers it for the next time the cable is plugged in.
    pub(crate) fn route_also(&self, attachment: &mut Attachment, address: Ipv4Addr) -> Result<()> {
        let line = route_through(Ipv4Net::from(address), attachment.address, &attachment.port);
        self.namespace.ip(&line)?;
        attachment.restore.push(line);
        Ok(())
    }

    /// Gives what is attached another address instead of the one it has.
    pub(crate) fn renumber(&self, attachment: &mut Attachment) -> Result<Ipv4Addr> {
        let new = public_address(self.allocate()?);
        let old = std::mem::replace(&mut attachment.address, new);
        for line in &mut attachment.restore {
            *line = line.replace(&format!("replace {old}/"), &format!("replace {new}/"));
            *line = line.replace(&format!("via {old} "), &format!("via {new} "));
        }
        let forget = format!("route del {old}/32 dev {}\n", attachment.port);
        self.namespace.ip(&(forget + &attachment.restore.concat()))?;
        Ok(new)
    }
}

fn route_through(range: Ipv4Net, gateway: Ipv4Addr, port: &str) -> String {
    format!("route replace {range} via {gateway} dev {port} onlink\n")
}

/// Sysctls that make a namespace a router. ICMP is not rate-limited: a second "too big" must not get lost in a test.
pub(crate) const FORWARDING: &[(&str, &str)] = &[
    ("net/ipv4/ip_forward", "1"),
    ("net/ipv6/conf/all/forwarding", "1"),
    ("net/ipv4/icmp_ratelimit", "0"),
    ("net/ipv6/icmp/ratelimit", "0"),
];
