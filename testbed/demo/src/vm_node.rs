//! A node whose kernel is not this machine's: Debian's in a virtual machine, with the kernel's own WireGuard.
//!
//! Its machine is an ordinary host of a site, except that the cable leads on into the VM: the namespace is a switch
//! between the site's LAN and a TAP, and the VM has the address the lab gave to the host.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use testbed_lab::NatSite;
use testbed_vm::{Options, Vm};

use crate::World;
use crate::cni;
use crate::node::{Node, executable};
use crate::objects;

/// Where things are in the VM.
const PROGRAMS: &str = "/opt/fairlead";
const SOCKET: &str = "/run/coild.sock";
const KUBECONFIG: &str = "/etc/fairlead/kubeconfig";
const LOG: &str = "/run/fairlead-node.log";
const PROCESS: &str = "/run/fairlead-node.pid";

/// A node in a VM. Drop it before its world.
pub struct VmNode {
    /// The same node as the lab sees it; no program runs on that side.
    pub node: Node,
    vm: Vm,
}

impl VmNode {
    /// Boots a VM on a site's LAN and makes it a node of the cluster; its node program does not run yet.
    ///
    /// # Errors
    /// A program is missing, or the VM does not boot or does not get its network.
    pub fn boot(world: &World, site: &NatSite, name: &str) -> anyhow::Result<Self> {
        let directory = world.directory().join(name);
        std::fs::create_dir(&directory)?;
        let host = site.host(name)?;
        host.shell(
            "ip address flush dev eth0\nip tuntap add tap0 mode tap\nip link add lan type bridge mcast_snooping 0\n\
             ip link set eth0 master lan\nip link set tap0 master lan\nip link set tap0 up\nip link set lan up",
        )?;
        let node = Node::new(name, site.name(), host.clone(), directory.clone());
        world.join(&node)?;
        let options = Options {
            launcher: Some(Box::new(move |program| {
                // A lab that is gone cannot start anything; the command then fails and says so.
                host.command(program).unwrap_or_else(|_| Command::new("/nonexistent"))
            })),
            tap: Some("tap0".to_owned()),
            ..Options::default()
        };
        let mut vm = Vm::start(&options)?;
        let (lan, gateway) = (site.router().lan().prefix_len(), site.router().lan_address());
        let address = node.host.address();
        vm.shell(&format!(
            "ip address add {address}/{lan} dev eth0\nip link set eth0 up\nip route add default via {gateway}"
        ))?;
        vm.put(Path::new(KUBECONFIG), 0o600, &std::fs::read(node.kubeconfig())?)?;
        for program in ["fairlead", "fairlead-cni"] {
            let content = std::fs::read(small_copy(program, &directory)?)?;
            vm.put(&Path::new(PROGRAMS).join(program), 0o755, &content)?;
        }
        Ok(Self { node, vm })
    }

    /// Runs a script in the VM and returns what it printed.
    ///
    /// # Errors
    /// It fails; its stderr is in the message.
    pub fn shell(&mut self, script: &str) -> anyhow::Result<String> {
        self.vm.shell(script)
    }

    /// Starts the node program and waits until it serves its socket; how long that took.
    ///
    /// # Errors
    /// It ended, or does not come up; its log is in the message.
    pub fn start(&mut self, patience: Duration) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let name = &self.node.name;
        self.vm.shell(&format!(
            "KUBECONFIG={KUBECONFIG} FAIRLEAD_LOG_LEVEL=debug {PROGRAMS}/fairlead node --node-name {name} --socket {SOCKET} \
             >>{LOG} 2>&1 &\necho $! >{PROCESS}"
        ))?;
        while self.status().is_err() {
            if start.elapsed() > patience || !self.runs()? {
                bail!("the node program of {name} is not up:\n{}", self.log()?, name = self.node.name);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(start.elapsed())
    }

    /// Kills the node program with SIGKILL; it is gone when this returns.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        ensure!(self.runs()?, "{} runs no node program", self.node.name);
        self.vm.shell(&format!("kill -KILL $(cat {PROCESS})"))?;
        while self.runs()? {
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The end of the node program's log, of all its starts.
    ///
    /// # Errors
    /// The VM does not answer.
    pub fn log(&mut self) -> anyhow::Result<String> {
        self.vm.shell(&format!("tail -n 30 {LOG}"))
    }

    /// What `fairlead status -o json` prints on this node.
    ///
    /// # Errors
    /// The node program does not answer.
    pub fn status(&mut self) -> anyhow::Result<Value> {
        let mut command = Command::new(format!("{PROGRAMS}/fairlead"));
        command.args(["--log-level", "error", "status", "-o", "json", "--socket", SOCKET]);
        // Not all may be well, which is no failure here.
        let output = self.vm.run(&command)?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("no status of {}: {}", self.node.name, String::from_utf8_lossy(&output.stderr))
        })
    }

    /// Makes a pod in the VM: the object, a network namespace of that name (`ip netns`) and the plugin's ADD, which
    /// gives the addresses.
    ///
    /// # Errors
    /// The plugin's own words.
    pub fn start_pod(&mut self, world: &World, name: &str) -> anyhow::Result<Vec<IpAddr>> {
        world.plane.apply(&objects::pod(name, &self.node.name))?;
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={name}",
            objects::NAMESPACE
        );
        let result = self.vm.shell(&format!(
            "ip netns add {name}\necho '{}' | CNI_COMMAND=ADD CNI_CONTAINERID={name} CNI_NETNS=/run/netns/{name} \
             CNI_IFNAME=eth0 CNI_PATH={PROGRAMS} CNI_ARGS='{arguments}' {PROGRAMS}/fairlead-cni",
            cni::configuration(Path::new(SOCKET)),
        ))?;
        cni::addresses(&serde_json::from_str(&result).context("ADD printed no JSON")?)
    }

    fn runs(&mut self) -> anyhow::Result<bool> {
        let answer =
            self.vm.shell(&format!("kill -0 $(cat {PROCESS}) 2>/dev/null && echo yes || echo no"))?;
        Ok(answer.trim() == "yes")
    }
}

/// Debug builds are large, and everything in a VM lies in its memory.
fn small_copy(program: &str, directory: &Path) -> anyhow::Result<PathBuf> {
    let copy = directory.join(program);
    let output = Command::new("strip")
        .arg("-o")
        .args([&copy, &executable(program)?])
        .output()
        .context("cannot run strip: is binutils installed?")?;
    ensure!(output.status.success(), "strip {program}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(copy)
}
