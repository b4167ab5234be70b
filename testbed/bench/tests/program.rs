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
        "error: unknown benchmark or option \"tunel\": choose from agents, cni, egress, growth, guard, handover, ipam, mesh, mesh-scale, nat, nft, plan, probe-socket, relay, tunnel, tunnel-kernel, --quick, --json, --peers, --blocks, --rtt, --rounds and --seconds\n"
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

#[test]
fn a_device_process_hands_over_to_the_next_one_when_it_is_told_to_end() {
    let lab = Lab::new().unwrap();
    let namespace = lab.bare_namespace("device").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("handover.sock");
    let start = |output: &str| {
        let mut command = Command::new(PROGRAM);
        command.args(["device", "wg0"]).arg(&socket);
        let mut device = namespace.spawn(&mut command, directory.path().join(output)).unwrap();
        device.wait_for_output("started", TIMEOUT).unwrap();
        let key =
            "wg genkey >/run/wireguard/key; wg set wg0 private-key /run/wireguard/key listen-port 51820";
        namespace.shell(key).unwrap();
        device
    };
    let old = start("old");
    let index = || namespace.shell("cat /sys/class/net/wg0/ifindex").unwrap();
    let before = index();
    let ending = thread::spawn(move || old.stop(TIMEOUT));
    let waiting = Instant::now();
    while !socket.exists() {
        assert!(waiting.elapsed() < TIMEOUT, "the old process does not listen");
        thread::sleep(Duration::from_millis(5));
    }
    let _new = start("new");
    let status = ending.join().unwrap().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!((index(), socket.exists()), (before, false));
    assert_eq!(namespace.shell("wg show wg0 listen-port").unwrap().trim(), "51820");
}
