//! The kinds of NAT and their nftables rules. Pure: the same input gives the same text.

use std::fmt::Write;
use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::Ipv4Net;

/// Kind of translation by a router, in the words of RFC 4787: mapping (EIM endpoint-independent, EDM address-and-port-dependent) and
/// filtering (EIF endpoint-independent, ADF address-dependent, APDF address-and-port-dependent).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nat {
    /// No translation, no firewall for IPv4: the LAN range is routed on the Internet, so it must be a public one.
    None,
    /// EIM, APDF, no hairpinning: the common home router. Ports are preserved for the first host of the site; each further
    /// one has ports of its own, so mappings never overload (RFC 4787 REQ-3).
    PortRestricted,
    /// The default of Linux: as `PortRestricted`, but two hosts may share one external port towards different
    /// remote endpoints, so with equal internal ports the second host's mapping can depend on the destination.
    LinuxMasquerade,
    /// EIM, EIF.
    FullCone,
    /// EIM, ADF.
    AddressRestricted,
    /// EDM with random ports, APDF.
    SymmetricRandom,
    /// EDM with ports that count up by one from 40000 for each new flow, APDF.
    SymmetricPredictable,
    /// EIM, APDF, with few external UDP ports for the whole site.
    PortPool {
        /// Lowest external port.
        first: u16,
        /// Highest external port.
        last: u16,
    },
    /// Every host has a public address of its own, ports untouched: EIM, EIF ("elastic IP").
    OneToOne,
    /// EIM, EIF, and hosts inside reach each other by their external addresses, seen with these as source.
    Hairpin,
    /// `PortRestricted` twice: the home router's `wan` is in 100.64.0.0/10 of a carrier's (RFC 6598).
    Cgnat,
    /// `PortRestricted` for all but UDP, of which only DNS passes.
    UdpBlocked,
}

/// Lifetime of a UDP mapping without traffic unless a test sets another.
pub(crate) const USUAL_LIFE: Duration = Duration::from_secs(300);
/// Hosts get blocks of external ports below the ephemeral ones (32768), where the first host's preserved ports are.
const BLOCK: u32 = 256;
const BLOCKS: u32 = 80;
const FIRST_BLOCK: u32 = 12_000;
/// Number of blocks by which a host's ports move at a rebind.
const REBIND_STEP: u32 = 17;
/// Ports of the predictable symmetric kind: more than a test takes, since which port follows the last one differs between NATs.
const PREDICTABLE: std::ops::Range<u16> = 40_000..48_192;

impl Nat {
    /// EIM kinds where each host has its own external ports.
    fn separates_hosts(self) -> bool {
        matches!(
            self,
            Self::PortRestricted
                | Self::FullCone
                | Self::AddressRestricted
                | Self::Hairpin
                | Self::Cgnat
                | Self::UdpBlocked
        )
    }

    /// Kinds that let in UDP from endpoints a host has not sent to.
    fn admits_strangers(self) -> bool {
        matches!(self, Self::FullCone | Self::AddressRestricted | Self::Hairpin)
    }

    /// Whether losing its mappings can give a host other external ports.
    pub(crate) fn has_ports(self) -> bool {
        !matches!(self, Self::None | Self::OneToOne)
    }
}

/// All that a router's rules depend on.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub nat: Nat,
    pub wan: Ipv4Addr,
    pub lan: Ipv4Net,
    /// Hosts in the order they came.
    pub hosts: Vec<Ipv4Addr>,
    /// Hosts of 1:1 sites, each with its public address.
    pub one_to_one: Vec<(Ipv4Addr, Ipv4Addr)>,
    pub mapping_life: Duration,
    /// Counts rebinds.
    pub generation: u32,
    /// Whether the IPv6 firewall lets in only answers.
    pub ipv6_firewall: bool,
}

/// External UDP ports of a host, if they are not simply preserved.
fn ports_of(index: usize, generation: u32) -> Option<(u32, u32)> {
    if index == 0 && generation == 0 {
        return None;
    }
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    let block = generation.wrapping_mul(REBIND_STEP).wrapping_add(index) % BLOCKS;
    let first = FIRST_BLOCK + block * BLOCK;
    Some((first, first + BLOCK - 1))
}

