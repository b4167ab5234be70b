//! Prefixes into an nftables set: our netlink beside the program `nft`.
//!
//! Both begin with the same list of prefixes in memory and end when the kernel has committed; each has a network
//! namespace of its own. The set is what the data plane uses for the mesh's targets: intervals of IPv4 addresses.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fairlead_address::{IntervalSet, IpFamily};
use fairlead_netlink::nftables::{self, Difference, Elements, Table};
use fairlead_netlink::{Family, Socket};
use ipnet::{IpNet, Ipv4Net};
use testbed_lab::{Lab, Namespace};

use crate::report::{Measurement, milliseconds};
use crate::{Options, progress};

pub(crate) const CASE: &str = "nft";
const SIZES: [u32; 2] = [1_000, 10_000];
const ROUNDS: usize = 7;
const TABLE: &str = "bench";
const SET: &str = "targets";
/// Reads the set back before every change, as the data plane does: the kernel's dump is the truth.
const OURS: &str = "fairlead";
/// Gets what the set holds, to show what reading costs.
const OURS_WITHOUT_READING: &str = "fairlead, no read";
const PEER: &str = "nft";
/// The kernel frees the elements of a deleted table in the background; that must not fall into the next sample.
const REST: Duration = Duration::from_millis(100);

pub(crate) fn run(_: Options) -> Result<Vec<Measurement>> {
    let lab = Lab::new()?;
    let mut ours = Ours::new(lab.bare_namespace("ours")?)?;
    let peer = Peer { namespace: lab.bare_namespace("nft")? };
    let mut measurements = Vec::new();
    for size in SIZES {
        progress(&format!("    {size} prefixes"));
        measurements.extend(measure(&mut ours, &peer, size)?);
    }
    Ok(measurements)
}

fn measure(ours: &mut Ours, peer: &Peer, size: u32) -> Result<Vec<Measurement>> {
    let prefixes = (0..size).map(prefix).collect::<Result<Vec<IpNet>>>()?;
    let one = prefix(size)?;
    let expected = usize::try_from(size)?;
    let [mut loads, mut peer_loads, mut changes, mut blind_changes, mut peer_changes] =
        [const { Vec::new() }; 5];
    for _ in 0..ROUNDS {
        loads.push(timed(|| ours.load(&prefixes))?);
        peer_loads.push(timed(|| peer.load(&prefixes))?);
        changes.push(timed(|| ours.add_and_delete(&one))?);
        blind_changes.push({
            let present = ours.held()?;
            timed(|| ours.add_and_delete_knowing(&present, &one))?
        });
        peer_changes.push(timed(|| peer.add_and_delete(&one))?);
        for (subject, held) in [(OURS, ours.held()?.intervals().len()), (PEER, peer.held()?)] {
            ensure!(held == expected, "{subject} left {held} prefixes in the set instead of {expected}");
        }
        ours.clear()?;
        peer.clear()?;
        thread::sleep(REST);
    }
    let (load, change) = (format!("load {size}"), format!("add and delete 1 of {size}"));
    let new = |subject, metric: &str, samples| Measurement::new(CASE, subject, metric, "ms", samples);
    Ok(vec![
        new(OURS, &load, loads)?.against(PEER),
        new(PEER, &load, peer_loads)?,
        new(OURS, &change, changes)?.against(PEER),
        new(OURS_WITHOUT_READING, &change, blind_changes)?.against(PEER),
        new(PEER, &change, peer_changes)?,
    ])
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(milliseconds(start.elapsed()))
}

/// The `number`-th of many /28 that neither overlap nor touch, so that none can be merged with another.
fn prefix(number: u32) -> Result<IpNet> {
    let offset = number.checked_mul(32).context("too many prefixes")?;
    let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 0).to_bits().saturating_add(offset));
    Ok(Ipv4Net::new(address, 28)?.into())
}

/// Our netlink.
struct Ours {
    socket: Socket,
}

impl Ours {
    fn new(namespace: Namespace) -> Result<Self> {
        // The socket keeps the network namespace it was opened in.
        Ok(Self { socket: namespace.run(|| Socket::open(Family::Netfilter))?? })
    }

    fn load(&mut self, prefixes: &[IpNet]) -> Result<()> {
        let elements = IntervalSet::from_prefixes(IpFamily::V4, prefixes);
        let table = Table {
            name: TABLE.to_owned(),
            sets: BTreeMap::from([(SET.to_owned(), elements)]),
            timed: BTreeMap::new(),
            maps: BTreeMap::new(),
            chains: BTreeMap::new(),
        };
        Ok(nftables::commit(&mut self.socket, &nftables::create(&table)?)?)
    }

