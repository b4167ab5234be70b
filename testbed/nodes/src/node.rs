//! One node: a host of the lab with kubelet, containerd and kube-proxy on it.

use std::ffi::OsStr;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use testbed_lab::{ForeignNetwork, Host, Place, Process, eventually, executable};

use crate::cgroups::Layout;
use crate::files;
use crate::machine::{Machine, Program};

/// An address that no pod has (RFC 5737).
const NOWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 254));

/// Longest time in which a program of a node comes up or ends on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Names of the programs that a node's process 1 keeps running.
const CONTAINERD: &str = "containerd";
const KUBELET: &str = "kubelet";
const KUBE_PROXY: &str = "kube-proxy";

/// Script that deletes what the kernel forgets at a reboot; interfaces and addresses of the machine itself are there again at once.
const FORGET: &str = r#"
nft flush ruleset
conntrack -F 2>/dev/null || true
for link in $(ip -o link | sed 's/^[0-9]*: //; s/[@:].*//'); do
    case $link in lo | eth0) ;; *) ip link del "$link" 2>/dev/null || true ;; esac
done
for family in -4 -6; do
    ip $family rule flush
    ip $family rule add priority 32766 lookup main
    [ $family = -6 ] || ip $family rule add priority 32767 lookup default
    for table in 116 117 118 119 180 181 182 183; do ip $family route flush table $table 2>/dev/null || true; done
    for protocol in 30 31; do ip $family route flush table main proto $protocol 2>/dev/null || true; done
done
"#;

/// A node of a cluster. Dropping it ends the node with all its processes.
#[derive(Debug)]
pub struct Node {
    name: String,
    host: Host,
    addresses: Vec<IpAddr>,
    directory: PathBuf,
    machine: Machine,
    power: Option<Power>,
}

/// A node that is switched on.
#[derive(Debug)]
struct Power {
    /// Ends with process 1, and takes it with it.
    _keeper: Process,
    /// Process 1 of the node, as the machine of the test sees it.
    init: u32,
}

/// Facts about the cluster that a node needs to join it.
pub(crate) struct Membership<'a> {
    pub(crate) cluster: &'a str,
    pub(crate) directory: &'a Path,
    pub(crate) kubebed: &'a Path,
    pub(crate) authority: &'a Path,
    pub(crate) kubelet_kubeconfig: &'a Path,
    pub(crate) proxy_kubeconfig: &'a Path,
    pub(crate) pods: &'a str,
    pub(crate) addresses: Vec<IpAddr>,
    /// Programs of the control plane that run on this node.
    pub(crate) control_plane: Vec<Program>,
}

impl Node {
    /// Writes the node's files; nothing runs yet.
    pub(crate) fn new(host: Host, membership: Membership<'_>) -> Result<Self> {
        let Membership { cluster, directory, addresses, .. } = &membership;
        let (name, addresses) = (host.name().to_owned(), addresses.clone());
        let directory = directory.join(&name);
        let mut binds = files::own_directories(&directory);
        for own in binds.iter().map(|(own, _)| own.clone()).chain([directory.join("log")]) {
            fs::create_dir_all(&own).with_context(|| format!("cannot create {}", own.display()))?;
        }
        let write = |name: &str, text: String| {
            let path = directory.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            Ok::<_, anyhow::Error>(path)
        };
        binds.push((write("hosts", files::hosts(&name, &addresses))?, "/etc/hosts".into()));
        let resolv_conf = write("resolv.conf", String::new())?;
        let containerd = write("containerd.toml", files::containerd())?;
        let kubelet = files::kubelet(membership.authority, &resolv_conf).to_string();
        let kubelet = write("kubelet.json", kubelet)?;
        let proxy = files::kube_proxy(membership.proxy_kubeconfig, &name, membership.pods).to_string();
        let proxy = write("kube-proxy.json", proxy)?;
        let own = programs(&membership, &name, &addresses, &containerd, &kubelet, &proxy);
        let machine = Machine {
            cgroups: Layout::new(cluster, &name),
            binds,
            pretended_sysctls: pretended_sysctls(),
            directory: directory.join("log"),
            programs: membership.control_plane.into_iter().chain(own).collect(),
        };
        write("machine.json", serde_json::to_string_pretty(&machine)?)?;
        Ok(Self { name, host, addresses, directory, machine, power: None })
    }

    /// Name of the node, also of its Node object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine in the lab.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Addresses of the node, IPv4 first: the InternalIPs of the Node object.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Directory of the node's disks, configuration and logs (`log/`).
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Log of one of its programs: `containerd`, `kubelet`, `kube-proxy`, or one of the control plane where that runs on nodes.
    pub fn log(&self, program: &str) -> PathBuf {
        self.machine.log_file(program)
    }

    /// Whether it is switched on.
    pub fn is_on(&self) -> bool {
        self.power.is_some()
    }