impl Rules {
    /// One transaction that replaces all rules but keeps what the dynamic sets have learnt.
    pub(crate) fn render(&self) -> String {
        format!("{}{}", self.ipv4(), self.ipv6())
    }

    /// Drops what the dynamic sets have learnt, as a router that restarts does.
    pub(crate) fn forget() -> &'static str {
        "flush map ip lab cone\nflush set ip lab heard\n"
    }

    fn ipv4(&self) -> String {
        format!(
            "table ip lab {{\n\
             map cone {{\ntype inet_service : ipv4_addr . inet_service\nflags dynamic, timeout\nsize 65535\n}}\n\
             set heard {{\ntype ipv4_addr . inet_service . ipv4_addr\nflags dynamic, timeout\nsize 65535\n}}\n\
             chain prerouting {{\ntype nat hook prerouting priority -100\n}}\n\
             chain postrouting {{\ntype nat hook postrouting priority 100\n}}\n\
             chain learn {{\ntype filter hook postrouting priority 150\n}}\n\
             chain input {{\ntype filter hook input priority 0\n}}\n\
             chain forward {{\ntype filter hook forward priority 0\n}}\n\
             }}\nflush table ip lab\ntable ip lab {{\n\
             chain prerouting {{\n{}}}\nchain postrouting {{\n{}}}\nchain learn {{\n{}}}\n\
             chain input {{\n{INPUT}}}\nchain forward {{\n{}}}\n}}\n",
            self.prerouting(),
            self.postrouting(),
            self.learn(),
            self.forward(),
        )
    }

    fn prerouting(&self) -> String {
        let wan = self.wan;
        match self.nat {
            Nat::FullCone | Nat::AddressRestricted => {
                "iifname \"wan\" meta l4proto udp dnat ip to udp dport map @cone\n".to_owned()
            }
            Nat::Hairpin => format!("ip daddr {wan} meta l4proto udp dnat ip to udp dport map @cone\n"),
            Nat::OneToOne => self.one_to_one.iter().fold(String::new(), |mut text, (host, public)| {
                let _ = writeln!(text, "iifname \"wan\" ip daddr {public} dnat to {host}");
                text
            }),
            _ => String::new(),
        }
    }

    fn postrouting(&self) -> String {
        let mut text = String::new();
        match self.nat {
            Nat::None => return text,
            Nat::OneToOne => {
                for (host, public) in &self.one_to_one {
                    let _ = writeln!(text, "oifname \"wan\" ip saddr {host} snat to {public}");
                }
            }
            Nat::SymmetricRandom => {
                text.push_str("oifname \"wan\" meta l4proto udp masquerade fully-random\n");
            }
            Nat::SymmetricPredictable => text.push_str(&self.counting_ports()),
            Nat::PortPool { first, last } => {
                let _ = writeln!(text, "oifname \"wan\" meta l4proto udp masquerade to :{first}-{last}");
            }
            _ => {}
        }
        if self.nat.separates_hosts() {
            text.push_str(&self.separate_ports("oifname \"wan\"", "masquerade to :"));
        }
        if self.nat == Nat::LinuxMasquerade && self.generation > 0 {
            // All hosts share the block, as they share all ports before.
            let (first, last) = ports_of(0, self.generation).unwrap_or((FIRST_BLOCK, u32::from(u16::MAX)));
            let _ = writeln!(text, "oifname \"wan\" meta l4proto udp masquerade to :{first}-{last}");
        }
        text.push_str("oifname \"wan\" masquerade\n");
        if self.nat == Nat::Hairpin {
            let selector = format!("oifname \"lan\" ip saddr {} ct status dnat", self.lan);
            let wan = self.wan;
            text.push_str(&self.separate_ports(&selector, &format!("snat to {wan}:")));
            let _ = writeln!(text, "{selector} snat to {wan}");
        }
        text
    }

    /// nft writes a computed port in the machine's byte order, so it counts through a table of ports.
    fn counting_ports(&self) -> String {
        let table: Vec<String> =
            PREDICTABLE.enumerate().map(|(index, port)| format!("{index} : {port}")).collect();
        format!(
            "oifname \"wan\" meta l4proto udp snat ip to {} : numgen inc mod {} map {{ {} }}\n",
            self.wan,
            table.len(),
            table.join(", ")
        )
    }

    fn separate_ports(&self, selector: &str, translate: &str) -> String {
        let mut text = String::new();
        for (index, host) in self.hosts.iter().enumerate() {
            if let Some((first, last)) = ports_of(index, self.generation) {
                let _ =
                    writeln!(text, "{selector} ip saddr {host} meta l4proto udp {translate}{first}-{last}");
            }
        }
        text
    }

    /// Remembers, after translation, which host has which external port; every outgoing packet refreshes it.
    fn learn(&self) -> String {
        if !self.nat.admits_strangers() {
            return String::new();
        }
        let life = self.mapping_life.as_secs();
        let update = |out: &str, direction: &str| {
            format!(
                "{out} meta l4proto udp ct direction {direction} update @cone {{ udp sport timeout {life}s : \
                 ct {direction} ip saddr . ct {direction} proto-src }}\n"
            )
        };
        let mut text = update("oifname \"wan\"", "original") + &update("oifname \"wan\"", "reply");
        if self.nat == Nat::Hairpin {
            text.push_str(&update("oifname \"lan\" ct status snat", "original"));
        }
        text
    }

    fn forward(&self) -> String {
        let mut text = String::new();
        match self.nat {
            // Everything is let in; what has no translation has nowhere to go.
            Nat::None | Nat::OneToOne | Nat::FullCone | Nat::Hairpin => return text,
            Nat::AddressRestricted => {
                let life = self.mapping_life.as_secs();
                let _ = writeln!(
                    text,
                    "oifname \"wan\" meta l4proto udp update @heard {{ ip saddr . udp sport . ip daddr timeout {life}s }}\n\
                     iifname \"wan\" meta l4proto udp ip daddr . udp dport . ip saddr @heard accept"
                );
            }
            Nat::UdpBlocked => text.push_str("oifname \"wan\" udp dport != 53 drop\n"),
            _ => {}
        }
        text.push_str("iifname \"wan\" ct state established,related accept\niifname \"wan\" drop\n");
        text
    }

    fn ipv6(&self) -> String {
        let mut forward = String::new();
        if self.nat == Nat::UdpBlocked {
            forward.push_str("oifname \"wan\" udp dport != 53 drop\n");
        }
        if self.ipv6_firewall {
            forward.push_str("iifname \"wan\" ct state established,related accept\niifname \"wan\" drop\n");
        }
        format!(
            "table ip6 lab {{\n}}\ndelete table ip6 lab\ntable ip6 lab {{\n\
             chain input {{\ntype filter hook input priority 0\niifname \"wan\" ct state established,related accept\n\
             iifname \"wan\" meta l4proto icmpv6 accept\niifname \"wan\" drop\n}}\n\
             chain forward {{\ntype filter hook forward priority 0\n{forward}}}\n}}\n"
        )
    }
}

