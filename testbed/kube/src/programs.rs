//! Programs of the control plane: one binary of our own, or the user's `KUBEBUILDER_ASSETS`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::bail;

use crate::{Options, build};

pub(crate) enum Programs {
    /// The binary that is every program; its name is the first argument.
    Kubebed(PathBuf),
    /// A directory with one executable per program.
    Assets(PathBuf),
}

impl Programs {
    /// Prefers the user's programs; falls back to ours where theirs cannot do what `options` ask.
    pub(crate) fn find(options: &Options) -> anyhow::Result<Self> {
        let named = options.assets.clone().map(PathBuf::into_os_string);
        match assets_dir(named.or_else(|| std::env::var_os("KUBEBUILDER_ASSETS")))? {
            Some(directory) if assets_suffice(options) => Ok(Self::Assets(directory)),
            _ => Ok(Self::Kubebed(build::binary()?)),
        }
    }

    /// The command for one program of Kubernetes, run where the control plane runs.
    pub(crate) fn command(&self, options: &Options, name: &str) -> Command {
        match self {
            Self::Kubebed(binary) => {
                let mut command = options.command(binary);
                command.arg(name);
                command
            }
            Self::Assets(directory) => options.command(&directory.join(name)),
        }
    }

    /// The command as the shell of a [`Supervised`](crate::supervised::Supervised) will run it: the shell, not the program, goes through the
    /// launcher.
    pub(crate) fn direct(&self, name: &str) -> Command {
        self.command(&Options::default(), name)
    }
}

/// Whether etcd, kube-apiserver and kubectl are enough for these options: such assets have nothing else, and the API server then makes its
/// own certificate, for one address.
fn assets_suffice(options: &Options) -> bool {
    !options.controllers
        && !options.scheduler
        && options.extra_names.is_empty()
        && options.addresses.len() <= 1
}

fn assets_dir(variable: Option<OsString>) -> anyhow::Result<Option<PathBuf>> {
    let Some(directory) = variable.filter(|value| !value.is_empty()).map(PathBuf::from) else {
        return Ok(None);
    };
    for name in ["etcd", "kube-apiserver", "kubectl"] {
        if !Path::is_file(&directory.join(name)) {
            bail!(
                "{} (KUBEBUILDER_ASSETS) has no {name}: unset it to use the built-in bed",
                directory.display()
            );
        }
    }
    Ok(Some(directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assets_variable_is_optional_but_never_half_right() {
        assert_eq!(assets_dir(None).unwrap(), None);
        assert_eq!(assets_dir(Some("".into())).unwrap(), None);
        let error = assets_dir(Some("/nonexistent".into())).unwrap_err().to_string();
        assert!(error.contains("/nonexistent (KUBEBUILDER_ASSETS) has no etcd"), "{error}");
    }

    #[test]
    fn assets_serve_plain_requests_only() {
        assert!(assets_suffice(&Options::default()));
        assert!(!assets_suffice(&Options { controllers: true, ..Options::default() }));
        assert!(!assets_suffice(&Options { extra_names: vec!["api".into()], ..Options::default() }));
    }
}
