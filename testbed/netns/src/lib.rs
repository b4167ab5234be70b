//! Network namespaces for tests of crates that talk to the kernel: make one, run code or a shell script inside.
//!
//! Without names and without processes: a namespace is held by descriptors and vanishes with its handle, also after a
//! panic. Whole networks with NAT and faults are in `testbed-lab`. Everything panics instead of returning errors, as
//! a test would. [`Monitor`] tells what the kernel reports as changed, [`pods`] makes pods behind a router, [`coil`] egress
//! as Coil v2 sets it up, [`traffic`] flows that go on meanwhile. A test that this kernel cannot run calls [`skipped`].
#![expect(clippy::expect_used, clippy::panic, reason = "helpers of tests fail as tests do")]

pub mod coil;
mod monitor;
pub mod pods;
mod skips;
pub mod traffic;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::panic::resume_unwind;
use std::process::{self, Command};
use std::thread;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

pub use monitor::Monitor;
pub use skips::{TEST_SKIPS, skipped};

/// A network namespace with loopback up.
#[derive(Debug)]
pub struct Namespace {
    network: File,
    mounts: Option<File>,
}

impl Namespace {
    /// A new, empty namespace.
    #[expect(clippy::new_without_default, reason = "it creates something in the kernel")]
    pub fn new() -> Self {
        Self::make(None)
    }

    /// One in which `directory` is empty and separate from the machine's.
    pub fn with_own(directory: &str) -> Self {
        Self::make(Some(directory))
    }

    fn make(own_directory: Option<&str>) -> Self {
        let namespace = on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("tests make network namespaces: run them as root");
            let open = |name| File::open(format!("/proc/thread-self/ns/{name}")).expect("/proc is mounted");
            let mounts = own_directory.map(|directory| {
                unshare(CloneFlags::CLONE_NEWNS).expect("root may unshare mounts");
                let none = None::<&str>;
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
                    .expect("mounts are private");
                std::fs::create_dir_all(directory).expect("the directory can be made");
                mount(Some("tmpfs"), directory, Some("tmpfs"), MsFlags::empty(), none)
                    .expect("tmpfs is mounted");
                open("mnt")
            });
            Self { network: open("net"), mounts }
        });
        namespace.sh("ip link set lo up");
        namespace
    }

    /// Runs `work` on a thread of its own inside.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        on_own_thread(|| {
            self.enter();
            work()
        })
    }

    /// Moves the calling thread inside, for good.
    pub fn enter(&self) {
        setns(&self.network, CloneFlags::CLONE_NEWNET).expect("root may enter a network namespace");
        if let Some(mounts) = &self.mounts {
            unshare(CloneFlags::CLONE_FS).expect("a thread may have its own root");
            setns(mounts, CloneFlags::CLONE_NEWNS).expect("root may enter a mount namespace");
        }
    }

    /// Runs a shell script inside; see [`sh`].
    pub fn sh(&self, script: &str) -> String {
        self.run(|| sh(script))
    }

    /// A path by which `ip link set LINK netns PATH` knows it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.network.as_raw_fd())
    }

    /// A veth pair from here to `other`, both ends up.
    pub fn veth(&self, name: &str, other: &Self, other_name: &str) {
        let netns = other.path();
        self.sh(&format!(
            "ip link add {name} type veth peer name {other_name} netns {netns}; ip link set {name} up"
        ));
        other.sh(&format!("ip link set {other_name} up"));
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.network.as_fd()
    }
}

/// Runs `work` in a new namespace.
pub fn in_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    Namespace::new().run(work)
}

/// Runs a shell script in the network namespace of the calling thread and returns what it prints.
///
/// # Panics
/// With its output if a command of it fails.
pub fn sh(script: &str) -> String {
    try_sh(script).unwrap_or_else(|output| panic!("{script}: {output}"))
}

/// Runs a shell script in a network namespace; see [`sh`].
pub fn sh_in(network: &impl AsFd, script: &str) -> String {
    try_sh_in(network, script).unwrap_or_else(|output| panic!("{script}: {output}"))
}

/// Runs a shell script in a network namespace.
///
/// # Errors
/// A command of the script failed; the error is its output.
pub fn try_sh_in(network: &impl AsFd, script: &str) -> Result<String, String> {
    let network = network.as_fd();
    on_own_thread(|| {
        setns(network, CloneFlags::CLONE_NEWNET).expect("root may enter a network namespace");
        try_sh(script)
    })
}

fn try_sh(script: &str) -> Result<String, String> {
    let output = Command::new("sh").args(["-ec", script]).output().expect("sh starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr) + &text(&output.stdout)),
    }
}

/// A thread that changed its namespace serves no other test: it ends with the work.
fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|panic| resume_unwind(panic)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_joins_two_namespaces_that_see_nothing_else() {
        let (a, b) = (Namespace::new(), Namespace::with_own("/run/wireguard"));
        a.veth("left", &b, "right");
        let names = |namespace: &Namespace| sh_in(namespace, "ip -br link | cut -d' ' -f1 | cut -d@ -f1");
        assert_eq!(names(&a), "lo\nleft\n");
        assert_eq!(names(&b), "lo\nright\n");
        assert_eq!(b.sh("ls -A /run/wireguard"), "");
    }

    #[test]
    fn a_script_fails_at_its_first_failing_command() {
        let error = in_namespace(|| try_sh("echo before; ls /nonexistent; echo after")).unwrap_err();
        assert!(
            error.contains("/nonexistent") && error.contains("before") && !error.contains("after"),
            "{error}"
        );
    }
}