    /// Switches it on; kubelet waits for [`Node::start_kubelet`], so that images can be there before pods are.
    pub(crate) fn power_on_held(&mut self) -> Result<()> {
        for program in [KUBELET, KUBE_PROXY] {
            fs::write(self.machine.hold_file(program), "")?;
        }
        self.boot()?;
        self.wait_for_containerd()
    }

    /// Lets kubelet and kube-proxy run.
    pub(crate) fn start_kubelet(&self) -> Result<()> {
        [KUBELET, KUBE_PROXY].iter().try_for_each(|program| {
            fs::remove_file(self.machine.hold_file(program))
                .with_context(|| format!("{program} was not held back"))
        })
    }

    /// Switches it on again after [`Node::power_cut`]: the disks are as they were, the kernel remembers nothing.
    ///
    /// # Errors
    /// It is on, or does not come up.
    pub fn power_on(&mut self) -> Result<()> {
        ensure!(self.power.is_none(), "{} is on already", self.name);
        self.boot()?;
        self.wait_for_containerd()
    }

    /// Kills everything on the node at once and makes its kernel forget its network, as when the plug is pulled.
    ///
    /// # Errors
    /// It is off already.
    pub fn power_cut(&mut self) -> Result<()> {
        ensure!(self.power.is_some(), "{} is off already", self.name);
        self.switch_off()?;
        self.host.shell(FORGET).map(drop)
    }

    /// Kills every process of the node at once and waits until they have ended.
    pub(crate) fn switch_off(&mut self) -> Result<()> {
        let Some(power) = self.power.take() else { return Ok(()) };
        let init = PathBuf::from(format!("/proc/{}", power.init));
        drop(power);
        eventually(TIMEOUT, || {
            ensure!(!init.exists(), "process 1 of {} is still there", self.name);
            Ok(())
        })?;
        self.machine.cgroups.remove();
        Ok(())
    }

    /// Kills kubelet; process 1 starts it again.
    ///
    /// # Errors
    /// It does not run, or does not come back.
    pub fn restart_kubelet(&self) -> Result<()> {
        self.restart(KUBELET)
    }

    /// Kills kube-proxy; process 1 starts it again.
    ///
    /// # Errors
    /// As for [`Node::restart_kubelet`].
    pub fn restart_kube_proxy(&self) -> Result<()> {
        self.restart(KUBE_PROXY)
    }

    /// Kills containerd and waits until it answers again. Its shims, and so the pods, live on.
    ///
    /// # Errors
    /// It does not run, or does not come back.
    pub fn restart_containerd(&self) -> Result<()> {
        self.restart(CONTAINERD)?;
        self.wait_for_containerd()
    }

