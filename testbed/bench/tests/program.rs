//! The program as it is called. Nothing is measured here: that takes a release build.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use testbed_lab::Lab;

const PROGRAM: &str = env!("CARGO_BIN_EXE_fairlead-bench");
/// Bounds every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn an_unknown_benchmark_fails_and_writes_nothing_to_stdout() {
    let output = Command::new(PROGRAM).args(["tunel", "--json"]).output().unwrap();
    assert!(!output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "error: unknown benchmark or option \"tunel\": choose from agents, cni, egress, growth, ipam, mesh, mesh-scale, nat, nft, plan, probe-socket, relay, tunnel, --quick, --json, --peers, --blocks, --rtt, --rounds and --seconds\n"
    );
}

#[test]
fn help_goes_to_stdout() {
    let output = Command::new(PROGRAM).arg("--help").output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("Usage: fairlead-bench"));
}

#[test]
fn the_embedded_device_runs_in_a_process_and_obeys_wg() {
    let lab = Lab::new().unwrap();
    let namespace = lab.bare_namespace("device").unwrap();
    let outputs = tempfile::tempdir().unwrap();
    let mut device = namespace
        .spawn(Command::new(PROGRAM).args(["device", "wg0"]), outputs.path().join("device"))
        .unwrap();
    let start = Instant::now();
    let set = || {
        let mut wg = namespace.command("wg").unwrap();
        wg.args(["set", "wg0", "listen-port", "51820"]).stderr(Stdio::null()).status().unwrap().success()
    };
    while !set() {
        assert!(
            start.elapsed() < TIMEOUT && device.status().unwrap().is_none(),
            "{}",
            device.output().unwrap()
        );
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(namespace.shell("wg show wg0 listen-port").unwrap().trim(), "51820");
    assert_eq!(namespace.shell("cat /sys/class/net/wg0/mtu").unwrap().trim(), "1420");
}
