//! Files beside the socket: pending DELs, and the attachments of each network. [`fairlead_wire::spool`] says where they
//! are and why.
//!
//! Records are no second source of truth: one without an attachment costs one look-up, and GC leaves an attachment
//! without a record alone.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use fairlead_ipam::Key;
use fairlead_wire::spool;

/// Record of an attachment: its network, and when it was attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// `name` of the network configuration.
    pub network: String,
    /// Time at which it was last attached; `None` where the file system does not say.
    pub since: Option<SystemTime>,
}

/// Places of these files.
#[derive(Debug, Clone)]
pub struct Records {
    pending: PathBuf,
    networks: PathBuf,
    namespace_pools: PathBuf,
    attached: PathBuf,
}

impl Records {
    /// The directories that belong to a socket.
    pub fn beside(socket: &Path) -> Self {
        Self {
            pending: spool::pending_deletions(socket),
            networks: spool::networks(socket),
            namespace_pools: spool::namespace_pools(socket),
            attached: spool::attached(socket),
        }
    }

    /// File with the pools of namespaces.
    pub(super) fn namespace_pools(&self) -> PathBuf {
        self.namespace_pools.clone()
    }

    /// Whether an ADD of this boot came as far as [`Self::note_attached`], also one of an earlier program: those of before that file have
    /// left records of attachments.
    pub(super) fn was_attached(&self) -> bool {
        self.attached.exists() || self.all().is_ok_and(|all| !all.is_empty())
    }

    /// Remembers until the next boot that pods are attached.
    pub(super) fn note_attached(&self) {
        if self.attached.exists() {
            return;
        }
        // Several ADDs may do so at once. The file is empty, so that none sees half of it.
        let directory = self.attached.parent().map_or(Ok(()), fs::create_dir_all);
        if let Err(error) = directory.and_then(|()| File::create(&self.attached)) {
            let file = self.attached.display();
            tracing::warn!(%file, %error, "cannot note that pods are attached: a program that starts without the API server attaches none");
        }
    }

    /// DELs that plugins left for the node program.
    ///
    /// # Errors
    /// The directory is there and cannot be read.
    pub fn pending(&self) -> io::Result<Vec<Key>> {
        keys(&self.pending)
    }

    /// Whether a DEL of this attachment is pending.
    pub fn is_pending(&self, key: &Key) -> bool {
        spool::file_name(&key.container_id, &key.ifname).is_some_and(|name| self.pending.join(name).exists())
    }

    /// Removes a pending DEL: it is done, or an ADD cancels it.
    ///
    /// # Errors
    /// There is one and the file system refuses to remove it.
    pub fn remove_pending(&self, key: &Key) -> io::Result<()> {
        remove(&self.pending, key)
    }

    /// Records an attachment of a network.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn add(&self, network: &str, key: &Key) -> io::Result<()> {
        let Some(name) = spool::file_name(&key.container_id, &key.ifname) else { return Ok(()) };
        let directory = self.networks.join(network);
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        File::create(directory.join(name)).map(drop)
    }

    /// Removes the record of an attachment.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn remove(&self, key: &Key) -> io::Result<()> {
        match fs::read_dir(&self.networks) {
            Ok(networks) => {
                for network in networks {
                    remove(&network?.path(), key)?;
                }
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The attachments of a network.
    ///
    /// # Errors
    /// The directory is there and cannot be read.
    pub fn attachments(&self, network: &str) -> io::Result<Vec<Key>> {
        if !spool::is_identifier(network) {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                format!("{network:?} is not a valid network name"),
            ));
        }
        keys(&self.networks.join(network))
    }

    /// Every record.
    ///
    /// # Errors
    /// A directory is there and cannot be read.
    pub fn all(&self) -> io::Result<BTreeMap<Key, Record>> {
        let networks = match fs::read_dir(&self.networks) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            networks => networks?,
        };
        let mut all = BTreeMap::new();
        for entry in networks {
            let directory = entry?.path();
            let Some(network) = directory.file_name().and_then(|name| name.to_str()) else { continue };
            for key in keys(&directory)? {
                let file = spool::file_name(&key.container_id, &key.ifname).map(|name| directory.join(name));
                let since = file.and_then(|file| file.metadata().ok()?.modified().ok());
                all.insert(key, Record { network: network.to_owned(), since });
            }
        }
        Ok(all)
    }
}

/// Skips files with other names.
fn keys(directory: &Path) -> io::Result<Vec<Key>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut keys = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        if let Some((container_id, ifname)) = name.to_str().and_then(spool::parse_file_name) {
            keys.push(Key { container_id: container_id.to_owned(), ifname: ifname.to_owned() });
        }
    }
    keys.sort();
    Ok(keys)
}

fn remove(directory: &Path, key: &Key) -> io::Result<()> {
    let Some(name) = spool::file_name(&key.container_id, &key.ifname) else { return Ok(()) };
    match fs::remove_file(directory.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> Key {
        Key { container_id: id.to_owned(), ifname: "eth0".to_owned() }
    }

    #[test]
    fn attachments_are_kept_by_network_until_they_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::beside(&directory.path().join("s"));
        assert_eq!(records.attachments("a").unwrap(), []);
        assert!(records.all().unwrap().is_empty());
        records.remove(&key("one")).unwrap();
        for (network, id) in [("a", "one"), ("a", "two"), ("a", "one"), ("b", "three")] {
            records.add(network, &key(id)).unwrap();
        }
        assert_eq!(records.attachments("a").unwrap(), [key("one"), key("two")]);
        assert_eq!(records.attachments("b").unwrap(), [key("three")]);
        let all = records.all().unwrap();
        assert_eq!(
            all.keys().map(|key| key.container_id.as_str()).collect::<Vec<_>>(),
            ["one", "three", "two"]
        );
        assert!(all[&key("three")].network == "b" && all[&key("three")].since.is_some());
        records.remove(&key("one")).unwrap();
        assert_eq!(records.attachments("a").unwrap(), [key("two")]);
        assert!(records.attachments("../a").is_err());
    }

    #[test]
    fn a_file_or_a_record_of_an_earlier_version_says_that_pods_were_attached() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let records = Records::beside(&socket);
        assert!(!records.was_attached());
        records.add("a", &key("one")).unwrap();
        assert!(records.was_attached());
        records.remove(&key("one")).unwrap();
        assert!(!records.was_attached());
        for _ in 0..2 {
            records.note_attached();
            assert!(records.was_attached() && spool::attached(&socket).is_file());
        }
    }

    #[test]
    fn pending_deletions_are_found_and_other_files_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let records = Records::beside(&socket);
        assert_eq!(records.pending().unwrap(), []);
        let pending = spool::pending_deletions(&socket);
        fs::create_dir_all(&pending).unwrap();
        for name in ["c:eth0", "README", ".c:eth0", "c:a b"] {
            fs::write(pending.join(name), "").unwrap();
        }
        assert_eq!(records.pending().unwrap(), [key("c")]);
        assert!(records.is_pending(&key("c")));
        records.remove_pending(&key("c")).unwrap();
        records.remove_pending(&key("c")).unwrap();
        assert_eq!(records.pending().unwrap(), []);
    }
}
