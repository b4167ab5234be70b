//! Time in which a node decides who its peers are.

use std::hint::black_box;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use fairlead_keys::PublicKey;
use fairlead_topology::{Member, Policy, plan};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::report::{Measurement, milliseconds};
use crate::{Options, progress};

pub(crate) const CASE: &str = "plan";
const SIZES: [u32; 2] = [1_000, 10_000];
const SAMPLES: usize = 7;

pub(crate) fn run(_: Options) -> Result<Vec<Measurement>> {
    SIZES.iter().map(|size| measure(*size)).collect()
}

fn measure(size: u32) -> Result<Measurement> {
    progress(&format!("    {size} members"));
    let members = (0..size).map(member).collect::<Result<Vec<Member>>>()?;
    let policy = Policy::new(name(0));
    let mut samples = Vec::new();
    // The first one is not counted: it finds caches and allocator cold.
    for _ in 0..=SAMPLES {
        let start = Instant::now();
        let decided = black_box(plan(black_box(&members), &policy));
        samples.push(milliseconds(start.elapsed()));
        ensure!(
            decided.peers.len().checked_add(1) == Some(members.len()) && decided.problems.is_empty(),
            "the plan for {size} members has {} peers and {} problems",
            decided.peers.len(),
            decided.problems.len()
        );
    }
    samples.remove(0);
    Measurement::new(CASE, "fairlead", format!("{size} members"), "ms", samples)
}

/// A dual-stack node with one address and one block per family.
pub(crate) fn member(number: u32) -> Result<Member> {
    let mut key = [7; 32];
    if let Some(head) = key.first_chunk_mut() {
        *head = number.to_be_bytes();
    }
    Ok(Member {
        public_key: Some(PublicKey(key)),
        claims: vec![ipv4([172, 16, 0, 0], number, 32)?, ipv6(0x2001_0db8, number, 128)?],
        blocks: vec![ipv4([10, 0, 0, 0], number, 27)?, ipv6(0xfd00_0000, number, 123)?],
        ..Member::named(name(number))
    })
}

pub(crate) fn name(number: u32) -> String {
    format!("node-{number}")
}

/// The `number`-th prefix of this length from `base` on.
fn ipv4(base: [u8; 4], number: u32, length: u8) -> Result<IpNet> {
    let size = 1_u32.checked_shl(u32::from(32_u8.saturating_sub(length))).context("a prefix too wide")?;
    let offset = number.checked_mul(size).context("too many prefixes")?;
    let address = Ipv4Addr::from_bits(Ipv4Addr::from(base).to_bits().saturating_add(offset));
    Ok(Ipv4Net::new(address, length)?.into())
}

/// The same for IPv6, `base` being the first 32 bits.
fn ipv6(base: u32, number: u32, length: u8) -> Result<IpNet> {
    let size = 1_u128.checked_shl(u32::from(128_u8.saturating_sub(length))).context("a prefix too wide")?;
    let offset = u128::from(number).checked_mul(size).context("too many prefixes")?;
    let address = Ipv6Addr::from_bits((u128::from(base) << 96).saturating_add(offset));
    Ok(Ipv6Net::new(address, length)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_have_prefixes_of_their_own() {
        let shown: Vec<String> = [member(0), member(300)]
            .map(|m| m.unwrap())
            .iter()
            .map(|m| format!("{:?} {:?}", m.claims, m.blocks))
            .collect();
        assert_eq!(
            shown,
            [
                "[172.16.0.0/32, 2001:db8::/128] [10.0.0.0/27, fd00::/123]",
                "[172.16.1.44/32, 2001:db8::12c/128] [10.0.37.128/27, fd00::2580/123]",
            ]
        );
        assert_ne!(member(1).unwrap().public_key, member(256).unwrap().public_key);
    }
}
