//! What the other commands need on a fresh Debian machine.

use std::path::Path;
use std::process::Command;

use crate::steps::{Result, built, cargo, run, timed};

/// Debian packages and what they are for.
const PACKAGES: &[&str] = &[
    // the network lab and its judges
    "iproute2",
    "containernetworking-plugins",
    "iputils-ping",
    "iperf3",
    "nftables",
    "conntrack",
    "wireguard-tools",
    "tcpdump",
    "bird2",
    "procps",
    "util-linux",
    // nodes, and what is in the images they run
    "bind9-dnsutils",
    "bind9-host",
    "containerd",
    "curl",
    "iptables",
    "netcat-openbsd",
    "runc",
    // building aws-lc and the VM bed's initramfs
    "gcc",
    "libc6-dev",
    "busybox-static",
    "kmod",
    "cpio",
    "xz-utils",
    "dash",
    "qemu-system-x86",
];

/// Packages, the Kubernetes test bed, the builds.
pub(crate) fn everything() -> Result {
    packages()?;
    programs()?;
    control_plane()
}

/// Installs the Debian packages that are missing.
pub(crate) fn packages() -> Result {
    if !nix_is_root()? {
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
            run(command.stdout(std::process::Stdio::null()))
        };
        apt(&["update"])?;
        let mut install = vec!["install", "--no-install-recommends"];
        install.extend(&missing);
        apt(&install)
    })
}

/// Builds the Kubernetes control plane from its Go modules, once per version, outside the checkout.
pub(crate) fn control_plane() -> Result {
    if env_is_set("KUBEBUILDER_ASSETS") {
        return Ok(());
    }
    if run(Command::new("go").arg("version").stdout(std::process::Stdio::null())).is_err() {
        return Err("the Kubernetes test bed is built with Go 1.26 or newer, and `go` is not in PATH: install it from \
             https://go.dev/dl, or set KUBEBUILDER_ASSETS to a directory with kube-apiserver, etcd and kubectl"
            .to_owned());
    }
    timed("Kubernetes control plane (first time about 5 minutes)", || {
        // It prints where the programs are; stdout belongs to the command this is done for.
        run(Command::new(built("testbed-kube-setup")).stdout(std::process::Stdio::null()))
    })
}

/// Makes the images that pods of test clusters run, once per version, outside the checkout.
pub(crate) fn images() -> Result {
    timed("images of test clusters (first time about 3 minutes)", || {
        run(Command::new(built("testbed-kube-setup")).arg("images").stdout(std::process::Stdio::null()))
    })
}

/// Builds upstream's end-to-end suite and the images that its pods run, once per version, outside the checkout.
pub(crate) fn conformance() -> Result {
    timed("Kubernetes's end-to-end suite and its images (first time about 4 minutes)", || {
        run(Command::new(built("testbed-kube-setup")).arg("conformance").stdout(std::process::Stdio::null()))
    })
}

/// Builds every program of the workspace, at once: selecting packages would build the libraries again for each
/// selection, because cargo unifies features over what is selected.
pub(crate) fn programs() -> Result {
    timed("Fairlead and its test beds (first time about 5 minutes)", || {
        run(cargo(&["build", "--workspace", "--bins", "--examples"]))
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

fn nix_is_root() -> std::result::Result<bool, String> {
    use std::os::unix::fs::MetadataExt;
    let metadata =
        Path::new("/proc/self").metadata().map_err(|error| format!("cannot read /proc/self: {error}"))?;
    Ok(metadata.uid() == 0)
}
