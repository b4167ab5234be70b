//! Fairlead's data plane against another kernel than this machine's: one that has WireGuard and fou, and one without IPv6. Its own
//! test programs, built on this machine, run in the VM.
#![cfg(test)]

use std::path::PathBuf;
use std::process::{Command, Stdio};

use testbed_vm::Options;

/// A test program of a package: `cargo xtask test` names all that it has built.
fn test_program(package: &str, test: &str) -> PathBuf {
    let is_it = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(|name| name.rsplit_once('-')).is_some_and(|(name, _)| name == test)
    };
    let built = std::env::var_os("FAIRLEAD_TEST_PROGRAMS");
    let built = built.and_then(|programs| std::env::split_paths(&programs).find(is_it));
    built.unwrap_or_else(|| build_test(package, test))
}

/// Builds one test program of a package, which has the package's name if it is that of its unit tests; cargo says in JSON lines where it put it. The whole workspace is selected,
/// because selecting one package would build the libraries again with that package's features.
fn build_test(package: &str, test: &str) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["test", "--workspace", "--no-run", "--message-format=json"])
        .args(if package.replace('-', "_") == test { vec!["--lib"] } else { vec!["--test", test] })
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "cannot build the test {test} of {package}: {}", rendered(&messages));
    let program = json(&messages)
        .filter(|message| text(message, "/target/name").as_deref() == Some(test))
        .filter(|message| text(message, "/package_id").is_some_and(|id| id.contains(package)))
        .find_map(|message| text(&message, "/executable"));
    assert!(program.is_some(), "cargo built no test {test} of {package}:\n{messages}");
    program.map(PathBuf::from).unwrap()
}

fn text(message: &serde_json::Value, pointer: &str) -> Option<String> {
    message.pointer(pointer)?.as_str().map(str::to_owned)
}

fn json(messages: &str) -> impl Iterator<Item = serde_json::Value> {
    messages.lines().filter_map(|line| serde_json::from_str(line).ok())
}

/// What the compiler would have printed on a terminal.
fn rendered(messages: &str) -> String {
    json(messages).filter_map(|message| text(&message, "/message/rendered")).collect()
}

/// Runs a test program of a package in the VM.
fn run(package: &str, test: &str, requires: &str, kernel_arguments: &'static str) {
    run_command(Command::new(test_program(package, test)), requires, kernel_arguments);
}

/// Runs those of a package's unit tests whose names contain `filter` in the VM.
fn run_unit_tests(package: &str, filter: &str, requires: &str) {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join(package);
    let program = test_program(package, &package.replace('-', "_"));
    let status = Command::new("strip").arg("-o").args([&copy, &program]).status().unwrap();
    assert!(status.success(), "strip: {status}");
    let mut command = Command::new(copy);
    command.args([filter, "--nocapture", "--test-threads", "1"]);
    run_command(command, requires, "");
}

fn run_command(mut command: Command, requires: &str, kernel_arguments: &'static str) {
    command
        .env(requires, "1")
        .env("RUST_BACKTRACE", "1")
        .env("RUST_TEST_NOCAPTURE", "1")
        .current_dir("/root");
    // A test program with debug information is large, and it lies in memory twice while it is unpacked.
    let options = Options { memory_mib: 1536, kernel_arguments, ..Options::default() };
    let output = testbed_vm::run(&command, options).unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
    assert!(
        stdout.contains("test result: ok. ") && !stdout.contains("ok. 0 passed"),
        "nothing was tested:\n{stdout}"
    );
    println!("{stdout}");
}

#[test]
fn the_data_plane_drives_kernel_wireguard() {
    run("fairlead-dataplane", "kernel_wireguard", "FAIRLEAD_KERNEL_WIREGUARD", "");
}

#[test]
fn the_embedded_wireguard_and_the_kernels_understand_each_other() {
    let mut command = Command::new(test_program("fairlead-tunnel", "kernel_judge"));
    command.args(["--ignored", "--test-threads", "1"]);
    run_command(command, "FAIRLEAD_KERNEL_WIREGUARD", "");
}

#[test]
fn the_data_plane_drives_the_kernels_ip_tunnels() {
    run("fairlead-dataplane", "encapsulation", "FAIRLEAD_KERNEL_TUNNELS", "");
}

#[test]
fn the_data_plane_attaches_pods_without_ipv6() {
    run("fairlead-dataplane", "no_ipv6", "FAIRLEAD_NO_IPV6", "ipv6.disable=1");
}

#[test]
fn fou_tunnels_by_bpf_and_the_kernels_understand_each_other() {
    run("fairlead-fou", "kernel_peer", "FAIRLEAD_KERNEL_FOU", "");
}

#[test]
fn fou_tunnels_of_pods_that_coil_has_set_up_and_ours_understand_each_other() {
    run("fairlead-fou", "coil_peer", "FAIRLEAD_KERNEL_FOU", "");
}

#[test]
fn the_node_program_takes_over_clients_that_coil_has_set_up() {
    run_unit_tests("fairlead-node", "egress::tests::coil::", "FAIRLEAD_KERNEL_FOU");
}

#[test]
fn the_gateway_program_takes_over_gateways_that_coil_has_set_up() {
    run("fairlead-egress-gateway", "coil_gateway", "FAIRLEAD_KERNEL_FOU", "");
}
