//! Cost of an open path socket for the kernel's WireGuard, in a VM whose kernel has it: TCP through a tunnel between two network
//! namespaces, without a path socket and with each of both kinds at both ends, in turns.
//!
//! Everything there is emulated: only the ratios mean something.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use fairlead_dataplane::wireguard::{PortAccess, Preference, Settings, open};
use testbed_vm::{Options as VmOptions, Vm};

use crate::report::Measurement;
use crate::tunnel::iperf;
use crate::{Effort, Options, progress};

pub(crate) const CASE: &str = "probe-socket";
/// The word that makes this program hold a path socket open.
pub(crate) const HOLD_COMMAND: &str = "hold-path-socket";
const INTERFACE: &str = "wg0";
const MTU: u32 = 1420;
const WITHOUT: &str = "no path socket";
/// Both namespaces, and the last byte of their addresses in the tunnel and outside of it.
const ENDS: [(&str, u8); 2] = [("left", 1), ("right", 2)];

/// Cases that are measured in turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    With(PortAccess),
    Without,
}

const SUBJECTS: [Subject; 3] =
    [Subject::Without, Subject::With(PortAccess::Nftables), Subject::With(PortAccess::RawSocket)];

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Self::With(access) => access.name(),
            Self::Without => WITHOUT,
        }
    }
}

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let rounds = if options.effort == Effort::Quick { 3 } else { 12 };
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    let program = stripped(&own, directory.path())?;
    let files = vec![program.clone()];
    let mut vm = Vm::start(&VmOptions { files, memory_mib: 1536, ..VmOptions::default() })?;
    vm.shell(&set_up())?;
    // Not counted: the first handshake.
    transfer(&mut vm)?;
    let mut all = SUBJECTS.map(|subject| (subject, Vec::new()));
    for round in 1..=rounds {
        // Each begins as often as the others.
        all.rotate_left(1);
        for (subject, samples) in &mut all {
            let name = subject.name();
            let throughput = measure(&mut vm, &program, *subject).context(name)?;
            progress(&format!("    round {round} of {rounds}, {name}: {throughput:.0} Mbit/s"));
            samples.push(throughput);
        }
    }
    let measurement = |(subject, samples): (Subject, Vec<f64>)| {
        let measurement = Measurement::new(CASE, subject.name(), "TCP", "Mbit/s", samples)?;
        Ok(if subject == Subject::Without { measurement } else { measurement.against(WITHOUT) })
    };
    all.into_iter().map(measurement).collect()
}

/// Opens the path sockets, sends, and closes them.
fn measure(vm: &mut Vm, program: &Path, subject: Subject) -> Result<f64> {
    let Subject::With(access) = subject else { return transfer(vm) };
    for (namespace, _) in ENDS {
        // The same as in the test of raw sockets: a firewall behind the table that knows WireGuard's port alone.
        let firewall = if access == PortAccess::RawSocket { LATE_FIREWALL } else { "" };
        vm.shell(&format!(
            "ip netns exec {namespace} nft -f - <<'END'\n{firewall}END\n\
             ip netns exec {namespace} {program} {HOLD_COMMAND} >/tmp/{namespace} 2>&1 &\necho $! >/tmp/{namespace}.pid\n\
             until grep -q '^{access}$' /tmp/{namespace}; do kill -0 $(cat /tmp/{namespace}.pid) || {{ cat /tmp/{namespace} >&2; exit 1; }}\n\
             sleep 0.1; done",
            program = program.display(),
            access = access.name(),
        ))?;
    }
    let throughput = transfer(vm)?;
    for (namespace, _) in ENDS {
        vm.shell(&format!(
            "pid=$(cat /tmp/{namespace}.pid)\nkill $pid\nwhile kill -0 $pid 2>/dev/null; do sleep 0.1; done\n\
             ip netns exec {namespace} nft flush ruleset"
        ))?;
    }
    Ok(throughput)
}

const LATE_FIREWALL: &str = "\
table inet late {
  chain input {
    type filter hook input priority 300;
    meta l4proto udp udp dport != 51820 drop
  }
}
";

/// Namespaces with a cable between them, a tunnel, and an iperf3 server at its right end.
fn set_up() -> String {
    let mut script = "umask 077\n".to_owned();
    for (namespace, _) in ENDS {
        script.push_str(&format!(
            "wg genkey >/tmp/{namespace}.key\nip netns add {namespace}\nip -n {namespace} link set lo up\n"
        ));
    }
    script.push_str("ip link add cable netns left type veth peer name cable netns right\n");
    let [(left, _), (right, _)] = ENDS;
    for (namespace, number) in ENDS {
        let (peer, other) = if namespace == left { (right, 2) } else { (left, 1) };
        script.push_str(&format!(
            "ip -n {namespace} addr add 192.0.2.{number}/24 dev cable\nip -n {namespace} link set cable up\n\
             ip -n {namespace} link add {INTERFACE} mtu {MTU} type wireguard\n\
             ip netns exec {namespace} wg set {INTERFACE} listen-port 51820 fwmark 0x20 private-key /tmp/{namespace}.key \
             peer $(wg pubkey </tmp/{peer}.key) endpoint 192.0.2.{other}:51820 allowed-ips 10.77.0.{other}/32\n\
             ip -n {namespace} addr add 10.77.0.{number}/24 dev {INTERFACE}\nip -n {namespace} link set {INTERFACE} up\n"
        ));
    }
    script.push_str("ip netns exec right iperf3 --server --daemon >/dev/null 2>&1\n");
    script.push_str("ip netns exec left ping -c 1 -W 10 10.77.0.2 >/dev/null\n");
    script
}

/// Mbit/s of TCP payload that arrive.
fn transfer(vm: &mut Vm) -> Result<f64> {
    let output = vm.shell("ip netns exec left iperf3 --json --client 10.77.0.2 --time 4 --omit 1")?;
    let arrived = iperf::parse(&output)?;
    ensure!(arrived.bytes > 0.0, "nothing came through the tunnel");
    Ok(arrived.bits_per_second / 1e6)
}

/// Holds a path socket of the device open until it is killed, and says of which kind it is.
pub(crate) fn hold() -> Result<()> {
    let interface = INTERFACE.to_owned();
    let settings = Settings { interface, mtu: MTU, preference: Preference::Kernel, handover_socket: None };
    let device = open(&settings)?;
    let socket = device.open_path_socket()?.context("the path socket is open")?;
    let health = socket.maintain();
    ensure!(health.families.len() == 2, "{health:?}");
    crate::print(health.access.name())?;
    loop {
        thread::park();
    }
}

/// The debug build of this program, which lies beside the directory of its tests, without its symbols.
#[cfg(test)]
pub(crate) fn stripped_debug_build(directory: &Path) -> Result<PathBuf> {
    let tests = std::env::current_exe().context("cannot find out where the tests are")?;
    let builds = tests.parent().and_then(Path::parent).context("the tests lie in no target directory")?;
    stripped(&builds.join("fairlead-bench"), directory)
}

/// A program without its symbols: all files of a VM lie in its memory.
pub(crate) fn stripped(program: &Path, directory: &Path) -> Result<PathBuf> {
    let copy = directory.join("fairlead-bench");
    let status = Command::new("strip").arg("-o").args([&copy, program]).status();
    let status = status.context("cannot run strip: install the Debian package binutils")?;
    ensure!(status.success(), "strip {}: {status}", program.display());
    Ok(copy)
}