    fn add_and_delete(&mut self, one: &IpNet) -> Result<()> {
        let before = self.held()?;
        let addresses = before.covered();
        self.change(&before.difference(&with(&addresses, one)))?;
        let deleted = self.held()?.difference(&addresses);
        self.change(&deleted)
    }

    fn add_and_delete_knowing(&mut self, present: &Elements, one: &IpNet) -> Result<()> {
        let before = present.covered();
        let added = present.difference(&with(&before, one));
        self.change(&added)?;
        let deleted = present.clone().after(&added).difference(&before);
        self.change(&deleted)
    }

    fn change(&mut self, difference: &Difference) -> Result<()> {
        let messages = nftables::change_elements(TABLE, SET, difference)?;
        Ok(nftables::commit(&mut self.socket, &messages)?)
    }

    fn held(&mut self) -> Result<Elements> {
        let table = nftables::read(&mut self.socket, TABLE)?;
        table.and_then(|mut table| table.sets.remove(SET)).context("our set is not in the kernel")
    }

    fn clear(&mut self) -> Result<()> {
        Ok(nftables::commit(&mut self.socket, &nftables::delete(TABLE)?)?)
    }
}

fn with(present: &IntervalSet, one: &IpNet) -> IntervalSet {
    IntervalSet::from_prefixes(IpFamily::V4, present.prefixes().iter().chain([one]))
}

/// The program `nft`, a process per transaction.
struct Peer {
    namespace: Namespace,
}

impl Peer {
    fn load(&self, prefixes: &[IpNet]) -> Result<()> {
        let mut text =
            format!("table inet {TABLE} {{\nset {SET} {{\ntype ipv4_addr\nflags interval\nelements = {{\n");
        for prefix in prefixes {
            writeln!(text, "{prefix},")?;
        }
        text.push_str("}\n}\n}\n");
        self.nft(&["-f", "-"], &text).map(drop)
    }

    fn add_and_delete(&self, one: &IpNet) -> Result<()> {
        let one = format!("{{ {one} }}");
        for verb in ["add", "delete"] {
            self.nft(&[verb, "element", "inet", TABLE, SET, &one], "")?;
        }
        Ok(())
    }

    fn held(&self) -> Result<usize> {
        Ok(self.nft(&["list", "set", "inet", TABLE, SET], "")?.matches("/28").count())
    }

    fn clear(&self) -> Result<()> {
        self.nft(&["delete", "table", "inet", TABLE], "").map(drop)
    }

    fn nft(&self, arguments: &[&str], input: &str) -> Result<String> {
        let mut child = self
            .namespace
            .command("nft")?
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run nft: install the Debian package nftables")?;
        // `nft` reads all of it before it says anything, so neither side can wait for the other.
        let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().context("cannot wait for nft")?;
        if !output.status.success() {
            let words = arguments.join(" ");
            // It repeats its input, all in one line perhaps.
            let errors: String = String::from_utf8_lossy(&output.stderr).chars().take(300).collect();
            bail!("nft {words} failed ({}): {}", output.status, errors.trim());
        }
        written.context("nft did not read its input")?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_cannot_be_merged() {
        let prefixes: Vec<IpNet> = (0..10_000).map(|number| prefix(number).unwrap()).collect();
        assert_eq!(IntervalSet::from_prefixes(IpFamily::V4, &prefixes).len(), prefixes.len());
    }

    #[test]
    fn both_load_the_same_set_and_leave_it_after_a_change() {
        let lab = Lab::new().unwrap();
        let (namespace, other) = (lab.bare_namespace("ours").unwrap(), lab.bare_namespace("nft").unwrap());
        let mut ours = Ours::new(namespace.clone()).unwrap();
        let peer = Peer { namespace: other.clone() };
        let measurements = measure(&mut ours, &peer, 20).unwrap();
        assert!(measurements.iter().all(|one| one.samples.len() == ROUNDS));
        let prefixes: Vec<IpNet> = (0..20).map(|number| prefix(number).unwrap()).collect();
        ours.load(&prefixes).unwrap();
        peer.load(&prefixes).unwrap();
        let [mine, theirs] = [namespace, other].map(|one| one.shell("nft list ruleset").unwrap());
        assert_eq!(mine, theirs);
    }
}
