//! `fairlead install`, and its counterpart in `fairlead cleanup`: the CNI plugin and its network configuration on a node.
//!
//! The init container of the DaemonSet runs `install` at every start; names and defaults are those of coil-installer.
//! Files are replaced atomically, unchanged ones are not written, and those of other programs are not touched.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail, ensure};
use clap::Args;
use fairlead_api::names::NODE_SOCKET;
use serde_json::Value;

use crate::netconf;

/// Size limit of a network configuration.
const MAX_BYTES: usize = 1 << 20;

/// Paths of the plugin and its configuration.
#[derive(Debug, Args)]
pub struct Paths {
    /// File name of the network configuration; container runtimes use the first one in the directory
    #[arg(long, value_name = "FILE", default_value = "10-coil.conflist", env = "CNI_CONF_NAME")]
    conf_name: String,
    /// Directory of network configurations
    #[arg(long, value_name = "DIRECTORY", default_value = "/host/etc/cni/net.d", env = "CNI_ETC_DIR")]
    conf_dir: PathBuf,
    /// Directory of CNI plugins
    #[arg(long, value_name = "DIRECTORY", default_value = "/host/opt/cni/bin", env = "CNI_BIN_DIR")]
    bin_dir: PathBuf,
    /// CNI plugin to install; its file name is the plugin type in network configurations
    #[arg(long, value_name = "PATH", default_value = "/usr/local/coil/coil", env = "COIL_PATH")]
    plugin: PathBuf,
}

/// Arguments of `fairlead install`.
#[derive(Debug, Args)]
pub struct InstallArguments {
    #[command(flatten)]
    paths: Paths,
    /// Read the network configuration from this file
    #[arg(long, value_name = "PATH", env = "CNI_NETCONF_FILE")]
    netconf_file: Option<PathBuf>,
    /// Network configuration; takes precedence over the file
    #[arg(long, value_name = "JSON", env = "CNI_NETCONF")]
    netconf: Option<String>,
    /// Write no network configuration: add the plugin behind those of the one that the container runtime uses
    #[arg(long, conflicts_with_all = ["netconf", "netconf_file"])]
    chain: bool,
    /// Socket of the node program, for --chain
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET, requires = "chain")]
    socket: PathBuf,
}

/// Change of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Unchanged,
    Written,
}

