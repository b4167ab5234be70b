//! Fairlead's data plane against another kernel than this machine's: one that has WireGuard and fou, and one without IPv6. Its own
//! test programs, built on this machine, run in the VM.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tempfile::TempDir;
use testbed_vm::{Options, Vm};

/// The test program of a package: `cargo xtask test` names all that it has built, each as `PACKAGE KIND PATH` on a line.
fn test_program(package: &str, kind: Kind) -> PathBuf {
    let built = std::env::var("FAIRLEAD_TEST_PROGRAMS").unwrap_or_default();
    let named = format!("{package} {} ", kind.name());
    let program = built.lines().find_map(|line| line.strip_prefix(&named));
    program.map_or_else(|| build_test(package, kind), PathBuf::from)
}

/// Kind of a package's tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Integration,
    Unit,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Integration => "integration",
            Self::Unit => "unit",
        }
    }
}

/// Builds a test program of a package; cargo says in JSON lines where it put it. The whole workspace is selected, because selecting
/// one package would build the libraries again with that package's features.
fn build_test(package: &str, kind: Kind) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let (arguments, target) = match kind {
        Kind::Integration => (&["--test", "integration"][..], "integration".to_owned()),
        Kind::Unit => (&["--lib"][..], package.replace('-', "_")),
    };
    let output = Command::new(cargo)
        .args(["test", "--workspace", "--no-run", "--message-format=json"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "cannot build the tests of {package}: {}", rendered(&messages));
    let program = json(&messages)
        .filter(|message| text(message, "/target/name").as_ref() == Some(&target))
        .filter(|message| {
            let manifest = text(message, "/manifest_path");
            manifest.is_some_and(|path| path.ends_with(&format!("/{}/Cargo.toml", directory(package))))
        })
        .find_map(|message| text(&message, "/executable"));
    assert!(program.is_some(), "cargo built no tests of {package}:\n{messages}");
    program.map(PathBuf::from).unwrap()
}

/// The directory of a package's manifest.
fn directory(package: &str) -> &str {
    package.strip_prefix("fairlead-").unwrap_or(package)
}

fn text(message: &serde_json::Value, pointer: &str) -> Option<String> {
    message.pointer(pointer)?.as_str().map(str::to_owned)
}

fn json(messages: &str) -> impl Iterator<Item = serde_json::Value> {
    messages.lines().filter_map(|line| serde_json::from_str(line).ok())
}

/// Messages as the compiler would have printed them on a terminal.
fn rendered(messages: &str) -> String {
    json(messages).filter_map(|message| text(&message, "/message/rendered")).collect()
}

/// Test programs that run in one VM, one after the other: to boot it costs more than most of them.
const PROGRAMS: [(&str, Kind); 6] = [
    ("fairlead-dataplane", Kind::Integration),
    ("fairlead-tunnel", Kind::Integration),
    ("fairlead-fou", Kind::Integration),
    ("fairlead-egress-client", Kind::Unit),
    ("fairlead-egress-gateway", Kind::Integration),
    ("fairlead-relay", Kind::Unit),
];

/// A VM with all test programs. `None` after a command that the VM did not survive.
struct Machine {
    programs: TempDir,
    vm: Option<Vm>,
}

impl Machine {
    fn new() -> Self {
        let programs = tempfile::tempdir().unwrap();
        for (package, kind) in PROGRAMS {
            strip(&test_program(package, kind), &programs.path().join(package));
        }
        Self { programs, vm: None }
    }

    fn run(&mut self, package: &str, filter: &str, requires: &str) -> Output {
        let mut vm = self.vm.take().unwrap_or_else(|| self.boot());
        let output = vm.run(&tests(&self.programs.path().join(package), filter, requires)).unwrap();
        self.vm = Some(vm);
        output
    }

    fn boot(&self) -> Vm {
        let files = PROGRAMS.map(|(package, _)| self.programs.path().join(package)).to_vec();
        Vm::start(&Options { memory_mib: 2560, files, ..Options::default() }).unwrap()
    }
}

/// The machine that all tests share for as long as one of them runs or waits for it.
static SHARED: Mutex<Weak<Mutex<Machine>>> = Mutex::new(Weak::new());

fn shared() -> Arc<Mutex<Machine>> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let machine = Arc::new(Mutex::new(Machine::new()));
        *shared = Arc::downgrade(&machine);
        machine
    })
}

fn strip(program: &Path, copy: &Path) {
    let status = Command::new("strip").arg("-o").args([copy, program]).status().unwrap();
    assert!(status.success(), "strip: {status}");
}

/// Command of those tests of a program whose names contain `filter`.
fn tests(program: &Path, filter: &str, requires: &str) -> Command {
    let mut command = Command::new(program);
    command
        .args([filter, "--include-ignored", "--nocapture", "--test-threads", "1"])
        .env(requires, "1")
        .env("RUST_BACKTRACE", "1")
        .current_dir("/root");
    command
}

fn judge(output: &Output) {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
    assert!(
        stdout.contains("test result: ok. ") && !stdout.contains("ok. 0 passed"),
        "nothing was tested:\n{stdout}"
    );
    println!("{stdout}");
}

/// Runs those of a package's tests whose names contain `filter` in the VM.
fn run(package: &str, filter: &str, requires: &str) {
    let machine = shared();
    let output = machine.lock().unwrap_or_else(PoisonError::into_inner).run(package, filter, requires);
    judge(&output);
}

#[test]
fn the_data_plane_drives_kernel_wireguard() {
    run("fairlead-dataplane", "kernel_wireguard::", "FAIRLEAD_KERNEL_WIREGUARD");
}

#[test]
fn the_embedded_wireguard_and_the_kernels_understand_each_other() {
    run("fairlead-tunnel", "kernel_judge::", "FAIRLEAD_KERNEL_WIREGUARD");
}

#[test]
fn the_data_plane_drives_the_kernels_ip_tunnels() {
    run("fairlead-dataplane", "encapsulation::", "FAIRLEAD_KERNEL_TUNNELS");
}

#[test]
fn the_data_plane_attaches_pods_without_ipv6() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("fairlead-dataplane");
    strip(&test_program("fairlead-dataplane", Kind::Integration), &copy);
    // A test program lies in memory twice while it is unpacked.
    let options = Options { memory_mib: 1536, kernel_arguments: "ipv6.disable=1", ..Options::default() };
    judge(&testbed_vm::run(&tests(&copy, "no_ipv6::", "FAIRLEAD_NO_IPV6"), options).unwrap());
}

#[test]
fn fou_tunnels_by_bpf_and_the_kernels_understand_each_other() {
    run("fairlead-fou", "kernel_peer::", "FAIRLEAD_KERNEL_FOU");
}

#[test]
fn fou_tunnels_of_pods_that_coil_has_set_up_and_ours_understand_each_other() {
    run("fairlead-fou", "coil_peer::", "FAIRLEAD_KERNEL_FOU");
}

#[test]
fn the_node_program_takes_over_clients_that_coil_has_set_up() {
    run("fairlead-egress-client", "tests::coil::", "FAIRLEAD_KERNEL_FOU");
}

#[test]
fn the_gateway_program_takes_over_gateways_that_coil_has_set_up() {
    run("fairlead-egress-gateway", "coil_gateway::", "FAIRLEAD_KERNEL_FOU");
}

#[test]
fn a_run_of_the_relay_has_datagrams_of_one_kind_for_rules_of_nftables() {
    run("fairlead-relay", "a_rule_of_nftables_meets_each_probe_between_data", "FAIRLEAD_KERNEL_WIREGUARD");
}
