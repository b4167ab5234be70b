mod members;
mod requests;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use tempfile::TempDir;

use crate::assets::Assets;
use crate::kubebed::Kubebed;
use crate::programs::Programs;
use crate::proxy::Proxy;
use crate::template::Template;
use crate::{Options, kubeconfig, kubectl};

pub use members::Member;

/// A running control plane; dropping it ends its programs and removes its directory.
pub struct ControlPlane {
    // Fields are dropped in this order: the programs before the directory they write to.
    /// `None` until a test makes the first request.
    proxy: Mutex<Option<Arc<Proxy>>>,
    /// `None` after a restart that failed, and where the members run them.
    servers: Mutex<Option<Servers>>,
    programs: Programs,
    options: Options,
    /// None where all programs run here.
    members: Vec<Member>,
    kubeconfig: PathBuf,
    server_url: String,
    directory: TempDir,
}

/// Programs that are not running cannot be stopped or started.
const NOT_HERE: &str = "the control plane has ended, or its members run it";

enum Servers {
    Kubebed(Kubebed),
    Assets(Assets),
}

impl Servers {
    fn start(programs: &Programs, options: &Options, directory: &Path) -> anyhow::Result<Self> {
        let servers = match programs {
            Programs::Kubebed(binary) => Kubebed::start(binary, options, directory).map(Self::Kubebed),
            Programs::Assets(_) => Assets::start(programs, options, directory).map(Self::Assets),
        };
        servers.with_context(|| logs(directory))
    }

    fn kill(self) -> anyhow::Result<()> {
        match self {
            Self::Kubebed(bed) => bed.kill(),
            Self::Assets(assets) => {
                drop(assets);
                Ok(())
            }
        }
    }
}

impl ControlPlane {
    /// Starts a control plane and returns when its API server is ready (seconds; minutes if the programs
    /// must be compiled first, see [`crate::binary`]).
    ///
    /// # Errors
    /// The programs cannot be built or do not become ready; the message contains the end of their logs.
    pub fn start(options: Options) -> anyhow::Result<Self> {
        Self::start_with(Programs::find(&options)?, options)
    }

    pub(crate) fn start_with(programs: Programs, options: Options) -> anyhow::Result<Self> {
        let directory = state_directory(&options)?;
        let template = match (&programs, &options.installed) {
            (Programs::Kubebed(binary), Some(kustomization)) => Some(Template::of(kustomization, binary)?),
            _ => None,
        };
        if let Some(template) = &template {
            template.copy(directory.path())?;
        }
        let servers = Servers::start(&programs, &options, directory.path())?;
        let plane = Self::new(directory, programs, options, Vec::new(), Some(servers))?;
        match (template, &plane.options.installed) {
            (Some(template), _) => template.bind(&plane)?,
            (None, Some(kustomization)) => plane.install(kustomization)?,
            (None, None) => {}
        }
        Ok(plane)
    }

    /// Installs a kustomization and waits until its custom resources are served.
    pub(crate) fn install(&self, kustomization: &Path) -> anyhow::Result<()> {
        let apply = ["apply", "--server-side", "-k"].map(OsStr::new);
        self.kubectl(&[&apply[..], &[kustomization.as_os_str()]].concat())?;
        self.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=120s"]).map(drop)
    }

    /// `directory` has the administrator's kubeconfig by now.
    fn new(
        directory: TempDir,
        programs: Programs,
        options: Options,
        members: Vec<Member>,
        servers: Option<Servers>,
    ) -> anyhow::Result<Self> {
        let kubeconfig = directory.path().join("admin.kubeconfig");
        let server_url = kubeconfig::read_cluster(&kubeconfig)?.server;
        let (proxy, servers) = (Mutex::default(), Mutex::new(servers));
        Ok(Self { proxy, servers, programs, options, members, kubeconfig, server_url, directory })
    }

    /// The kubeconfig of a cluster administrator. It is JSON, which readers of YAML take.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The API server's address as the kubeconfig names it, like `https://127.0.0.1:16443`.
    pub fn server_url(&self) -> &str {
        &self.server_url
    }

    /// Directory of state and logs, while this control plane exists.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Runs kubectl as administrator; returns what it printed on stdout.
    ///
    /// # Errors
    /// kubectl failed; what it printed on stderr is in the message.
    pub fn kubectl<A: AsRef<OsStr>>(&self, args: &[A]) -> anyhow::Result<String> {
        self.kubectl_stdin(args, "")
    }

    /// Like [`Self::kubectl`], with `stdin` as its standard input, for commands with `-f -`.
    ///
    /// # Errors
    /// As for [`Self::kubectl`].
    pub fn kubectl_stdin<A: AsRef<OsStr>>(&self, args: &[A], stdin: &str) -> anyhow::Result<String> {
        kubectl::run(&self.programs, &self.options, self.directory.path(), args, stdin)
    }

