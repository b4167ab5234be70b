//! Benchmarks: what Fairlead does, measured beside what others do, in one run and in turns.
//!
//! `fairlead-bench [NAME...] [--quick] [--json] [--peers N] [--blocks N] [--rtt MS] [--rounds N]
//! [--seconds N]` runs the [`CASES`] and prints a table, or with `--json` an array of
//! [`report::Measurement`]s, to stdout; progress goes to stderr. Every sample of ours is taken next to one of the
//! peer's, so that whatever else the machine does disturbs both alike, and ratios are taken pair by pair.
//!
//! Only optimised code is measured: a debug build of this program builds the release one and becomes it.
//!
//! It asserts nothing about time and is no test: numbers depend on the machine. It does check that what was timed
//! did happen. Traffic stays inside network namespaces ([`testbed_lab`]), which vanish with the program.

mod agents;
mod cni;
mod cpu;
mod egress;
mod growth;
mod guard;
mod ipam;
mod joining;
mod mesh;
mod mesh_scale;
mod nat;
mod nft;
mod peers;
mod plan;
mod probe_socket;
mod relay;
mod release;
mod report;
mod statistics;
mod tunnel;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use report::Measurement;

const HELP: &str = "\
Usage: fairlead-bench [NAME...] [--quick] [--json] [--peers N] [--blocks N] [--rtt MS] [--rounds N] [--seconds N]

Benchmarks (all of them without a name):
  agents   1,000 agents with links to a relay, a restart of it, and a real API server (ours alone, 15 minutes)
  cni      start and end pods: ours with a real API server, and ptp with host-local (5 minutes)
  egress   through a gateway and by plain translation, and our FoU tunnels and the kernel's in a VM (15 minutes)
  growth   a cluster grows from 2 to 60 real nodes at five sites, until all reach each other (ours alone, 5 minutes)
  guard    packets that a node forwards and sends, with what keeps them in the mesh and without (ours alone, 3 minutes)
  handover embedded WireGuard under full load goes to the next process: delay and loss of a probe (ours alone, 2 minutes)
  ipam     a cluster of 1,000 nodes and 100,000 pods against a real API server (ours alone, 5 minutes)
  mesh     plan a mesh, follow a change of one member, and a discovery server under load (ours alone, 12 minutes)
  mesh-scale  1,000 and 5,000 peers, 100,000 blocks, and one real node program (ours alone, 15 minutes)
  nat      two nodes behind NATs find a path to each other: ours and iroh, every pair of kinds of NAT (20 minutes)
  nft      load prefixes into an nftables set, add and delete one: our netlink and the program nft
  plan     decide the peers of a mesh (ours alone)
  probe-socket  TCP through the kernel's WireGuard with an open path socket, and without, in a VM (5 minutes)
  relay    packets through a relay, and idle clients: ours, derper and iroh-relay (15 minutes)
  tunnel   WireGuard in user space: embedded, wireguard-go, gotatun and boringtun, the cable alone and the cipher alone (10 minutes)
  tunnel-kernel  TCP through the kernel's WireGuard and the embedded one, in a VM (3 minutes)

Options:
  --quick     fewer pods, nodes and rounds, where a benchmark would take minutes
  --json      an array of {case, subject, metric, unit, value, samples} instead of a table; value is the median
  --peers N   mesh-scale with this many peers, instead of its three sizes; agents with this many;
              growth to this many nodes; guard with so many other nodes
  --blocks N  mesh-scale with this many blocks; twice the peers without it
  --rtt MS    nat with so many milliseconds for the way between two sites and back
  --rounds N  egress, guard and tunnel-kernel with so many rounds; handover with so many hand-overs of each end
  --seconds N egress, guard and tunnel-kernel with so many seconds for each transfer

Needs root, the Debian packages binutils, iperf3, iproute2, iputils-ping, nftables and wireguard-tools, and Go. nft and
plan take 20 s each at most.
";

/// A benchmark by the name it is asked for.
struct Case {
    name: &'static str,
    run: fn(Options) -> Result<Vec<Measurement>>,
}

