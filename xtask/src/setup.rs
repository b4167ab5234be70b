//! Set-up of a fresh Debian machine for the other commands.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use crate::steps::{Background, Result, built, cargo, run, say, timed};

/// Debian packages and what they are for.
const PACKAGES: &[&str] = &[
    // the network lab and its judges
    "iproute2",
    "containernetworking-plugins",
    "coturn",
    "dnsmasq-base",
    "graphviz",
    "iputils-ping",
    "iputils-tracepath",
    "keepalived",
    "iperf3",
    "miniupnpc",
    "miniupnpd-nftables",
    "natpmpc",
    "nginx",
    "squid",
    "tayga",
    "nftables",
    "conntrack",
    "wireguard-tools",
    "tcpdump",
    "bird2",
    "procps",
    "util-linux",
    "faketime",
    // with systemd-networkd
    "systemd",
    // nodes, and what is in the images they run
    "bind9-dnsutils",
    "bind9-host",
    "containerd",
    "curl",
    "iptables",
    "netcat-openbsd",
    "runc",
    // building aws-lc, the BPF programs and the VM bed's initramfs
    "gcc",
    "g++",
    "clang",
    "libbpf-dev",
    "libc6-dev",
    "busybox-static",
    "ca-certificates",
    "kmod",
    "cpio",
    "xz-utils",
    "dash",
    "qemu-system-x86",
];

/// Programs that `cargo xtask demo` runs.
const DEMO: &[&str] = &["--bin=fairlead", "--bin=fairlead-cni", "--bin=fairlead-demo"];
/// Programs that nodes of `testbed/nodes` run.
const NODES: &[&str] = &[
    "--bin=fairlead",
    "--bin=fairlead-cni",
    "--bin=fairlead-conformance",
    "--bin=fairlead-image",
    "--bin=fairlead-nodes",
    "--bin=testbed-machine",
];
/// Every test executable, and every program that tests run.
const TESTS: &[&str] = &["--bins", "--examples", "--tests"];
/// The workspace but for the fuzz targets, each of which is a program of its own.
const WORKSPACE: &[&str] = &["build", "--workspace", "--exclude=fairlead-fuzz"];

/// Set where all tests were built before, as by `.ci/run`: commands that need less build the same, which takes no time then.
const BUILD_ALL: &str = "FAIRLEAD_BUILD_ALL";

/// Files that are built from Go modules, once per version, outside the checkout: arguments of `testbed-kube-setup`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kubernetes {
    /// Upstream's end-to-end suite.
    Conformance,
    /// The programs of Kubernetes and etcd.
    ControlPlane,
    /// Images that pods of test clusters run.
    Images,
}

impl Kubernetes {
    fn argument(self) -> &'static str {
        match self {
            Self::Conformance => "conformance",
            Self::ControlPlane => "control-plane",
            Self::Images => "images",
        }
    }
}

/// Everything that `demo` and `test` need.
pub(crate) fn everything() -> Result {
    prepare(&[Kubernetes::ControlPlane], || build(TESTS))
}

/// Prepares what `demo` needs.
pub(crate) fn demo() -> Result {
    prepare(&[Kubernetes::ControlPlane], || build(DEMO))
}

/// Prepares what `nodes` and, with the suite, `test conformance` need.
pub(crate) fn nodes(suite: bool) -> Result {
    let kubernetes = [Kubernetes::ControlPlane, Kubernetes::Images, Kubernetes::Conformance];
    prepare(kubernetes.get(..if suite { 3 } else { 2 }).unwrap_or_default(), || build(NODES))
}

/// Debian's packages, what Go builds and what cargo builds, concurrently: a compiler of one language leaves a core idle
/// where the other does not, and downloads overlap with both.
pub(crate) fn prepare<T>(
    kubernetes: &[Kubernetes],
    build_rest: impl FnOnce() -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    // Those of the user have neither kubelet nor kube-proxy.
    let given = env_is_set("KUBEBUILDER_ASSETS") && kubernetes == [Kubernetes::ControlPlane];
    if given || kubernetes.is_empty() {
        packages()?;
        return build_rest();
    }
    find_go()?;
    thread::scope(|scope| {
        let packages = scope.spawn(packages);
        // First and alone, so that Go begins early.
        let setup = build(&["--bin=testbed-kube-setup"]);
        // Images have files of Debian's packages.
        packages.join().map_err(|_| "the set-up of Debian's packages panicked")??;
        setup
    })?;
    let mut command = Command::new(built("testbed-kube-setup"));
    // It prints where the programs are; stdout belongs to the command this is done for.
    command.args(kubernetes.iter().map(|made| made.argument())).stdout(Stdio::null());
    say("==> Kubernetes from its Go modules, meanwhile (first time some minutes)");
    let go = Background::start(command)?;
    let rest = build_rest()?;
    timed("Kubernetes from its Go modules", || go.wait())?;
    Ok(rest)
}

/// Builds targets. Always of the whole workspace: cargo unifies features over the packages that are selected, so selecting
/// some of them would build libraries once more for each selection.
pub(crate) fn build(targets: &[&str]) -> Result {
    // What tests need unifies to other features than programs alone: one after the other builds most of the workspace twice.
    let targets = if env_is_set(BUILD_ALL) { TESTS } else { targets };
    timed("Fairlead and its test beds", || run(cargo(WORKSPACE).args(targets)))
}

/// As [`build`] for all tests, with cargo's messages on standard output.
pub(crate) fn build_tests_with_messages() -> Command {
    let mut command = cargo(WORKSPACE);
    command.arg("--message-format=json-render-diagnostics").args(TESTS).stdout(Stdio::piped());
    command
}

/// Installs the Debian packages that are missing.
pub(crate) fn packages() -> Result {
    if !is_root()? {
        return Err(
            "this needs root: it makes network namespaces. Run it as root (or with sudo -E)".to_owned()
        );
    }
    let missing: Vec<&str> = PACKAGES.iter().copied().filter(|package| !is_installed(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    timed(&format!("Debian packages: {}", missing.join(" ")), || {
        let apt = |arguments: &[&str]| {
            let mut command = Command::new("apt-get");
            command.env("DEBIAN_FRONTEND", "noninteractive").args(["-q", "-y"]).args(arguments);
            run(command.stdout(Stdio::null()))
        };
        apt(&["update"])?;
        let mut install = vec!["install", "--no-install-recommends"];
        install.extend(&missing);
        apt(&install)
    })
}

fn find_go() -> Result {
    run(Command::new("go").arg("version").stdout(Stdio::null())).map_err(|_| {
        "the Kubernetes test bed is built with Go 1.26 or newer, and `go` is not in PATH: install it from \
         https://go.dev/dl, or set KUBEBUILDER_ASSETS to a directory with kube-apiserver, etcd and kubectl"
            .to_owned()
    })
}

fn is_installed(package: &str) -> bool {
    Command::new("dpkg-query")
        .args(["-W", "-f", "${Status}", package])
        .output()
        .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("ok installed"))
}

fn env_is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

fn is_root() -> std::result::Result<bool, String> {
    use std::os::unix::fs::MetadataExt;
    let metadata =
        Path::new("/proc/self").metadata().map_err(|error| format!("cannot read /proc/self: {error}"))?;
    Ok(metadata.uid() == 0)
}