    /// Creates or updates the objects in a YAML or JSON text (server-side apply; it wins conflicts).
    ///
    /// # Errors
    /// The API server refuses an object; why is in the message.
    pub fn apply(&self, yaml: &str) -> anyhow::Result<String> {
        self.kubectl_stdin(&["apply", "--server-side", "--force-conflicts", "-f", "-"], yaml)
    }

    /// Kills the API server as a crash would; etcd, controllers and scheduler go on.
    ///
    /// # Errors
    /// It is stopped already, or the control plane has ended.
    pub fn stop_apiserver(&self) -> anyhow::Result<()> {
        let result = match self.servers().as_mut().context(NOT_HERE)? {
            Servers::Kubebed(bed) => bed.command("stop-apiserver"),
            Servers::Assets(assets) => assets.stop_apiserver(),
        };
        result.with_context(|| logs(self.directory.path()))
    }

    /// Starts the API server again, on the same port and state, and waits until it is ready.
    ///
    /// # Errors
    /// It runs already, or does not become ready; the end of its log is in the message.
    pub fn start_apiserver(&self) -> anyhow::Result<()> {
        let result = match self.servers().as_mut().context(NOT_HERE)? {
            Servers::Kubebed(bed) => bed.command("start-apiserver"),
            Servers::Assets(assets) => assets.start_apiserver(&self.programs, &self.options),
        };
        result.with_context(|| logs(self.directory.path()))
    }

    /// Stops the whole control plane, copies etcd's data to `to`, which must not exist, and starts it again.
    ///
    /// # Errors
    /// The data cannot be copied, or the control plane does not become ready again.
    pub fn back_up_etcd(&self, to: &Path) -> anyhow::Result<()> {
        self.while_stopped(|data| copy(data, to))
    }

    /// Stops the whole control plane, replaces etcd's data by a copy of [`Self::back_up_etcd`], and starts it again: what was
    /// written since is gone.
    ///
    /// # Errors
    /// As for [`Self::back_up_etcd`].
    pub fn restore_etcd(&self, from: &Path) -> anyhow::Result<()> {
        self.while_stopped(|data| {
            std::fs::remove_dir_all(data).with_context(|| format!("cannot remove {}", data.display()))?;
            copy(from, data)
        })
    }

    /// Ends the whole control plane and copies etcd's data to `to`, which must not exist.
    pub(crate) fn leave_etcd(&self, to: &Path) -> anyhow::Result<()> {
        self.servers().take().context(NOT_HERE)?.kill()?;
        copy(&self.etcd(), to)
    }

    /// With [`Options::port`] the API server keeps its address.
    fn while_stopped(&self, work: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut servers = self.servers();
        servers.take().context(NOT_HERE)?.kill()?;
        work(&self.etcd())?;
        *servers = Some(Servers::start(&self.programs, &self.options, self.directory.path())?);
        Ok(())
    }

    /// Writes a kubeconfig (mode 0600) to `out` for a token from [`Self::token`]. `server_url_override`
    /// is for clients that reach the server by another address; it must be one of the certificate's.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn kubeconfig_for_token(
        &self,
        token: &str,
        out: &Path,
        server_url_override: Option<&str>,
    ) -> anyhow::Result<()> {
        let cluster = kubeconfig::read_cluster(&self.kubeconfig)?;
        let server = server_url_override.unwrap_or(&cluster.server);
        kubeconfig::write(out, &kubeconfig::for_token(server, &cluster.authority, token))
    }

    /// Directory of etcd's data.
    fn etcd(&self) -> PathBuf {
        self.directory.path().join("etcd")
    }

    fn servers(&self) -> std::sync::MutexGuard<'_, Option<Servers>> {
        // A panic of another test thread leaves the processes as they are; they can still be stopped.
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn state_directory(options: &Options) -> anyhow::Result<TempDir> {
    let parent = options.parent.clone().unwrap_or_else(std::env::temp_dir);
    TempDir::with_prefix_in("fairlead-kube-", parent).context("cannot create a temporary directory")
}

/// Copies a directory with all that is in it. The room that etcd has reserved for what is to come, 128 MB, is a hole in the copy.
pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("cp");
    let output =
        command.args(["-a", "--sparse=always"]).arg(from).arg(to).output().context("cannot run cp")?;
    let error = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "cannot copy {} to {}: {error}", from.display(), to.display());
    Ok(())
}

/// The ends of all logs in `directory`, which is deleted before the error is read.
fn logs(directory: &Path) -> String {
    const LINES: usize = 15;
    const PROGRAMS: [&str; 6] =
        ["kubebed", "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl-proxy"];
    let mut report = "the control plane failed".to_owned();
    for name in PROGRAMS {
        let Ok(log) = std::fs::read(directory.join(format!("{name}.log"))) else { continue };
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let end = lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default();
        if !end.is_empty() {
            report.push_str(&format!("\n--- end of {name}'s log:\n{}", end.join("\n")));
        }
    }
    report
}