/// Options of a measurement; those without a value have the default of each benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Options {
    pub(crate) effort: Effort,
    /// Peers of the mesh, agents or nodes, for the one size that is measured then.
    pub(crate) peers: Option<usize>,
    /// Blocks of the mesh.
    pub(crate) blocks: Option<usize>,
    /// Milliseconds from site to site and back.
    pub(crate) rtt: Option<usize>,
    /// Samples of each subject.
    pub(crate) rounds: Option<usize>,
    /// Duration of one sample.
    pub(crate) seconds: Option<usize>,
}

/// Effort of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Effort {
    /// The effort with which the documented figures are taken.
    #[default]
    Full,
    /// Enough to see that everything works, and the order of magnitude.
    Quick,
}

const CASES: &[Case] = &[
    Case { name: agents::CASE, run: agents::run },
    Case { name: cni::CASE, run: cni::run },
    Case { name: egress::CASE, run: egress::run },
    Case { name: growth::CASE, run: growth::run },
    Case { name: guard::CASE, run: guard::run },
    Case { name: tunnel::handover::CASE, run: tunnel::handover::run },
    Case { name: ipam::CASE, run: ipam::run },
    Case { name: mesh::CASE, run: mesh::run },
    Case { name: mesh_scale::CASE, run: mesh_scale::run },
    Case { name: nat::CASE, run: nat::run },
    Case { name: nft::CASE, run: nft::run },
    Case { name: plan::CASE, run: plan::run },
    Case { name: probe_socket::CASE, run: probe_socket::run },
    Case { name: relay::CASE, run: relay::run },
    Case { name: tunnel::CASE, run: tunnel::run },
    Case { name: tunnel::kernel::CASE, run: tunnel::kernel::run },
];

/// Command of the command line.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    /// The cipher of the tunnel benchmark, once.
    Cipher,
    /// One end of the tunnel benchmark, in a process of its own: the embedded WireGuard with this interface, which may be handed over by
    /// way of a socket.
    Device {
        interface: String,
        handover_socket: Option<PathBuf>,
    },
    /// Load for a discovery server, in a process of its own.
    DiscoveryLoad(mesh::Load),
    /// An end of egress tunnels, set up in the network namespace of the program.
    EgressEnd(egress::End),
    Help,
    /// A path socket of the kernel's WireGuard, held open in the VM.
    HoldPathSocket,
    Measure {
        names: Vec<String>,
        options: Options,
        json: bool,
    },
    /// Load for `fairlead relay` at this address, in a process of its own.
    RelayLoad {
        address: String,
        pairs: usize,
        is_udp: bool,
    },
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match parse(&arguments).and_then(|command| run_command(command, &arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: &[String]) -> Result<Command> {
    if let [first, interface, rest @ ..] = arguments
        && first == tunnel::DEVICE_COMMAND
    {
        let handover_socket = rest.first().map(PathBuf::from);
        return Ok(Command::Device { interface: interface.clone(), handover_socket });
    }
    match arguments {
        [first] if first == tunnel::CIPHER_COMMAND => return Ok(Command::Cipher),
        [first] if first == probe_socket::HOLD_COMMAND => return Ok(Command::HoldPathSocket),
        _ => {}
    }
    if let [first, address, pairs, rest @ ..] = arguments
        && first == relay::LOAD_COMMAND
    {
        let pairs = pairs.parse().with_context(|| format!("{pairs:?} is no number"))?;
        let is_udp = rest.first().is_some_and(|word| word == relay::UDP);
        return Ok(Command::RelayLoad { address: address.clone(), pairs, is_udp });
    }
    if let [first, rest @ ..] = arguments
        && first == mesh::LOAD_COMMAND
    {
        return Ok(Command::DiscoveryLoad(mesh::Load::parse(rest)?));
    }
    if let [first, rest @ ..] = arguments
        && first == egress::END_COMMAND
    {
        return Ok(Command::EgressEnd(egress::End::parse(rest)?));
    }
    let (mut names, mut options, mut json) = (Vec::new(), Options::default(), false);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let number = arguments.next().with_context(|| format!("{argument} needs a number"))?;
            number.parse().with_context(|| format!("{argument} {number:?} is no number"))
        };
        match argument.as_str() {
            "--help" | "-h" => return Ok(Command::Help),
            "--blocks" => options.blocks = Some(number()?),
            "--json" => json = true,
            "--peers" => options.peers = Some(number()?),
            "--rounds" => options.rounds = Some(number()?),
            "--rtt" => options.rtt = Some(number()?),
            "--seconds" => options.seconds = Some(number()?),
            "--quick" => options.effort = Effort::Quick,
            name if CASES.iter().any(|case| case.name == name) => names.push(name.to_owned()),
            other => {
                let known: Vec<&str> = CASES.iter().map(|case| case.name).collect();
                bail!(
                    "unknown benchmark or option {other:?}: choose from {}, --quick, --json, --peers, --blocks, --rtt, --rounds and --seconds",
                    known.join(", ")
                );
            }
        }
    }
    Ok(Command::Measure { names, options, json })
}

