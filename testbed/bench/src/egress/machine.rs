//! Our tunnels beside those of the kernel's fou, in a VM whose kernel has it: the same transfer between two network namespaces of each.
//!
//! Everything there is emulated: only the ratios mean something.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use fairlead_address::IpFamily;
use testbed_vm::{Options as VmOptions, Vm};

use super::flow::{self, Flow, Load, Sample};
use super::{End, Extent, in_turns, repeated};
use crate::probe_socket::stripped;
use crate::report::Measurement;

const OURS: &str = "fairlead, in a VM";
const KERNEL: &str = "kernel fou, in a VM";
/// Names of the namespaces, left and right, of both subjects.
const PAIRS: [[&str; 2]; 2] = [["ours1", "ours2"], ["kernel1", "kernel2"]];

const FLOWS: [Flow; 4] = [
    Flow { family: IpFamily::V4, load: Load::Tcp(1) },
    Flow { family: IpFamily::V4, load: Load::Udp },
    Flow { family: IpFamily::V6, load: Load::Tcp(1) },
    Flow { family: IpFamily::V6, load: Load::Udp },
];

pub(super) fn run(extent: Extent) -> Result<Vec<Measurement>> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    run_with(&stripped(&own, directory.path())?, extent)
}

/// With this program, which sets up our ends.
fn run_with(program: &Path, extent: Extent) -> Result<Vec<Measurement>> {
    let files = vec![program.to_owned()];
    let mut vm = Vm::start(&VmOptions { files, memory_mib: 1536, ..VmOptions::default() })?;
    vm.shell(&set_up(program)?)?;
    let mut measurements = Vec::new();
    for flow in FLOWS {
        // Not counted: neighbours, and what is translated on first use.
        for subject in [0, 1] {
            repeated(|| transfer(&mut vm, subject, flow, 1), &format!("{flow}, first transfer"));
        }
        measurements.extend(in_turns([OURS, KERNEL], flow, extent, |subject| {
            transfer(&mut vm, subject, flow, extent.seconds)
        })?);
    }
    Ok(measurements)
}

/// Transfer from the left to the right namespace of a subject.
fn transfer(vm: &mut Vm, subject: usize, flow: Flow, seconds: usize) -> Result<Sample> {
    let [left, _] = PAIRS.get(subject).context("there are two subjects")?;
    let script = flow::script(flow, &inner(flow.family, 2).to_string(), seconds);
    flow::parse(&vm.shell(&format!("ip netns exec {left} sh -e <<'END'\n{script}\nEND"))?)
}

/// The address of an end, outside of the tunnel.
fn outer(family: IpFamily, end: u8) -> IpAddr {
    match family {
        IpFamily::V4 => [10, 0, 0, end].into(),
        IpFamily::V6 => [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(end)].into(),
    }
}

/// Inside of it.
fn inner(family: IpFamily, end: u8) -> IpAddr {
    match family {
        IpFamily::V4 => [10, 9, 0, end].into(),
        IpFamily::V6 => [0xfd00, 9, 0, 0, 0, 0, 0, u16::from(end)].into(),
    }
}

/// Both pairs of namespaces, each with a cable, tunnels and an iperf3 server at the right end.
fn set_up(program: &Path) -> Result<String> {
    let mut script = "modprobe -a fou fou6\n".to_owned();
    for (pair, is_ours) in PAIRS.into_iter().zip([true, false]) {
        let [left, right] = pair;
        script.push_str(&format!(
            "ip netns add {left}; ip netns add {right}\n\
             ip link add eth0 netns {left} type veth peer name eth0 netns {right}\n"
        ));
        for (namespace, end) in [(left, 1), (right, 2)] {
            script.push_str(&format!("ip netns exec {namespace} sh -e <<'END'\n{}END\n", host(end)));
        }
        for (namespace, end, other) in [(left, 1, 2), (right, 2, 1)] {
            let tunnels = if is_ours { our_tunnels(program, end, other) } else { kernel_tunnels(end, other) };
            script.push_str(&format!("ip netns exec {namespace} sh -e <<'END'\n{tunnels}END\n"));
        }
        script.push_str(&format!("ip netns exec {right} iperf3 --server --daemon >/dev/null 2>&1\n"));
    }
    Ok(script)
}

fn host(end: u8) -> String {
    let mut script = "ip link set lo up; ip link set eth0 up\n\
        sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0\n"
        .to_owned();
    for (family, length, host) in [(IpFamily::V4, 24, 32), (IpFamily::V6, 64, 128)] {
        let nodad = if family == IpFamily::V6 { "nodad" } else { "" };
        let (outer, inner) = (outer(family, end), inner(family, end));
        script.push_str(&format!(
            "ip addr add {outer}/{length} dev eth0 {nodad}; ip addr add {inner}/{host} dev lo {nodad}\n"
        ));
    }
    script
}

fn our_tunnels(program: &Path, end: u8, other: u8) -> String {
    let addresses = |end| IpFamily::BOTH.map(|family| outer(family, end));
    let words = End::Peer { own: addresses(end), other: addresses(other) }.arguments().join(" ");
    let mut script = format!("{} {words}\n", program.display());
    for family in IpFamily::BOTH {
        let name = fairlead_fou::link_name(outer(family, other));
        script.push_str(&route(family, end, other, &name));
    }
    script
}

fn kernel_tunnels(end: u8, other: u8) -> String {
    let mut script = "ip fou add port 5555 ipproto 4; ip -6 fou add port 5555 ipproto 41\n".to_owned();
    for (family, name, kind) in [
        (IpFamily::V4, "kernel4", "ipip mode any"),
        // Without the option that ours does not send either.
        (IpFamily::V6, "kernel6", "ip6tnl mode any encaplimit none"),
    ] {
        let (local, remote) = (outer(family, end), outer(family, other));
        script.push_str(&format!(
            "ip link add {name} type {kind} local {local} remote {remote} ttl 225 \
                 encap fou encap-sport 5555 encap-dport 5555\n\
             ip link set {name} up\n"
        ));
        script.push_str(&route(family, end, other, name));
    }
    script
}

fn route(family: IpFamily, end: u8, other: u8, link: &str) -> String {
    format!("ip route add {} dev {link} src {}\n", inner(family, other), inner(family, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe_socket::stripped_debug_build;

    /// Traffic flows through both, with the debug build of this program beside the one of its tests.
    #[test]
    #[ignore = "boots a VM: cargo build -p fairlead-bench && cargo test -p fairlead-bench -- --ignored both_kinds_of_tunnels"]
    fn packets_go_through_both_kinds_of_tunnels() {
        let directory = tempfile::tempdir().unwrap();
        let program = stripped_debug_build(directory.path()).unwrap();
        let measurements = run_with(&program, Extent { rounds: 1, seconds: 1 }).unwrap();
        println!("{}", crate::report::table(&measurements));
        assert_eq!(measurements.len(), 4 * FLOWS.len());
    }
}