/// A router that took a stranger's packet for its own would make a connection entry in the way of the host's own flow,
/// which then gets another port; so nothing unasked may reach it, or hole punching fails for the wrong reason.
const INPUT: &str = "iifname \"wan\" ct state established,related accept\n\
                     iifname \"wan\" icmp type echo-request accept\niifname \"wan\" drop\n";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hosts_of_a_site_never_share_external_ports(one in 0_usize..80, two in 0_usize..80, generation in 0_u32..10_000) {
            prop_assume!(one != two);
            if let (Some((first, last)), Some((other_first, other_last))) = (ports_of(one, generation), ports_of(two, generation)) {
                prop_assert!(last < other_first || other_last < first);
                prop_assert!(first >= 1024 && last < 32_768);
            }
        }

        #[test]
        fn a_rebind_always_moves_the_ports(index in 0_usize..80, generation in 0_u32..10_000) {
            prop_assert_ne!(ports_of(index, generation), ports_of(index, generation + 1));
        }
    }

    #[test]
    fn only_the_first_host_keeps_its_ports() {
        assert_eq!(ports_of(0, 0), None);
        assert_eq!(ports_of(1, 0), Some((12_256, 12_511)));
        assert_eq!(ports_of(0, 1), Some((16_352, 16_607)));
    }
}
