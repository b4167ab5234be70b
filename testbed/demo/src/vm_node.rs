//! A node whose kernel is not this machine's: Debian's in a virtual machine, with the kernel's own WireGuard.
//!
//! The machine is an ordinary host of a site, except that the cable leads on into the VM: the namespace is a switch between the site's LAN
//! and a TAP, and the VM has the address the lab gave to the host.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use testbed_lab::{Host, NatSite};
use testbed_vm::{Options, Vm};

use crate::World;
use crate::cni;
use crate::node::{Node, executable};
use crate::objects;
use crate::times::{self, Course};

/// The VM's end of the cable.
const TAP: &str = "tap0";
/// Paths in the VM.
const PROGRAM: &str = "/usr/bin/fairlead";
const PLUGIN: &str = "/opt/cni/bin/fairlead-cni";
const SOCKET: &str = "/run/coild.sock";
const KUBECONFIG: &str = "/etc/fairlead/kubeconfig";
const LOG: &str = "/run/fairlead-node.log";
/// Length of the log when the latest node program was started.
const LOG_START: &str = "/run/fairlead-node.log.start";
const PROCESS: &str = "/run/fairlead-node.pid";

/// Number of times that the VM's clock is read; the quickest reading counts.
const CLOCK_READINGS: usize = 5;

/// A node in a VM. Drop it before its world.
pub struct VmNode {
    /// The same node as the lab sees it; no program runs on that side.
    pub node: Node,
    /// Further arguments of the node program, from its next start on.
    pub arguments: &'static str,
    vm: Vm,
}

