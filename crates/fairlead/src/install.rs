//! `fairlead install` and `uninstall`: the CNI plugin and its network configuration on a node.
//!
//! The init container of the DaemonSet runs `install` at every start; names and defaults are those of coil-installer. Whatever
//! it writes appears whole or not at all, files of others stay, and what is right already is not touched.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde_json::Value;

use crate::netconf;

/// Longest answer of the plugin that makes sense, and longest network configuration.
const MAX_BYTES: usize = 1 << 20;

/// Where plugin and configuration belong.
#[derive(Debug, Args)]
pub(crate) struct Places {
    /// File name of the network configuration; runtimes take the first one of the directory
    #[arg(long, default_value = "10-coil.conflist", env = "CNI_CONF_NAME")]
    conf_name: String,
    /// Directory of network configurations
    #[arg(long, default_value = "/host/etc/cni/net.d", env = "CNI_ETC_DIR")]
    conf_dir: PathBuf,
    /// Directory of plugins
    #[arg(long, default_value = "/host/opt/cni/bin", env = "CNI_BIN_DIR")]
    bin_dir: PathBuf,
    /// The plugin; its file name is the type that network configurations name
    #[arg(long, default_value = "/usr/local/coil/coil", env = "COIL_PATH")]
    plugin: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct InstallArguments {
    #[command(flatten)]
    places: Places,
    /// File with the network configuration
    #[arg(long, env = "CNI_NETCONF_FILE")]
    netconf_file: Option<PathBuf>,
    /// The network configuration itself; wins over the file
    #[arg(long, env = "CNI_NETCONF")]
    netconf: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct UninstallArguments {
    #[command(flatten)]
    places: Places,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Written,
}

/// `fairlead install`
pub(crate) fn install(arguments: &InstallArguments) -> anyhow::Result<ExitCode> {
    let places = &arguments.places;
    let kind = places.checked()?;
    let text = netconf(arguments)?;
    let versions = supported_versions(&places.plugin)?;
    let remark = netconf::check(&text, &places.conf_name, kind, &versions).map_err(|reason| {
        anyhow::anyhow!("the network configuration for {} is wrong: {reason}", places.conf_name)
    })?;
    if let Some(remark) = remark {
        tracing::warn!("{remark}");
    }
    let plugin =
        fs::read(&places.plugin).with_context(|| format!("cannot read {}", places.plugin.display()))?;
    // The runtime uses the configuration the moment it is there, so the plugin comes first.
    report(&places.bin_dir.join(kind), put(&places.bin_dir, kind, &plugin, 0o755)?);
    let conf = put(&places.conf_dir, &places.conf_name, text.as_bytes(), 0o644)?;
    report(&places.conf_dir.join(&places.conf_name), conf);
    for other in sorted_before(&places.conf_dir, &places.conf_name)? {
        tracing::warn!(
            file = %places.conf_dir.join(&other).display(),
            "the container runtime uses this network configuration instead of {}, because its name comes first: \
             remove it, or set CNI_CONF_NAME to a name that comes before it", places.conf_name
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// `fairlead uninstall`
pub(crate) fn uninstall(arguments: &UninstallArguments) -> anyhow::Result<ExitCode> {
    let places = &arguments.places;
    let kind = places.checked()?;
    let conf = places.conf_dir.join(&places.conf_name);
    match fs::read_to_string(&conf) {
        Ok(text) if netconf::names(&text, kind) => remove(&conf)?,
        Ok(_) => tracing::warn!(file = %conf.display(), "left alone: it does not name the plugin {kind}"),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", conf.display())),
    }
    // Without the configuration nobody starts it any more.
    remove(&places.bin_dir.join(kind))?;
    Ok(ExitCode::SUCCESS)
}

impl Places {
    /// The plugin's type, if all of it makes sense.
    fn checked(&self) -> anyhow::Result<&str> {
        let name = &self.conf_name;
        let known = [".conf", ".conflist", ".json"].iter().any(|ending| name.ends_with(ending));
        ensure!(
            known && !name.contains('/') && !name.starts_with('.'),
            "CNI_CONF_NAME {name:?} is no file name that ends with .conflist, .conf or .json: runtimes would not read it"
        );
        let kind = self.plugin.file_name().and_then(|name| name.to_str());
        kind.with_context(|| format!("COIL_PATH {} names no file", self.plugin.display()))
    }
}

fn netconf(arguments: &InstallArguments) -> anyhow::Result<String> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
    let text = match (given(&arguments.netconf), &arguments.netconf_file) {
        (Some(text), _) => text,
        (None, Some(path)) => fs::read_to_string(path)
            .with_context(|| format!("cannot read the network configuration {}", path.display()))?,
        (None, None) => bail!("there is no network configuration: set CNI_NETCONF or CNI_NETCONF_FILE"),
    };
    ensure!(text.len() <= MAX_BYTES, "the network configuration is longer than {MAX_BYTES} bytes");
    Ok(text)
}

/// Asks the plugin itself, which also shows that it runs.
fn supported_versions(plugin: &Path) -> anyhow::Result<Vec<String>> {
    let context = || format!("{} is not the CNI plugin (COIL_PATH)", plugin.display());
    let output = Command::new(plugin)
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", plugin.display()))
        .with_context(context)?;
    ensure!(output.status.success(), "{}: it ended with {}", context(), output.status);
    let answer: Value = serde_json::from_slice(&output.stdout).with_context(context)?;
    let versions = answer.get("supportedVersions").and_then(Value::as_array).with_context(context)?;
    Ok(versions.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

/// Makes sure that the file has this content and mode. Another content is written beside it and renamed: a plugin that is
/// being executed cannot be overwritten, and container runtimes do not notice files that come from another directory.
fn put(directory: &Path, name: &str, content: &[u8], mode: u32) -> anyhow::Result<Change> {
    let path = directory.join(name);
    if is_so(&path, content, mode) {
        return Ok(Change::None);
    }
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(directory)?;
        // No runtime reads a name without a known ending. One that a killed run left is written again.
        let temporary = directory.join(format!(".{name}.fairlead"));
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        // The mode of `open` is cut by the umask.
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(directory)?.sync_all()
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Change::Written)
}

fn is_so(path: &Path, content: &[u8], mode: u32) -> bool {
    let Ok(metadata) = fs::symlink_metadata(path) else { return false };
    metadata.is_file()
        && metadata.permissions().mode() & 0o7777 == mode
        && fs::read(path).is_ok_and(|found| found == content)
}

/// Configurations a runtime would take instead of ours.
fn sorted_before(directory: &Path, name: &str) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut others: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|other| [".conf", ".conflist", ".json"].iter().any(|ending| other.ends_with(ending)))
        .filter(|other| other.as_str() < name)
        .collect();
    others.sort();
    Ok(others)
}

fn report(path: &Path, change: Change) {
    match change {
        Change::None => tracing::info!(file = %path.display(), "is as it should be"),
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