fn run_command(command: Command, arguments: &[String]) -> Result<()> {
    match command {
        Command::Cipher => tunnel::run_cipher(),
        Command::Device { interface, handover_socket } => tunnel::run_device(&interface, handover_socket),
        Command::DiscoveryLoad(load) => load.run(),
        Command::EgressEnd(end) => end.set_up(),
        Command::Help => print(HELP),
        Command::HoldPathSocket => probe_socket::hold(),
        Command::RelayLoad { address, pairs, is_udp } => relay::run_load(&address, pairs, is_udp),
        Command::Measure { .. } if cfg!(debug_assertions) => release::become_release_build(arguments),
        Command::Measure { names, options, json } => {
            let measurements = measure(&names, options)?;
            print(&if json { report::json(&measurements)? } else { report::table(&measurements) })
        }
    }
}

/// Runs the named cases, or all; the first that fails ends it.
fn measure(names: &[String], options: Options) -> Result<Vec<Measurement>> {
    let mut all = Vec::new();
    for case in CASES.iter().filter(|case| names.is_empty() || names.iter().any(|name| name == case.name)) {
        progress(&format!("==> {}", case.name));
        let measurements = (case.run)(options).with_context(|| format!("cannot measure {}", case.name))?;
        all.extend(measurements);
    }
    Ok(all)
}

fn print(text: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{}", text.trim_end()).context("cannot write to standard output")
}

/// Writes a line about the progress to stderr, for people.
fn progress(text: &str) {
    // A closed stderr is no error.
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Command> {
        parse(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn names_and_options_come_in_any_order() {
        let names = vec!["plan".to_owned(), "nft".to_owned()];
        let options = Options { effort: Effort::Quick, ..Options::default() };
        assert_eq!(
            parsed(&["plan", "--json", "--quick", "nft"]).unwrap(),
            Command::Measure { names, options, json: true }
        );
        let options = Options { peers: Some(7), blocks: Some(100_000), ..Options::default() };
        assert_eq!(
            parsed(&["--blocks", "100000", "--peers", "7"]).unwrap(),
            Command::Measure { names: vec![], options, json: false }
        );
        assert!(parsed(&["--peers"]).is_err() && parsed(&["--peers", "many"]).is_err());
        assert_eq!(
            parsed(&[]).unwrap(),
            Command::Measure { names: vec![], options: Options::default(), json: false }
        );
        assert_eq!(parsed(&["nft", "--help"]).unwrap(), Command::Help);
        let device = |path: Option<&str>| Command::Device {
            interface: "wg0".to_owned(),
            handover_socket: path.map(PathBuf::from),
        };
        assert_eq!(parsed(&["cipher"]).unwrap(), Command::Cipher);
        assert_eq!(parsed(&["device", "wg0"]).unwrap(), device(None));
        assert_eq!(parsed(&["device", "wg0", "/run/next"]).unwrap(), device(Some("/run/next")));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let message = parsed(&["tunel"]).unwrap_err().to_string();
        assert_eq!(
            message,
            "unknown benchmark or option \"tunel\": choose from agents, cni, egress, growth, guard, handover, ipam, mesh, mesh-scale, nat, nft, plan, probe-socket, relay, tunnel, tunnel-kernel, --quick, --json, --peers, --blocks, --rtt, --rounds and --seconds"
        );
    }

    #[test]
    fn the_help_knows_every_case() {
        for case in CASES {
            assert!(HELP.contains(&format!("\n  {} ", case.name)), "{}", case.name);
        }
    }
}
