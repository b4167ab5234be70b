//! The inside of a node: what its process 1 does, from the mounts to keeping programs alive.
//!
//! It runs in two steps. [`enter`] joins the node's control groups, leaves the namespaces of the machine and starts
//! [`live`] as process 1 of a new process namespace. When either ends, the kernel kills everything in the node at once,
//! as a power cut does.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::cgroups::Layout;

/// Interval at which process 1 looks after its programs.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time after which a program that ended is started again, as systemd's `RestartSec`.
const RESTART_AFTER: Duration = Duration::from_millis(500);

/// Everything process 1 must know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    /// The node's control groups.
    pub cgroups: Layout,
    /// Directories and files of the node that hide those of the machine: (source, target).
    pub binds: Vec<(PathBuf, PathBuf)>,
    /// Sysctls that kubelet sets for the whole machine: (path below `/proc/sys`, value). The node sees them so,
    /// and nothing is changed outside.
    pub pretended_sysctls: Vec<(String, String)>,
    /// Directory of logs, process IDs and the marks of programs that must not run.
    pub directory: PathBuf,
    /// Kept running, in this order.
    pub programs: Vec<Program>,
}

/// A program that process 1 keeps alive.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Program {
    /// Short name, for files.
    pub name: String,
    /// Executable and arguments.
    pub command: Vec<String>,
}

impl Machine {
    /// While this file exists the program is not started.
    pub fn hold_file(&self, program: &str) -> PathBuf {
        self.directory.join(format!("{program}.hold"))
    }

    /// Holds the process id, as seen inside the node.
    pub fn pid_file(&self, program: &str) -> PathBuf {
        self.directory.join(format!("{program}.pid"))
    }

    /// Both outputs of the program, over all its restarts.
    pub fn log_file(&self, program: &str) -> PathBuf {
        self.directory.join(format!("{program}.log"))
    }
}

/// Leaves the machine's namespaces and runs `live` as process 1 until it ends.
///
/// # Errors
/// A namespace or control group cannot be made or entered.
pub fn enter(machine: &Machine, live: &mut Command) -> Result<()> {
    machine.cgroups.join()?;
    let namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(namespaces).context("cannot leave the machine's namespaces: it takes root")?;
    let status = live.status().context("cannot start process 1 of the node")?;
    ensure!(status.success(), "process 1 of the node ended ({status})");
    Ok(())
}

/// Process 1: mounts the node's own file systems, then keeps the programs running.
///
/// # Errors
/// It is not process 1, or something cannot be mounted.
pub fn live(machine: &Machine) -> Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("cannot tie the node to its owner")?;
    ensure!(Pid::this().as_raw() == 1, "only process 1 may mount over the machine's directories");
    mount_all(machine)?;
    let mut running = BTreeMap::new();
    let mut ended: BTreeMap<&str, Instant> = BTreeMap::new();
    loop {
        while let Some(pid) = reap() {
            if let Some(name) = running.remove(&pid) {
                ended.insert(name, Instant::now());
            }
        }
        for program in &machine.programs {
            let rests = ended.get(program.name.as_str()).is_some_and(|at| at.elapsed() < RESTART_AFTER);
            let runs = running.values().any(|name| *name == program.name);
            if !runs && !rests && !machine.hold_file(&program.name).exists() {
                running.insert(start(machine, program)?, program.name.as_str());
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// One child or orphan that has ended.
fn reap() -> Option<i32> {
    waitpid(None, Some(WaitPidFlag::WNOHANG)).ok()?.pid().map(Pid::as_raw)
}

fn start(machine: &Machine, program: &Program) -> Result<i32> {
    let path = machine.log_file(&program.name);
    let log = File::options().create(true).append(true).open(&path);
    let log = log.with_context(|| format!("cannot open {}", path.display()))?;
    let (executable, arguments) = program.command.split_first().context("a program without a command")?;
    let child = Command::new(executable)
        .args(arguments)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {executable}"))?;
    fs::write(machine.pid_file(&program.name), child.id().to_string())?;
    Ok(i32::try_from(child.id())?)
}

fn mount_all(machine: &Machine) -> Result<()> {
    let none = None::<&str>;
    let change = |flags| {
        mount(none, "/", none, MsFlags::MS_REC | flags, none).context("cannot change how mounts spread")
    };
    // Nothing goes back to the machine; inside, pods must see what the container runtime mounts.
    change(MsFlags::MS_SLAVE)?;
    change(MsFlags::MS_SHARED)?;
    let fresh = |kind: &str, target: &str, data: Option<&str>| {
        mount(Some(kind), target, Some(kind), MsFlags::empty(), data)
            .with_context(|| format!("cannot mount {kind} on {target}"))
    };
    fresh("proc", "/proc", none)?;
    // The lab's sysfs shows this node's interfaces already.
    machine.cgroups.mount_inside()?;
    // Old kernels have none, and nothing here needs it.
    let _ = fresh("bpf", "/sys/fs/bpf", none);
    fresh("tmpfs", "/run", Some("mode=0755"))?;
    for directory in ["/run/lock", "/run/netns"] {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {directory}"))?;
    }
    for (source, target) in &machine.binds {
        bind(source, target)?;
    }
    for (name, value) in &machine.pretended_sysctls {
        let file = machine.directory.join(name.replace('/', "."));
        fs::write(&file, format!("{value}\n"))?;
        bind(&file, &Path::new("/proc/sys").join(name))?;
    }
    Ok(())
}

/// Lays one directory or file of the node over one of the machine, and lets mounts inside it reach pods.
fn bind(source: &Path, target: &Path) -> Result<()> {
    let none = None::<&str>;
    let context = || format!("cannot mount {} on {}", source.display(), target.display());
    if source.is_dir() {
        fs::create_dir_all(target).with_context(context)?;
    }
    mount(Some(source), target, none, MsFlags::MS_BIND, none).with_context(context)?;
    mount(none, target, none, MsFlags::MS_SHARED, none).with_context(context)
}
