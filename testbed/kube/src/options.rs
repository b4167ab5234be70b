use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes the command that runs the given program where the control plane shall live, for example inside
/// a lab host's network namespace. Arguments, environment and standard streams are set on the result.
pub type Launcher = Box<dyn Fn(&Path) -> Command + Send + Sync>;

/// Programs to start, and their settings; the default is an API server on a free port of 127.0.0.1, without controllers.
#[derive(Default)]
pub struct Options {
    /// Runs the programs, `kubectl` included, somewhere else than beside the test; its loopback
    /// interface must be up.
    pub launcher: Option<Launcher>,
    /// A directory with etcd, kube-apiserver and kubectl to use instead of our own; the environment
    /// variable `KUBEBUILDER_ASSETS` if not given.
    pub assets: Option<PathBuf>,
    /// Directory of a kustomization to install, which has all its files below it: `kubectl apply -k` takes it. Where the programs are our own,
    /// that happens once for its content, and control planes begin with a copy of what came of it.
    pub installed: Option<PathBuf>,
    /// Addresses under which clients reach the API server; empty means 127.0.0.1. All are in its
    /// certificate, the first is in the kubeconfig and advertised to pods. With more than one the server
    /// listens on all interfaces.
    pub addresses: Vec<IpAddr>,
    /// Further DNS names for the server's certificate.
    pub extra_names: Vec<String>,
    /// Directory in which the one with state and logs is made; the system's directory for temporary files if not given.
    pub parent: Option<PathBuf>,
    /// TCP port of the API server; a free one (15000–29999) if not given.
    pub port: Option<u16>,
    /// Run kube-controller-manager (default ServiceAccounts, garbage collection, namespace deletion...).
    pub controllers: bool,
    /// Run kube-scheduler.
    pub scheduler: bool,
    /// Further arguments for kube-apiserver, such as `--feature-gates=...`.
    pub apiserver_args: Vec<String>,
    /// Further arguments for kube-controller-manager.
    pub controller_args: Vec<String>,
}

impl Options {
    pub(crate) fn command(&self, program: &Path) -> Command {
        self.launcher.as_ref().map_or_else(|| Command::new(program), |launch| launch(program))
    }

    pub(crate) fn first_address(&self) -> IpAddr {
        self.addresses.first().copied().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
    }
}
