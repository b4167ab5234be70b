//! The kernel's WireGuard and the embedded one in the same VM, whose kernel has WireGuard: the same transfer between two network namespaces of
//! each, in turns.
//!
//! The cost of a transfer is the time of all processors of the VM, since the kernel's WireGuard works in softirqs and kworkers, which are
//! no process's. iperf3 and TCP are part of it for both.

use std::path::Path;

use anyhow::{Context, Result};
use fairlead_address::IpFamily;
use testbed_vm::{Options as VmOptions, Vm};

use super::load::Load;
use super::pair::{LEFT, MTU, RIGHT, configuration, inner_address, outer_address};
use super::plots::{self, Chart};
use super::{CIPHER_COMMAND, DEVICE_COMMAND, OURS};
use crate::egress::flow::{self, Flow, Sample};
use crate::egress::{Extent, repeated, samples_in_turns};
use crate::probe_socket::stripped;
use crate::report::Measurement;
use crate::{Options, progress};

pub(crate) const CASE: &str = "tunnel-kernel";
const KERNEL: &str = "kernel";
const SUBJECTS: [&str; 2] = [OURS, KERNEL];
/// Names of the namespaces, left and right, of both subjects, and of the WireGuard interfaces in them: control sockets of embedded ones
/// share a directory.
const PAIRS: [[&str; 2]; 2] = [["ours1", "ours2"], ["kernel1", "kernel2"]];
/// TCP connections at once.
const STREAMS: [u8; 2] = [1, 4];
/// Not counted: handshakes, and code that is translated on first use.
const WARM_UP_SECONDS: usize = 1;
/// Seconds and rounds without options.
const FULL: Extent = Extent { rounds: 5, seconds: 4 };

const CHARTS: [Chart; 2] = [
    Chart {
        file: "tunnel-kernel-throughput.svg",
        title: "WireGuard in a VM: what arrives",
        unit: "Gbit/s",
        metric: "",
        highlighted: OURS,
    },
    Chart {
        file: "tunnel-kernel-cpu.svg",
        title: "WireGuard in a VM: CPU time of the whole VM",
        unit: "s/GB",
        metric: "",
        highlighted: OURS,
    },
];

/// Measures TCP through both.
pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    let measurements = run_with(&stripped(&own, directory.path())?, Extent::of(options, FULL))?;
    plots::write(CASE, &CHARTS, &measurements);
    Ok(measurements)
}

/// With this program as the embedded device.
fn run_with(program: &Path, extent: Extent) -> Result<Vec<Measurement>> {
    let files = vec![program.to_owned()];
    let options = VmOptions { files, memory_mib: 1536, may_use_kvm: true, ..VmOptions::default() };
    let mut vm = Vm::start(&options)?;
    progress(&describe(vm.is_emulated(), &vm.shell("uname -r; grep -m 1 '^flags' /proc/cpuinfo")?));
    vm.shell(&set_up(program))?;
    let mut measurements = Vec::new();
    for streams in STREAMS {
        let what = Load::Tcp(streams).to_string();
        for subject in [0, 1] {
            let first = || transfer(&mut vm, subject, streams, WARM_UP_SECONDS);
            repeated(first, &format!("{what}, first transfer"));
        }
        let samples = samples_in_turns(SUBJECTS, &what, extent, |subject| {
            transfer(&mut vm, subject, streams, extent.seconds)
        });
        measurements.extend(rows(&what, &samples)?);
    }
    let ciphers = (0..extent.rounds).map(|_| cipher(&mut vm, program)).collect::<Result<_>>()?;
    measurements.push(Measurement::new(CASE, OURS, "CPU, cipher alone", "s/GB", ciphers)?);
    Ok(measurements)
}

/// Seconds of CPU for 10⁹ bytes of payload, of the cipher that the embedded one uses.
fn cipher(vm: &mut Vm, program: &Path) -> Result<f64> {
    let output = vm.shell(&format!("{} {CIPHER_COMMAND}", program.display()))?;
    output.trim().parse().with_context(|| format!("the cipher's time is no number: {output:?}"))
}

