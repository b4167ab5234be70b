//! Traffic through the lab's Internet, counted there by nftables: who sends WireGuard's packets to whom, who sends UDP at all, and who has
//! a connection to the relay.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result};
use fairlead_demo::World;
use serde_json::Value;
use testbed_lab::Host;

const RULES: &str = "\
table inet judge {
  set direct4 { type ipv4_addr . ipv4_addr; flags dynamic; size 65535; }
  set direct6 { type ipv6_addr . ipv6_addr; flags dynamic; size 65535; }
  set udp4 { type ipv4_addr; flags dynamic; size 65535; }
  set relay4 { type ipv4_addr; flags dynamic; size 65535; }
  chain forward {
    type filter hook forward priority 0;
    meta l4proto udp @th,64,32 0x04000000 update @direct4 { ip saddr . ip daddr }
    meta l4proto udp @th,64,32 0x04000000 update @direct6 { ip6 saddr . ip6 daddr }
    meta l4proto udp update @udp4 { ip saddr }
    ip daddr RELAY tcp dport 443 update @relay4 { ip saddr }
  }
}
";

/// The counters.
pub(crate) struct Judge<'a> {
    world: &'a World,
}

/// Sources, and destinations where they matter, of the packets that were counted.
pub(crate) struct Seen {
    /// Source and destination of WireGuard's transport data messages, keepalives included.
    pub(crate) direct: BTreeSet<(IpAddr, IpAddr)>,
    /// Sources of UDP.
    pub(crate) udp: BTreeSet<IpAddr>,
    /// Sources of TCP to the relay.
    pub(crate) relay: BTreeSet<IpAddr>,
}

impl<'a> Judge<'a> {
    pub(crate) fn new(world: &'a World, relay: &Host) -> Result<Self> {
        let rules = RULES.replace("RELAY", &relay.address().to_string());
        world.lab().internet().shell(&format!("nft -f - <<'END'\n{rules}END"))?;
        Ok(Self { world })
    }

    /// Forgets what was counted.
    pub(crate) fn restart(&self) -> Result<()> {
        let flush =
            ["direct4", "direct6", "udp4", "relay4"].map(|set| format!("nft flush set inet judge {set}"));
        self.world.lab().internet().shell(&flush.join("\n")).map(drop)
    }

    /// Packets that were counted since the start or the last restart of the count.
    pub(crate) fn seen(&self) -> Result<Seen> {
        let pairs = |set: &str| -> Result<Vec<(IpAddr, IpAddr)>> {
            let pair = |element: &Value| {
                let [from, to] = element["concat"].as_array()?.as_slice() else { return None };
                Some((from.as_str()?.parse().ok()?, to.as_str()?.parse().ok()?))
            };
            Ok(self.elements(set)?.iter().filter_map(pair).collect())
        };
        let sources = |set: &str| -> Result<BTreeSet<IpAddr>> {
            let elements = self.elements(set)?;
            Ok(elements.iter().filter_map(|element| element.as_str()?.parse().ok()).collect())
        };
        Ok(Seen {
            direct: pairs("direct4")?.into_iter().chain(pairs("direct6")?).collect(),
            udp: sources("udp4")?,
            relay: sources("relay4")?,
        })
    }

    fn elements(&self, set: &str) -> Result<Vec<Value>> {
        let text = self.world.lab().internet().shell(&format!("nft -j list set inet judge {set}"))?;
        let said: Value = serde_json::from_str(&text)?;
        let sets = said["nftables"].as_array().context("no list")?;
        let found = sets.iter().find_map(|entry| entry.get("set")).context("no set")?;
        Ok(found["elem"].as_array().cloned().unwrap_or_default())
    }
}

impl Seen {
    /// Whether WireGuard's packets went from one of these addresses to one of those.
    pub(crate) fn went(&self, from: &[IpAddr], to: &[IpAddr]) -> bool {
        from.iter().any(|from| to.iter().any(|to| self.direct.contains(&(*from, *to))))
    }
}

/// The addresses that a node has on the Internet, IPv4 first.
pub(crate) fn public_addresses(ipv4: Ipv4Addr, ipv6: Option<std::net::Ipv6Addr>) -> Vec<IpAddr> {
    std::iter::once(IpAddr::from(ipv4)).chain(ipv6.map(IpAddr::from)).collect()
}