/// Runs `fairlead install`.
///
/// # Errors
/// A path or the configuration is invalid, the plugin does not run on this node, or a file cannot be read or written.
pub fn install(arguments: &InstallArguments) -> anyhow::Result<ExitCode> {
    let paths = &arguments.paths;
    let kind = paths.plugin_type()?;
    if arguments.chain {
        return chain(paths, kind, &arguments.socket);
    }
    let text = netconf(arguments)?;
    let versions = supported_versions(&paths.plugin)?;
    let warning = netconf::check(&text, &paths.conf_name, kind, &versions).map_err(|reason| {
        anyhow::anyhow!("the network configuration for {} is invalid: {reason}", paths.conf_name)
    })?;
    if let Some(warning) = warning {
        tracing::warn!("{warning}");
    }
    // The runtime uses the configuration as soon as it exists, so the plugin is installed first.
    install_plugin(paths, kind)?;
    let conf = put(&paths.conf_dir, &paths.conf_name, text.as_bytes(), 0o644)?;
    report(&paths.conf_dir.join(&paths.conf_name), conf);
    for other in sorted_before(&paths.conf_dir, &paths.conf_name)? {
        tracing::warn!(
            file = %paths.conf_dir.join(&other).display(),
            "the container runtime uses this network configuration instead of {}, because its name comes first: \
             remove it, or set CNI_CONF_NAME to a name that comes before it", paths.conf_name
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn install_plugin(paths: &Paths, kind: &str) -> anyhow::Result<()> {
    let plugin =
        fs::read(&paths.plugin).with_context(|| format!("cannot read {}", paths.plugin.display()))?;
    report(&paths.bin_dir.join(kind), put(&paths.bin_dir, kind, &plugin, 0o755)?);
    Ok(())
}

/// `fairlead install --chain`: the other plugin's configuration stays as it is, with one more plugin.
fn chain(paths: &Paths, kind: &str, socket: &Path) -> anyhow::Result<ExitCode> {
    let versions = supported_versions(&paths.plugin)?;
    let name = configurations(&paths.conf_dir)?.into_iter().next().with_context(|| {
        let directory = paths.conf_dir.display();
        format!("there is no network configuration in {directory} yet: another CNI plugin must be installed first, and this is tried again")
    })?;
    let path = paths.conf_dir.join(&name);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let longer = netconf::with_plugin(&text, &name, kind, socket, &versions)
        .map_err(|reason| anyhow::anyhow!("cannot add the plugin {kind} to {}: {reason}", path.display()))?;
    install_plugin(paths, kind)?;
    let change = match longer {
        Some(longer) => replace(&paths.conf_dir, &name, longer.as_bytes())?,
        None => Change::Unchanged,
    };
    report(&path, change);
    Ok(ExitCode::SUCCESS)
}

/// Replaces the content of a file of another program, which keeps its mode.
fn replace(directory: &Path, name: &str, content: &[u8]) -> anyhow::Result<Change> {
    let path = directory.join(name);
    let mode =
        fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?.permissions().mode();
    put(directory, name, content, mode & 0o7777)
}

/// Removes the plugin and its configuration, also from configurations of other plugins.
///
/// # Errors
/// A path is invalid, or a file cannot be read, written or removed.
pub fn remove_files(paths: &Paths) -> anyhow::Result<()> {
    let kind = paths.plugin_type()?;
    let conf = paths.conf_dir.join(&paths.conf_name);
    match fs::read_to_string(&conf) {
        Ok(text) if netconf::names(&text, kind) => remove(&conf)?,
        Ok(_) => tracing::warn!(file = %conf.display(), "kept: it does not name the plugin {kind}"),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", conf.display())),
    }
    for name in configurations_if_any(&paths.conf_dir)? {
        let path = paths.conf_dir.join(&name);
        // It may be another program's, in any state, or gone meanwhile.
        let shorter = match fs::read_to_string(&path) {
            Ok(text) => netconf::without_plugin(&text, kind),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "cannot read whether it names the plugin");
                None
            }
        };
        if let Some(shorter) = shorter {
            report(&path, replace(&paths.conf_dir, &name, shorter.as_bytes())?);
        }
    }
    // Without the configuration the runtime does not execute the plugin any more.
    remove(&paths.bin_dir.join(kind))
}

impl Paths {
    /// The plugin's type, if all paths are valid.
    fn plugin_type(&self) -> anyhow::Result<&str> {
        let name = &self.conf_name;
        let known = [".conf", ".conflist", ".json"].iter().any(|ending| name.ends_with(ending));
        ensure!(
            known && !name.contains('/') && !name.starts_with('.'),
            "CNI_CONF_NAME {name:?} is not a file name that ends with .conflist, .conf or .json: runtimes do not read it"
        );
        let kind = self.plugin.file_name().and_then(|name| name.to_str());
        kind.with_context(|| format!("COIL_PATH {} is not the path of a file", self.plugin.display()))
    }
}

fn netconf(arguments: &InstallArguments) -> anyhow::Result<String> {
    let non_empty = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
    let text = match (non_empty(&arguments.netconf), &arguments.netconf_file) {
        (Some(text), _) => text,
        (None, Some(path)) => fs::read_to_string(path)
            .with_context(|| format!("cannot read the network configuration {}", path.display()))?,
        (None, None) => bail!("there is no network configuration: set CNI_NETCONF or CNI_NETCONF_FILE"),
    };
    ensure!(text.len() <= MAX_BYTES, "the network configuration is longer than {MAX_BYTES} bytes");
    Ok(text)
}

/// Executes the plugin with VERSION, which also shows that it runs on this node.
fn supported_versions(plugin: &Path) -> anyhow::Result<Vec<String>> {
    let context = || format!("{} is not the CNI plugin (COIL_PATH)", plugin.display());
    let output = Command::new(plugin)
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", plugin.display()))
        .with_context(context)?;
    ensure!(output.status.success(), "{}: it exited with {}", context(), output.status);
    let answer: Value = serde_json::from_slice(&output.stdout).with_context(context)?;
    let versions = answer.get("supportedVersions").and_then(Value::as_array).with_context(context)?;
    Ok(versions.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

/// Makes sure that the file has this content and mode. New content is written to a temporary file in the same directory and
/// renamed: an executable that runs cannot be overwritten, and container runtimes do not notice files that are moved from
/// another directory.
fn put(directory: &Path, name: &str, content: &[u8], mode: u32) -> anyhow::Result<Change> {
    let path = directory.join(name);
    if is_unchanged(&path, content, mode) {
        return Ok(Change::Unchanged);
    }
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(directory)?;
        // Runtimes do not read a name with this ending. A file left by a killed run is replaced.
        let temporary = directory.join(format!(".{name}.fairlead"));
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        // `open` applies the umask to its mode.
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(directory)?.sync_all()
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Change::Written)
}

fn is_unchanged(path: &Path, content: &[u8], mode: u32) -> bool {
    let Ok(metadata) = fs::symlink_metadata(path) else { return false };
    metadata.is_file()
        && metadata.permissions().mode() & 0o7777 == mode
        && fs::read(path).is_ok_and(|found| found == content)
}

/// Configurations that a runtime would use instead of ours.
fn sorted_before(directory: &Path, name: &str) -> anyhow::Result<Vec<String>> {
    let mut others = configurations(directory)?;
    others.retain(|other| other.as_str() < name);
    Ok(others)
}

/// Names of configurations, in the order of their names: runtimes use the first.
fn configurations(directory: &Path) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| [".conf", ".conflist", ".json"].iter().any(|ending| name.ends_with(ending)))
        .collect();
    names.sort();
    Ok(names)
}

/// As [`configurations`]; none where there is no directory.
fn configurations_if_any(directory: &Path) -> anyhow::Result<Vec<String>> {
    if directory.exists() { configurations(directory) } else { Ok(Vec::new()) }
}

fn report(path: &Path, change: Change) {
    match change {
        Change::Unchanged => tracing::info!(file = %path.display(), "unchanged"),
        Change::Written => tracing::info!(file = %path.display(), "written"),
    }
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => tracing::info!(file = %path.display(), "removed"),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
