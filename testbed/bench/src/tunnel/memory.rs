//! Memory of a device that knows many peers and moves no packets.

use std::fmt::{self, Write};
use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fairlead_keys::{PrivateKey, PublicKey};
use testbed_lab::{Lab, Namespace};

use super::pair::{INTERFACE, PORT, wait_for_device};
use super::subject::{Programs, Subject};
use super::turns::{Quantity, Series, in_turns, rows};
use crate::cpu;
use crate::report::Measurement;

/// Subjects with figures in `docs/benchmarks.md`.
const SUBJECTS: [Subject; 2] = [Subject::Fairlead, Subject::WireguardGo];
const ONE: u16 = 1;
const SOME: u16 = 1000;
const MANY: u16 = 10_000;
/// Peers that `wg addconf` adds at once: a device may bound the length of a request.
const CHUNK: u16 = 1000;
/// After the last peer was added.
const SETTLE: Duration = Duration::from_secs(3);

/// KiB (`VmRSS`).
#[derive(Debug, Clone, Copy, PartialEq)]
struct Resident(f64);

impl fmt::Display for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} KiB", self.0)
    }
}

pub(super) fn run(lab: &Lab, programs: &Programs, rounds: usize) -> Result<Vec<Measurement>> {
    let [one, some, many] = [ONE, SOME, MANY].map(|peers| {
        let what = format!("memory, peers: {peers}");
        let series = in_turns(&what, rounds, &SUBJECTS, |subject| resident(lab, programs, subject, peers));
        (what, series)
    });
    let of_each = many.1.iter().zip(&one.1).map(|(many, one)| many.combined(one, per_peer));
    let of_each: Vec<Series<f64>> = of_each.collect();
    let mut measurements = Vec::new();
    for (metric, series) in [one, some, many] {
        let quantity = Quantity::new(metric, "KiB", Subject::is_tunnel, |sample: &Resident| sample.0);
        measurements.extend(rows(&series, &quantity)?);
    }
    let metric = "memory of an idle peer".to_owned();
    let quantity = Quantity::new(metric, "bytes", Subject::is_tunnel, |sample: &f64| *sample);
    measurements.extend(rows(&of_each, &quantity)?);
    Ok(measurements)
}

/// Bytes of each peer beyond the first.
fn per_peer(many: &Resident, one: &Resident) -> f64 {
    (many.0 - one.0) * 1024.0 / f64::from(MANY.saturating_sub(ONE))
}

/// Resident memory of a new device with so many peers.
fn resident(lab: &Lab, programs: &Programs, subject: Subject, peers: u16) -> Result<Resident> {
    let outputs = tempfile::tempdir().context("cannot create a directory for outputs")?;
    let namespace = lab.bare_namespace(&format!("{subject}-{peers}-peers"))?;
    let mut command = programs.device(subject).with_context(|| format!("{subject} has no device"))?;
    let mut device = namespace.spawn(&mut command, outputs.path().join("device"))?;
    wait_for_device(&namespace, &mut device)?;
    let file = outputs.path().join("configuration");
    let set = |word: &str, lines: &str| -> Result<String> {
        fs::write(&file, lines).context("cannot write a configuration")?;
        namespace.shell(&format!("wg {word} {INTERFACE} {}", file.display()))
    };
    set("setconf", &interface())?;
    for first in (0..peers).step_by(usize::from(CHUNK)) {
        set("addconf", &peer_sections(first, peers.min(first.saturating_add(CHUNK))))?;
    }
    namespace.shell(&format!("ip link set {INTERFACE} up"))?;
    thread::sleep(SETTLE);
    let resident = cpu::resident_mib(device.id())? * 1024.0;
    // Only now: the answer takes memory, too.
    let known = known_peers(&namespace)?;
    ensure!(known == usize::from(peers), "{subject} knows {known} of {peers} peers");
    Ok(Resident(resident))
}

fn known_peers(namespace: &Namespace) -> Result<usize> {
    Ok(namespace.shell(&format!("wg show {INTERFACE} peers"))?.lines().count())
}

fn interface() -> String {
    format!("[Interface]\nPrivateKey = {}\nListenPort = {PORT}\n", PrivateKey([1; 32]).to_base64())
}

/// The peers from one number to below another, each with an endpoint and a prefix.
fn peer_sections(from: u16, to: u16) -> String {
    let mut lines = String::new();
    for number in from..to {
        let [high, low] = number.to_be_bytes();
        let mut key = [9; 32];
        key.iter_mut().zip([high, low]).for_each(|(byte, value)| *byte = value);
        let key = PublicKey(key);
        // Writing to a string cannot fail.
        let _ = writeln!(
            lines,
            "[Peer]\nPublicKey = {key}\nEndpoint = 198.18.{high}.{low}:{PORT}\nAllowedIPs = 10.64.{high}.{low}/32"
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_peer_has_its_own_key_and_prefix() {
        let lines = peer_sections(0, MANY);
        for field in ["PublicKey", "Endpoint", "AllowedIPs"] {
            let values: BTreeSet<&str> = lines.lines().filter(|line| line.starts_with(field)).collect();
            assert_eq!(values.len(), usize::from(MANY), "{field}");
        }
        assert!(lines.contains("AllowedIPs = 10.64.39.15/32\n"), "the last one");
    }

    #[test]
    fn the_first_peer_does_not_count() {
        assert!((per_peer(&Resident(19_998.0), &Resident(9_999.0)) - 1024.0).abs() < 1e-9);
    }
}
