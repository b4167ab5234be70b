//! Kubeconfig files as JSON, which every reader of them takes.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use serde_json::{Value, json};

/// A kubeconfig for a bearer token. `authority` is the base64 text of a `certificate-authority-data` field.
pub(crate) fn for_token(server: &str, authority: &str, token: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bed", "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": "bed", "user": {"token": token}}],
        "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "bed"}}],
        "current-context": "bed",
    })
}

/// The (only) cluster of a kubeconfig.
pub(crate) struct Cluster {
    pub(crate) server: String,
    /// Base64 of PEM.
    pub(crate) authority: String,
}

pub(crate) fn read_cluster(path: &Path) -> anyhow::Result<Cluster> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let config: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    let field = |name: &str| {
        let value = config.pointer(&format!("/clusters/0/cluster/{name}")).and_then(Value::as_str);
        value.map(str::to_owned).with_context(|| format!("{} has no {name}", path.display()))
    };
    Ok(Cluster { server: field("server")?, authority: field("certificate-authority-data")? })
}

/// Writes a kubeconfig that only its owner can read.
pub(crate) fn write(path: &Path, config: &Value) -> anyhow::Result<()> {
    let write = || {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        file.write_all(format!("{config:#}\n").as_bytes())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let path = tempfile::NamedTempFile::new().unwrap();
        write(path.path(), &for_token("https://[fd00::1]:6443", "QUJD", "secret")).unwrap();
        let cluster = read_cluster(path.path()).unwrap();
        assert_eq!((cluster.server.as_str(), cluster.authority.as_str()), ("https://[fd00::1]:6443", "QUJD"));
    }

    #[test]
    fn a_broken_file_is_named() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let error = format!("{:#}", read_cluster(path.path()).err().unwrap());
        assert!(error.contains(&path.path().display().to_string()), "{error}");
    }
}
