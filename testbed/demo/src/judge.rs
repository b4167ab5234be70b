//! Counters of nftables on the Internet of a world: a judge of which packets took which way.

use std::net::Ipv4Addr;

use anyhow::Context as _;
use serde_json::Value;

use crate::world::World;

/// Counts the packets of WireGuard's tunnels (type 4) between two addresses on the Internet from now on.
///
/// # Errors
/// nftables refuses the rules.
pub fn count_tunnel_packets(world: &World, from: Ipv4Addr, to: Ipv4Addr) -> anyhow::Result<()> {
    let rules = format!(
        "nft -f - <<END
table ip judge {{
  chain forward {{
    type filter hook forward priority 0;
    ip saddr {from} ip daddr {to} udp length > 20 @th,64,8 4 counter
    ip saddr {to} ip daddr {from} udp length > 20 @th,64,8 4 counter
  }}
}}
END"
    );
    world.lab().internet().shell(&rules)?;
    Ok(())
}

/// Number of packets in each direction.
///
/// # Errors
/// Nothing was counted, or nftables prints something else than rules.
pub fn counted_tunnel_packets(world: &World) -> anyhow::Result<Vec<u64>> {
    counters(&world.lab().internet().shell("nft -j list table ip judge")?)
}

/// The packets of each counter in what `nft -j` lists, in the order of the rules.
///
/// # Errors
/// These are no rules.
pub fn counters(listed: &str) -> anyhow::Result<Vec<u64>> {
    let rules: Value = serde_json::from_str(listed)?;
    let counter = |item: &Value| {
        let parts = item.pointer("/rule/expr")?.as_array()?;
        parts.iter().find_map(|part| part.pointer("/counter/packets")?.as_u64())
    };
    let items = rules.get("nftables").and_then(Value::as_array).context("nft lists no rules")?;
    Ok(items.iter().filter_map(counter).collect())
}
