//! Control groups of a cluster's nodes: one subtree each, so that kubelets see only their own pods.
//!
//! Both layouts of Linux are served: one mount per controller (version 1, also hybrid) and one for all (version 2).

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use serde::{Deserialize, Serialize};

const ROOT: &str = "/sys/fs/cgroup";
/// Removing a control group fails while a killed process in it is still being taken down.
const ATTEMPTS: usize = 100;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Paths of the control groups of one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Path below every hierarchy: `CLUSTER/NODE`.
    name: PathBuf,
}

/// The hierarchies of this machine.
fn hierarchies() -> Result<Vec<PathBuf>> {
    if is_version_2() {
        return Ok(vec![PathBuf::from(ROOT)]);
    }
    let entries = fs::read_dir(ROOT).with_context(|| format!("cannot read {ROOT}"))?;
    let directories = entries.flatten().map(|entry| entry.path());
    // Links are second names of a hierarchy (`cpu,cpuacct`).
    Ok(directories.filter(|path| path.is_dir() && !path.is_symlink()).collect())
}

fn is_version_2() -> bool {
    Path::new(ROOT).join("cgroup.controllers").exists()
}

impl Layout {
    /// The subtree of `node` in the subtree of `cluster`.
    pub fn new(cluster: &str, node: &str) -> Self {
        Self { name: Path::new(cluster).join(node) }
    }

    /// Makes the groups, in each hierarchy.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make(&self) -> Result<()> {
        for hierarchy in hierarchies()? {
            let mut group = hierarchy.clone();
            for part in &self.name {
                let parent = group.clone();
                group.push(part);
                fs::create_dir_all(&group).with_context(|| format!("cannot create {}", group.display()))?;
                inherit(&parent, &group)?;
            }
        }
        Ok(())
    }

    /// Puts the calling process into the groups. Its next control-group namespace has them as its root.
    ///
    /// # Errors
    /// The groups do not exist.
    pub fn join(&self) -> Result<()> {
        hierarchies()?.iter().try_for_each(|hierarchy| enter(&hierarchy.join(&self.name)))
    }

    /// In the node's namespaces: mounts the groups where programs look for them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn mount_inside(&self) -> Result<()> {
        let none = None::<&str>;
        let fresh = |kind: &str, target: &Path, data: Option<&str>| {
            mount(Some(kind), target, Some(kind), MsFlags::empty(), data)
                .with_context(|| format!("cannot mount {kind} on {}", target.display()))
        };
        let own = fs::read_to_string("/proc/self/cgroup").context("cannot read /proc/self/cgroup")?;
        if own.lines().all(|line| line.starts_with("0::")) {
            fresh("cgroup2", Path::new(ROOT), none)?;
            // Version 2 lets a group have either processes or children with controllers: make room for the pods.
            let leaf = Path::new(ROOT).join("init");
            fs::create_dir_all(&leaf).with_context(|| format!("cannot create {}", leaf.display()))?;
            return enter(&leaf);
        }
        fresh("tmpfs", Path::new(ROOT), Some("mode=0755"))?;
        for controller in own.lines().filter_map(|line| line.split(':').nth(1)) {
            let (directory, kind, options) = match controller.strip_prefix("name=") {
                Some(name) => (name, "cgroup", Some(format!("none,{controller}"))),
                None if controller.is_empty() => ("unified", "cgroup2", None),
                None => (controller, "cgroup", Some(controller.to_owned())),
            };
            let target = Path::new(ROOT).join(directory);
            fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
            fresh(kind, &target, options.as_deref())?;
        }
        Ok(())
    }

    /// Removes the groups and all below them, once nothing runs there any more.
    pub fn remove(&self) {
        for hierarchy in hierarchies().unwrap_or_default() {
            remove_tree(&hierarchy.join(&self.name));
        }
    }

    /// As [`Layout::remove`], for the whole cluster's group.
    pub fn remove_cluster(cluster: &str) {
        for hierarchy in hierarchies().unwrap_or_default() {
            remove_tree(&hierarchy.join(cluster));
        }
    }
}

fn enter(group: &Path) -> Result<()> {
    let file = group.join("cgroup.procs");
    fs::write(&file, "0").with_context(|| format!("cannot enter the control group {}", group.display()))
}

/// Gives a new group what it does not inherit: processors and memory nodes, or controllers.
fn inherit(parent: &Path, group: &Path) -> Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if group.join(file).exists() && !is_version_2() {
            let value = fs::read_to_string(parent.join(file))?;
            fs::write(group.join(file), value.trim())
                .with_context(|| format!("cannot set {file} of {}", group.display()))?;
        }
    }
    if let Ok(controllers) = fs::read_to_string(parent.join("cgroup.controllers")) {
        for controller in controllers.split_whitespace() {
            // A controller that is in use elsewhere cannot be delegated; the kubelet names the missing ones.
            let _ = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
        }
    }
    Ok(())
}

fn remove_tree(group: &Path) {
    for _ in 0..ATTEMPTS {
        remove_once(group);
        if !group.exists() {
            return;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn remove_once(group: &Path) {
    let children = fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
    children.filter(|path| path.is_dir()).for_each(|child| remove_once(&child));
    // Fails while something below is busy; the caller tries again.
    let _ = fs::remove_dir(group);
}