/// Transfer from the left to the right namespace of a subject.
fn transfer(vm: &mut Vm, subject: usize, streams: u8, seconds: usize) -> Result<Sample> {
    let [left, _] = PAIRS.get(subject).context("there are two subjects")?;
    let flow = Flow { family: IpFamily::V4, load: flow::Load::Tcp(streams) };
    let script = flow::script(flow, &inner_address(RIGHT).to_string(), seconds);
    flow::parse(&vm.shell(&format!("ip netns exec {left} sh -e <<'END'\n{script}\nEND"))?)
}

fn rows(what: &str, samples: &[Vec<Sample>; 2]) -> Result<Vec<Measurement>> {
    let mut rows = Vec::new();
    for (metric, unit, value) in [
        (what.to_owned(), "Gbit/s", Sample::gigabits_per_second as fn(&Sample) -> f64),
        (format!("CPU, {what}"), "s/GB", Sample::cpu_seconds_per_gigabyte),
        (format!("{what}, work"), "MB/CPU s", Sample::megabytes_per_cpu_second),
    ] {
        for (subject, samples) in SUBJECTS.into_iter().zip(samples) {
            let samples = samples.iter().map(value).collect();
            let row = Measurement::new(CASE, subject, &metric, unit, samples)?;
            rows.push(if subject == OURS { row.against(KERNEL) } else { row });
        }
    }
    Ok(rows)
}

/// Description of the kernel and the processor of the VM, from the output of `uname -r` and a line of `/proc/cpuinfo`.
fn describe(is_emulated: bool, output: &str) -> String {
    let (kernel, flags) = output.split_once('\n').unwrap_or((output, ""));
    let processor = if is_emulated { "emulated processors" } else { "processors of this machine (KVM)" };
    let [kernels, ours] = implementations(flags);
    format!(
        "    Linux {kernel} on {processor}; ChaCha20-Poly1305 of the kernel: {kernels}; of fairlead: {ours}"
    )
}

/// Implementations of ChaCha20-Poly1305 that the kernel's module and aws-lc use on an x86 processor with these flags.
///
/// The kernel: `arch/x86/crypto/{chacha,poly1305}_glue.c` (Linux 6.1); aws-lc: `crypto/cipher_extra/internal.h`, its
/// `chacha20_poly1305_x86_64.pl`, and `crypto/chacha/internal.h`.
fn implementations(flags: &str) -> [&'static str; 2] {
    let has = |all: &[&str]| all.iter().all(|flag| flags.split_whitespace().any(|each| each == *flag));
    let kernel = if has(&["avx2", "avx512vl", "avx512bw"]) {
        "AVX-512"
    } else if has(&["avx", "avx2"]) {
        "AVX2"
    } else if has(&["ssse3"]) {
        "SSSE3 and no vectors"
    } else {
        "no vectors"
    };
    let ours = if has(&["sse4_1", "avx2", "bmi2"]) {
        "AVX2"
    } else if has(&["sse4_1"]) {
        "SSE4.1"
    } else if has(&["ssse3"]) {
        "SSSE3 and SSE2"
    } else {
        "no vectors and SSE2"
    };
    [kernel, ours]
}

/// Both pairs of namespaces, each with a cable, a tunnel, and an iperf3 server at the right end.
fn set_up(program: &Path) -> String {
    let mut script = "umask 077\nmodprobe -a tun wireguard\n".to_owned();
    for (subject, [left, right]) in SUBJECTS.into_iter().zip(PAIRS) {
        script.push_str(&format!(
            "ip netns add {left}; ip netns add {right}\n\
             ip link add cable netns {left} type veth peer name cable netns {right}\n"
        ));
        for (name, number) in [(left, LEFT), (right, RIGHT)] {
            let device = if subject == OURS { our_device(program, name) } else { kernel_device(name) };
            script.push_str(&end(name, number, &device));
        }
        let server = inner_address(RIGHT);
        script.push_str(&format!(
            "ip netns exec {left} ping -q -c 1 -W 20 {server} >/dev/null\n\
             ip netns exec {right} iperf3 --server --daemon >/dev/null 2>&1\n"
        ));
    }
    script
}

