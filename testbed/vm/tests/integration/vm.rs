//! The VM boots, runs what it is given, and has the kernel features it exists for.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use testbed_vm::{Options, Vm};

/// Processes whose command line holds the text.
fn processes_with(text: &str) -> usize {
    let line = |process: std::fs::DirEntry| std::fs::read(process.path().join("cmdline")).unwrap_or_default();
    let lines = std::fs::read_dir("/proc").unwrap().map(|process| line(process.unwrap()));
    lines.filter(|line| line.windows(text.len()).any(|window| window == text.as_bytes())).count()
}

#[test]
fn runs_one_command_and_tells_how_it_ended() {
    assert!(testbed_vm::run(&Command::new("true"), Options::default()).unwrap().status.success());
}

#[test]
fn keeps_output_apart_and_runs_one_command_after_another() {
    let mut vm = Vm::start(&Options::default()).unwrap();
    let output = vm.run(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 7"])).unwrap();
    assert_eq!(
        (output.stdout.as_slice(), output.stderr.as_slice()),
        (b"out\n".as_slice(), b"err\n".as_slice())
    );
    assert_eq!(output.status.code(), Some(7));

    assert_eq!(vm.run(&Command::new("nosuchprogram")).unwrap().status.code(), Some(127));
    assert_eq!(vm.run(Command::new("sh").args(["-c", "kill -KILL $$"])).unwrap().status.code(), Some(137));
    let kernel = vm.shell("uname -r").unwrap();
    assert!(kernel.ends_with("-cloud-amd64\n"), "{kernel}");
    let error = vm.shell("cat /nosuchfile").unwrap_err().to_string();
    assert!(error.contains("No such file or directory"), "{error}");

    let megabyte: Vec<u8> = (0..1_000_003_u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
    vm.put(Path::new("/new dir/it's"), 0o640, &megabyte).unwrap();
    let output = vm.run(Command::new("cat").arg("it's").current_dir("/new dir")).unwrap();
    assert!(output.stdout == megabyte, "{} bytes came back", output.stdout.len());
    assert_eq!(vm.shell("stat -c %a \"/new dir/it's\"").unwrap(), "640\n");
}

#[test]
fn host_programs_come_along_with_their_libraries() {
    // Linked to the C library, and not one of the VM's own programs.
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(&program);
    command.args(["--list", "--format", "terse"]);
    let output = testbed_vm::run(&command, Options::default()).unwrap();
    let list = String::from_utf8(output.stdout).unwrap();
    assert!(
        list.contains("host_programs_come_along_with_their_libraries: test"),
        "{list}{:?}",
        output.stderr
    );
}

#[test]
fn a_command_that_hangs_ends_with_its_vm() {
    let options =
        Options { command_timeout: Duration::from_secs(20), cpus: 1, memory_mib: 513, ..Options::default() };
    let mut vm = Vm::start(&options).unwrap();
    assert_eq!(vm.shell("nproc").unwrap(), "1\n");
    assert_ne!(processes_with("-m\u{0}513\u{0}"), 0);
    let error = format!("{:#}", vm.shell("echo before; sleep 1000").unwrap_err());
    assert!(error.contains("took too long") && error.contains("before"), "{error}");
    assert!(format!("{:#}", vm.shell("true").unwrap_err()).contains("the VM is gone"));
    assert_eq!(processes_with("-m\u{0}513\u{0}"), 0);
}

#[test]
fn kernel_wireguard_carries_packets_between_two_namespaces() {
    let mut vm = Vm::start(&Options::default()).unwrap();
    vm.shell(
        r#"
        wg genkey >/tmp/key-a; wg genkey >/tmp/key-b
        ip netns add a; ip netns add b
        ip link add eth0 netns a type veth peer name eth0 netns b
        side() { # own name, peer's name, own number, peer's number
            ip -n $1 addr add 10.1.0.$3/24 dev eth0
            ip -n $1 link set eth0 up
            ip -n $1 link add wg0 type wireguard
            ip netns exec $1 wg set wg0 listen-port 51820 private-key /tmp/key-$1 \
                peer $(wg pubkey </tmp/key-$2) allowed-ips 10.2.0.$4/32,fd00::$4/128 endpoint 10.1.0.$4:51820
            ip -n $1 addr add 10.2.0.$3/24 dev wg0
            ip -n $1 addr add fd00::$3/64 dev wg0
            ip -n $1 link set wg0 up
        }
        side a b 1 2; side b a 2 1
        ip netns exec a ping -c 1 -w 60 10.2.0.2
        ip netns exec a ping -c 1 -w 60 fd00::2
        "#,
    )
    .unwrap();
    let shown = vm.shell("ip netns exec a wg show wg0").unwrap();
    assert!(shown.contains("latest handshake") && shown.contains("transfer"), "{shown}");
}

#[test]
fn every_tunnel_and_filter_that_tests_count_on_is_there() {
    let mut vm = Vm::start(&Options::default()).unwrap();
    vm.shell(
        r#"
        modprobe -a fou fou6
        ip link add d0 type dummy
        ip addr add 10.1.0.1/24 dev d0; ip addr add fd01::1/64 dev d0 nodad; ip link set d0 up
        ip fou add port 5555 ipproto 4
        ip -6 fou add port 5556 ipproto 41
        ip link add t4 type ipip remote 10.1.0.2 local 10.1.0.1 encap fou encap-sport auto encap-dport 5555
        ip link add t6 type ip6tnl mode ip6ip6 remote fd01::2 local fd01::1 encap fou encap-sport auto encap-dport 5556
        tc qdisc add dev d0 root netem delay 5ms loss 1%
        nft 'add table inet t; add set inet t s { type ipv4_addr; flags interval; }
             add chain inet t c { type nat hook postrouting priority 100; }
             add rule inet t c ip saddr @s fib daddr type local masquerade'
        ip rule add fwmark 0x10/0x30 lookup 180 pref 32500
        conntrack -L >/dev/null
        ping -c 60 127.0.0.1 >/dev/null & timeout 60 tcpdump -nn -i lo -c 1 icmp
        "#,
    )
    .unwrap();
}

const OWNER: &str = "vm::hold_one_until_killed";

/// Not a test: the process that the next test kills.
#[test]
#[ignore = "started by nothing_stays_behind_when_its_owner_is_killed: cargo xtask test vm -- nothing_stays_behind"]
fn hold_one_until_killed() {
    let mut vm = Vm::start(&Options::default()).unwrap();
    println!("it runs: {}", vm.shell("uname").unwrap());
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn nothing_stays_behind_when_its_owner_is_killed() {
    let temporary = tempfile::tempdir().unwrap();
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", OWNER, "--ignored", "--nocapture"])
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(owner.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("it runs: Linux")));
    owner.kill().unwrap();
    owner.wait().unwrap();
    let state = temporary.path().to_str().unwrap();
    let left = || (processes_with(state), std::fs::read_dir(temporary.path()).unwrap().count());
    for _ in 0..600 {
        if left() == (0, 0) {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("processes and files after a minute: {:?}", left());
}

static NAMESPACES: AtomicUsize = AtomicUsize::new(0);

/// A network namespace with a TAP, removed when dropped.
struct Namespace(String);

impl Namespace {
    fn new() -> Self {
        let name = format!("vmbed-{}-{}", std::process::id(), NAMESPACES.fetch_add(1, Ordering::Relaxed));
        host(&["ip", "netns", "add", &name]);
        let namespace = Self(name);
        namespace.ip("tuntap add tap0 mode tap");
        namespace.ip("addr add 192.0.2.1/24 dev tap0");
        namespace.ip("link set tap0 up");
        namespace
    }

    fn ip(&self, arguments: &str) {
        let mut all = vec!["ip", "-n", &self.0];
        all.extend(arguments.split(' '));
        host(&all);
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        host(&["ip", "netns", "delete", &self.0]);
    }
}

fn host(words: &[&str]) {
    let (program, arguments) = words.split_first().unwrap();
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
}

#[test]
fn a_tap_joins_it_to_a_namespace() {
    let namespace = Namespace::new();
    let name = namespace.0.clone();
    let options = Options {
        launcher: Some(Box::new(move |program| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &name]).arg(program);
            command
        })),
        tap: Some("tap0".into()),
        ..Options::default()
    };
    let mut vm = Vm::start(&options).unwrap();
    vm.shell("ip addr add 192.0.2.2/24 dev eth0; ip link set eth0 up; ping -c 1 -w 60 192.0.2.1").unwrap();
    host(&["ip", "netns", "exec", &namespace.0, "ping", "-c", "1", "-w", "60", "192.0.2.2"]);
    drop(vm);
}