    /// A command in all namespaces of the node.
    ///
    /// # Errors
    /// The node is off.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let power = self.power.as_ref().with_context(|| format!("{} is off", self.name))?;
        let mut command = Command::new("nsenter");
        command.args(["--target", &power.init.to_string(), "--all", "--"]).arg(program);
        command.env("CONTAINERD_ADDRESS", "/run/containerd/containerd.sock");
        Ok(command)
    }

    /// Runs a program in all namespaces of the node and returns its standard output.
    ///
    /// # Errors
    /// The node is off, or the program failed; the error holds its standard error.
    pub fn exec<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<String> {
        let (program, rest) = arguments.split_first().context("nothing to run")?;
        let output = self
            .command(program)?
            .args(rest)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", program.as_ref().display()))?;
        if !output.status.success() {
            let words: Vec<_> = arguments.iter().map(|word| word.as_ref().to_string_lossy()).collect();
            let errors = String::from_utf8_lossy(&output.stderr);
            bail!("{} failed on {} ({}): {}", words.join(" "), self.name, output.status, errors.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The network of the pod that has this address, on this node.
    ///
    /// # Errors
    /// The node is off, or none or several here have it.
    pub fn pod_network(&self, address: IpAddr) -> Result<ForeignNetwork> {
        let power = self.power.as_ref().with_context(|| format!("{} is off", self.name))?;
        let directory = PathBuf::from(format!("/proc/{}/root/run/netns", power.init));
        let entries = fs::read_dir(&directory)
            .with_context(|| format!("cannot list the network namespaces of {}", self.name))?;
        let has_address = |entry: fs::DirEntry| {
            // One that is just being made or removed cannot be entered, and is not the one.
            let network = ForeignNetwork::open(&address.to_string(), &entry.path()).ok()?;
            let binds =
                |address: IpAddr| matches!(network.inside(|| UdpSocket::bind((address, 0))), Ok(Ok(_)));
            // In one that was just made, and has no address yet, the kernel lets sockets bind to every one of IPv4.
            let is_local = binds(address) && !binds(NOWHERE);
            is_local.then(|| (network, entry.file_name()))
        };
        let (mut networks, names): (Vec<_>, Vec<_>) = entries.flatten().filter_map(has_address).unzip();
        ensure!(
            networks.len() < 2,
            "several networks on {} have the address {address}: {names:?}",
            self.name
        );
        networks.pop().with_context(|| format!("no pod on {} has the address {address}", self.name))
    }

    /// A line to paste into a root shell to inspect it from inside.
    pub fn enter_command(&self) -> String {
        match &self.power {
            Some(power) => format!("nsenter --target {} --all", power.init),
            None => self.host.enter_command(),
        }
    }

    /// Makes an image (an OCI or docker archive) known to the node's container runtime.
    ///
    /// # Errors
    /// The node is off, or containerd refuses.
    pub fn import_image(&self, archive: &Path) -> Result<()> {
        let archive = archive.to_string_lossy();
        self.exec(&["ctr", "-n", "k8s.io", "images", "import", "--snapshotter", "overlayfs", &archive])
            .with_context(|| format!("cannot import {archive}"))
            .map(drop)
    }

    /// Puts a network configuration in place, as the container runtime requires: it does not notice a file that was
    /// moved in from another directory.
    pub(crate) fn configure_network(&self, name: &str, text: &str) -> Result<()> {
        let directory = self.directory.join("cni-conf");
        let unfinished = directory.join(".unfinished");
        fs::write(&unfinished, text)?;
        fs::rename(&unfinished, directory.join(name)).context("cannot name the network configuration")
    }

    fn boot(&mut self) -> Result<()> {
        self.machine.cgroups.make()?;
        let mut command = self.host.command(executable("testbed-machine")?)?;
        command.arg("enter").arg(self.directory.join("machine.json"));
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        let mut keeper = self.host.spawn(&mut command, self.directory.join("log/machine.log"))?;
        let children = format!("/proc/{0}/task/{0}/children", keeper.id());
        let init = eventually(TIMEOUT, || {
            // An end is an answer too: trying again would not help.
            match keeper.status()? {
                Some(status) => Ok(Err(status)),
                None => Ok(Ok(fs::read_to_string(&children)?.trim().parse()?)),
            }
        })?;
        let init = match init {
            Ok(init) => init,
            Err(status) => bail!("{} did not boot ({status}): {}", self.name, keeper.output()?),
        };
        self.power = Some(Power { _keeper: keeper, init });
        Ok(())
    }

    fn wait_for_containerd(&self) -> Result<()> {
        eventually(TIMEOUT, || self.exec(&["ctr", "version"])).map(drop)
    }

    fn restart(&self, program: &str) -> Result<()> {
        let file = self.machine.pid_file(program);
        let before = fs::read_to_string(&file).with_context(|| format!("{program} was never started"))?;
        self.exec(&["kill", "-KILL", &before])?;
        eventually(TIMEOUT, || {
            let now = fs::read_to_string(&file)?;
            ensure!(now != before, "{program} of {} was not started again", self.name);
            Ok(())
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // What cannot be ended here ends with the lab.
        let _ = self.switch_off();
    }
}

/// The values that kubelet insists on (`pkg/kubelet/cm/container_manager_linux.go`).
fn pretended_sysctls() -> Vec<(String, String)> {
    [
        ("vm/overcommit_memory", "1"),
        ("vm/panic_on_oom", "0"),
        ("kernel/panic", "10"),
        ("kernel/panic_on_oops", "1"),
        ("kernel/keys/root_maxkeys", "1000000"),
        ("kernel/keys/root_maxbytes", "25000000"),
    ]
    .iter()
    .filter(|(name, _)| Path::new("/proc/sys").join(name).exists())
    .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
    .collect()
}

fn programs(
    membership: &Membership<'_>,
    name: &str,
    addresses: &[IpAddr],
    containerd: &Path,
    kubelet: &Path,
    proxy: &Path,
) -> Vec<Program> {
    let kubebed = membership.kubebed.display().to_string();
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let program = |name: &str, command: Vec<String>| Program { name: name.to_owned(), command };
    vec![
        program(
            CONTAINERD,
            ["containerd", "--log-level", "warn", "--config"]
                .map(str::to_owned)
                .into_iter()
                .chain([containerd.display().to_string()])
                .collect(),
        ),
        program(
            KUBELET,
            vec![
                kubebed.clone(),
                KUBELET.to_owned(),
                format!("--config={}", kubelet.display()),
                format!("--kubeconfig={}", membership.kubelet_kubeconfig.display()),
                format!("--hostname-override={name}"),
                format!("--node-ip={}", addresses.join(",")),
                "--root-dir=/var/lib/kubelet".to_owned(),
            ],
        ),
        program(KUBE_PROXY, vec![kubebed, KUBE_PROXY.to_owned(), format!("--config={}", proxy.display())]),
    ]
}