/// One end; `device` is what makes its interface.
fn end(name: &str, number: u8, device: &str) -> String {
    format!(
        "ip -n {name} link set lo up\nip -n {name} addr add {outer}/30 dev cable\nip -n {name} link set cable up\n\
         {device}cat >/tmp/{name}.conf <<'END'\n{configuration}END\n\
         ip netns exec {name} wg setconf {name} /tmp/{name}.conf\n\
         ip -n {name} addr add {inner}/30 dev {name}\nip -n {name} link set {name} mtu {MTU} up\n",
        outer = outer_address(number),
        inner = inner_address(number),
        configuration = configuration(number),
    )
}

/// A process that runs on, which is waited for until it answers `wg(8)`.
fn our_device(program: &Path, name: &str) -> String {
    format!(
        "ip netns exec {name} {} {DEVICE_COMMAND} {name} >/tmp/{name}.log 2>&1 &\ndevice=$!\n\
         until wg show {name} >/dev/null 2>&1; do kill -0 $device || {{ cat /tmp/{name}.log >&2; exit 1; }}; sleep 0.1; done\n",
        program.display()
    )
}

fn kernel_device(name: &str) -> String {
    format!("ip -n {name} link add {name} type wireguard\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe_socket::stripped_debug_build;

    #[test]
    fn each_implementation_takes_the_widest_vectors_that_it_knows() {
        assert_eq!(implementations("flags : fpu sse2 pni rdrand"), ["no vectors", "no vectors and SSE2"]);
        assert_eq!(implementations("flags : sse2 ssse3 sse4_1"), ["SSSE3 and no vectors", "SSE4.1"]);
        assert_eq!(implementations("flags : ssse3 sse4_1 avx avx2"), ["AVX2", "SSE4.1"]);
        let server = "flags : ssse3 sse4_1 avx avx2 bmi2 avx512f avx512bw avx512vl";
        assert_eq!(implementations(server), ["AVX-512", "AVX2"]);
        let shown = describe(true, "6.1.0-56-cloud-amd64\nflags : ssse3 sse4_1 avx avx2 bmi2\n");
        assert!(shown.contains("Linux 6.1.0-56-cloud-amd64 on emulated processors; "), "{shown}");
    }

    #[test]
    fn both_subjects_have_the_same_configuration() {
        let script = set_up(Path::new("/tmp/bench"));
        for name in PAIRS.concat() {
            assert!(script.contains(&format!("wg setconf {name} /tmp/{name}.conf\n")), "{name}: {script}");
        }
        assert_eq!(script.matches("Endpoint = 192.0.2.2:51820\n").count(), 2);
        assert!(script.contains("ip netns exec ours2 /tmp/bench device ours2 >"), "{script}");
        assert!(script.contains("ip -n kernel1 link add kernel1 type wireguard\n"), "{script}");
    }

    #[test]
    fn ours_is_divided_by_the_kernels() {
        let sample = |cpu_seconds| Sample { bytes: 1e9, bits_per_second: 8e9, cpu_seconds };
        let rows = rows("TCP, streams: 1", &[vec![sample(2.5)], vec![sample(2.0)]]).unwrap();
        let shown: Vec<_> =
            rows.iter().map(|row| (row.metric.as_str(), row.subject, row.value, row.peer)).collect();
        assert_eq!(
            shown,
            [
                ("TCP, streams: 1", OURS, 8.0, Some(KERNEL)),
                ("TCP, streams: 1", KERNEL, 8.0, None),
                ("CPU, TCP, streams: 1", OURS, 2.5, Some(KERNEL)),
                ("CPU, TCP, streams: 1", KERNEL, 2.0, None),
                ("TCP, streams: 1, work", OURS, 400.0, Some(KERNEL)),
                ("TCP, streams: 1, work", KERNEL, 500.0, None),
            ]
        );
    }

    /// Traffic flows through both, with the debug build of this program beside the one of its tests.
    #[test]
    #[ignore = "boots a VM: cargo build -p fairlead-bench && cargo test -p fairlead-bench -- --ignored the_kernels_wireguard_and_ours"]
    fn packets_go_through_the_kernels_wireguard_and_ours() {
        let directory = tempfile::tempdir().unwrap();
        let program = stripped_debug_build(directory.path()).unwrap();
        let measurements = run_with(&program, Extent { rounds: 1, seconds: 1 }).unwrap();
        println!("{}", crate::report::table(&measurements));
        assert_eq!(measurements.len(), 2 * 3 * STREAMS.len() + 1);
    }
}