impl VmNode {
    /// Boots a VM on a site's LAN and makes it a node of the cluster; its node program does not run yet. The arguments are
    /// added to the kernel's.
    ///
    /// # Errors
    /// A program is missing, or the VM does not boot or does not get its network.
    pub fn boot(
        world: &World,
        site: &NatSite,
        name: &str,
        kernel_arguments: &'static str,
    ) -> anyhow::Result<Self> {
        let directory = world.directory().join(name);
        std::fs::create_dir(&directory)?;
        let node = Node::new(name, site.name(), site.host(name)?, directory);
        lead_cable_on(&node.host)?;
        world.join(&node)?;
        let inside = node.host.clone();
        let mut vm = Vm::start(&Options {
            launcher: Some(Box::new(move |program| {
                // A lab that has ended cannot start anything; the command then fails with that reason.
                inside.command(program).unwrap_or_else(|_| Command::new("/nonexistent"))
            })),
            tap: Some(TAP.to_owned()),
            kernel_arguments,
            // For the libraries it brings along, which are those of the node program too.
            files: vec![executable("fairlead-cni")?],
            ..Options::default()
        })?;
        let (lan, gateway) = (site.router().lan().prefix_len(), site.router().lan_address());
        let address = node.host.address();
        vm.shell(&format!(
            "ip address add {address}/{lan} dev eth0\nip link set eth0 up\nip route add default via {gateway}"
        ))?;
        vm.put(Path::new(KUBECONFIG), 0o600, &std::fs::read(node.kubeconfig())?)?;
        for (program, path) in [("fairlead", PROGRAM), ("fairlead-cni", PLUGIN)] {
            vm.put(Path::new(path), 0o755, &stripped(program, &node.directory)?)?;
        }
        Ok(Self { node, arguments: "", vm })
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
        let (name, arguments) = (&self.node.name, self.arguments);
        self.vm.shell(&format!(
            "wc -c {LOG} 2>/dev/null | cut -d ' ' -f 1 >{LOG_START}\n\
             KUBECONFIG={KUBECONFIG} FAIRLEAD_LOG_LEVEL=debug {PROGRAM} node --node-name {name} --socket {SOCKET} \
             {arguments} >>{LOG} 2>&1 &\necho $! >{PROCESS}"
        ))?;
        while self.status().is_err() {
            if start.elapsed() > patience || !self.runs()? {
                bail!("the node program of {name} is not up:\n{}", self.log()?, name = self.node.name);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(start.elapsed())
    }

    /// Kills the node program with SIGKILL; it has ended when this returns.
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

    /// Courses of all peers that the latest node program has logged, in the time of the machine that the VM runs on, by the peer's name.
    ///
    /// # Errors
    /// The node program or the VM does not answer.
    pub fn courses(&mut self) -> anyhow::Result<BTreeMap<String, Course>> {
        let behind = self.clock_behind()?;
        let status = self.status()?;
        let newest = format!("tail -c +$(($(cat {LOG_START}) + 1)) {LOG} | grep '\"peer\"' || true");
        let courses = times::read(&status, &self.vm.shell(&newest)?)?.into_iter();
        courses.map(|(name, course)| Ok((name, course.by_clock_ahead(behind)?))).collect()
    }

    /// Time by which the VM's clock is behind that of the machine it runs on. The error is at most half of the time that a reading takes.
    ///
    /// # Errors
    /// The VM does not answer.
    pub fn clock_behind(&mut self) -> anyhow::Result<SignedDuration> {
        let mut best: Option<(Duration, SignedDuration)> = None;
        for _ in 0..CLOCK_READINGS {
            let (before, asked) = (Timestamp::now(), Instant::now());
            // Of the tools that are there, ping tells the time exactly.
            let output = self.vm.shell("ping -n -D -c 1 127.0.0.1")?;
            let took = asked.elapsed();
            let inside = ping_time(&output).with_context(|| format!("ping tells no time: {output}"))?;
            let middle = before.checked_add(SignedDuration::try_from(took / 2)?)?;
            if best.is_none_or(|(shortest, _)| took < shortest) {
                best = Some((took, middle.duration_since(inside)));
            }
        }
        best.map(|(_, behind)| behind).context("the clock was not read")
    }

    /// Output of `fairlead status -o json` on this node.
    ///
    /// # Errors
    /// The node program does not answer.
    pub fn status(&mut self) -> anyhow::Result<Value> {
        let mut command = Command::new(PROGRAM);
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
        self.start_pod_in(world, objects::NAMESPACE, name)
    }

    /// The same in another Kubernetes namespace.
    ///
    /// # Errors
    /// The plugin's own words.
    pub fn start_pod_in(
        &mut self,
        world: &World,
        namespace: &str,
        name: &str,
    ) -> anyhow::Result<Vec<IpAddr>> {
        let object = objects::pod(name, &self.node.name);
        let there = format!("namespace: {namespace}");
        let object = object.replace(&format!("namespace: {}", objects::NAMESPACE), &there);
        world.plane.apply_at(&objects::pod_path(namespace, name), &object)?;
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={name}"
        );
        let added = self.vm.shell(&format!(
            "ip netns add {name}\necho '{}' | CNI_COMMAND=ADD CNI_CONTAINERID={name} CNI_NETNS=/run/netns/{name} \
             CNI_IFNAME=eth0 CNI_PATH=/opt/cni/bin CNI_ARGS='{arguments}' {PLUGIN}",
            cni::configuration(Path::new(SOCKET)),
        ));
        let result = match added {
            Ok(result) => result,
            Err(error) => bail!("{error:#}\nThe node program has logged:\n{}", self.log()?),
        };
        cni::addresses(&serde_json::from_str(&result).context("ADD printed no JSON")?)
    }

    fn runs(&mut self) -> anyhow::Result<bool> {
        let answer =
            self.vm.shell(&format!("kill -0 $(cat {PROCESS}) 2>/dev/null && echo yes || echo no"))?;
        Ok(answer.trim() == "yes")
    }
}

/// When the first answer came, as `ping -D` writes it: seconds and microseconds.
fn ping_time(output: &str) -> Option<Timestamp> {
    let (time, _) = output.lines().find_map(|line| line.strip_prefix('[')?.split_once(']'))?;
    let (seconds, microseconds) = time.split_once('.')?;
    let microseconds: i32 = microseconds.parse().ok()?;
    Timestamp::new(seconds.parse().ok()?, microseconds.checked_mul(1000)?).ok()
}

/// Makes a host a switch between its cable and a TAP. Its address is the VM's from now on.
fn lead_cable_on(host: &Host) -> anyhow::Result<()> {
    host.shell(&format!(
        "ip address flush dev eth0\nip tuntap add {TAP} mode tap\nip link add lan type bridge mcast_snooping 0\n\
         for port in eth0 {TAP}; do ip link set $port master lan up; done\nip link set lan up"
    ))
    .map(drop)
}

/// A program without its symbols: debug builds are large, and all files of a VM lie in its memory.
fn stripped(program: &str, directory: &Path) -> anyhow::Result<Vec<u8>> {
    let copy = directory.join(program);
    let mut strip = Command::new("strip");
    strip.arg("-o").args([&copy, &executable(program)?]);
    let output = strip.output().context("cannot run strip: is binutils installed?")?;
    ensure!(output.status.success(), "strip {program}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(std::fs::read(copy)?)
}
