//! Snapshot of the stored affiliates, in a file that survives a restart.
//!
//! The file holds what the server holds: identifiers, and blobs that it cannot read. It is replaced as a whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use prost::Message;
use prost::bytes::Bytes;

use crate::core::{Discovery, Stored};

const VERSION: u32 = 1;
/// A longer file is not one of ours.
const MAX_SIZE: u64 = 4 << 30;

/// A snapshot cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}", path = path.display())]
pub struct SnapshotError {
    path: PathBuf,
    error: io::Error,
}

/// The file.
#[derive(Debug, Clone)]
pub(super) struct SnapshotFile(PathBuf);

#[derive(Clone, PartialEq, Message)]
struct Saved {
    #[prost(uint32, tag = "1")]
    version: u32,
    /// Milliseconds since 1970.
    #[prost(uint64, tag = "2")]
    saved_at: u64,
    #[prost(message, repeated, tag = "3")]
    affiliates: Vec<SavedAffiliate>,
}

#[derive(Clone, PartialEq, Message)]
struct SavedAffiliate {
    #[prost(string, tag = "1")]
    cluster: String,
    #[prost(string, tag = "2")]
    id: String,
    #[prost(bytes = "bytes", tag = "3")]
    data: Bytes,
    /// Milliseconds from `saved_at`.
    #[prost(uint64, tag = "4")]
    ttl: u64,
    #[prost(message, repeated, tag = "5")]
    endpoints: Vec<SavedEndpoint>,
}

#[derive(Clone, PartialEq, Message)]
struct SavedEndpoint {
    #[prost(bytes = "bytes", tag = "1")]
    sealed: Bytes,
    #[prost(uint64, tag = "2")]
    ttl: u64,
}

impl SnapshotFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Reads what was stored. A file that is not there is normal; of one that cannot be read the log tells.
    pub(super) fn restore(&self, discovery: &mut Discovery) {
        match self.read(SystemTime::now()) {
            Ok(stored) => {
                let restored = discovery.restore(&stored, Instant::now());
                tracing::info!(path = %self.0.display(), restored, left_out = stored.len().saturating_sub(restored), "read the snapshot");
            }
            Err(error) if error.error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, "cannot use the snapshot; clients publish again"),
        }
    }

    pub(super) async fn save(&self, stored: Vec<Stored>) -> Result<(), SnapshotError> {
        let file = self.clone();
        let write = tokio::task::spawn_blocking(move || file.write(stored, SystemTime::now()));
        let error = |error: io::Error| SnapshotError { path: self.0.clone(), error };
        write.await.map_err(|ended| error(io::Error::other(ended)))?
    }

    fn read(&self, now: SystemTime) -> Result<Vec<Stored>, SnapshotError> {
        let failed = |error: io::Error| SnapshotError { path: self.0.clone(), error };
        let invalid = |reason: &str| failed(io::Error::new(io::ErrorKind::InvalidData, reason));
        if fs::metadata(&self.0).map_err(failed)?.len() > MAX_SIZE {
            return Err(invalid("the file is too long"));
        }
        let bytes = Bytes::from(fs::read(&self.0).map_err(failed)?);
        let saved = Saved::decode(bytes).map_err(|error| invalid(&error.to_string()))?;
        if saved.version != VERSION {
            return Err(invalid("a version that this program does not know"));
        }
        // A clock that went back is taken for no time at all.
        let age = milliseconds(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
            .saturating_sub(saved.saved_at);
        let left = |ttl: u64| Duration::from_millis(ttl.saturating_sub(age));
        let alive = saved.affiliates.into_iter().filter(|affiliate| affiliate.ttl > age);
        let stored = alive.map(|affiliate| Stored {
            cluster: affiliate.cluster.into(),
            affiliate: affiliate.id.into(),
            data: affiliate.data,
            ttl: left(affiliate.ttl),
            endpoints: affiliate
                .endpoints
                .into_iter()
                .filter(|endpoint| endpoint.ttl > age)
                .map(|endpoint| (endpoint.sealed, left(endpoint.ttl)))
                .collect(),
        });
        Ok(stored.collect())
    }

    /// Under another name first, so that a crash leaves the old file or the new one.
    fn write(&self, stored: Vec<Stored>, now: SystemTime) -> Result<(), SnapshotError> {
        let saved = Saved {
            version: VERSION,
            saved_at: milliseconds(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()),
            affiliates: stored.into_iter().map(SavedAffiliate::from).collect(),
        };
        let unfinished = self.0.with_extension("unfinished");
        let write = || {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
            file.write_all(&saved.encode_to_vec())?;
            file.sync_all()?;
            fs::rename(&unfinished, &self.0)?;
            let directory = self.0.parent().filter(|parent| !parent.as_os_str().is_empty());
            File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
        };
        write().map_err(|error| SnapshotError { path: self.0.clone(), error })
    }
}

impl From<Stored> for SavedAffiliate {
    fn from(stored: Stored) -> Self {
        let endpoints = stored.endpoints.into_iter();
        Self {
            cluster: (*stored.cluster).to_owned(),
            id: (*stored.affiliate).to_owned(),
            data: stored.data,
            ttl: milliseconds(stored.ttl),
            endpoints: endpoints
                .map(|(sealed, ttl)| SavedEndpoint { sealed, ttl: milliseconds(ttl) })
                .collect(),
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> Stored {
        Stored {
            cluster: "c".into(),
            affiliate: "a".into(),
            data: Bytes::from_static(b"data"),
            ttl: Duration::from_secs(60),
            endpoints: vec![
                (Bytes::from_static(&[1; 16]), Duration::from_secs(60)),
                (Bytes::from_static(&[2; 16]), Duration::from_secs(10)),
            ],
        }
    }

    #[test]
    fn what_is_written_is_read_with_what_is_left_of_its_time() {
        let directory = tempfile::tempdir().unwrap();
        let file = SnapshotFile::new(directory.path().join("state"));
        let now = SystemTime::now();
        file.write(vec![stored()], now).unwrap();
        assert_eq!(file.read(now - Duration::from_secs(1000)).unwrap(), [stored()]);
        let mut later = stored();
        later.ttl = Duration::from_secs(40);
        later.endpoints = vec![(Bytes::from_static(&[1; 16]), Duration::from_secs(40))];
        assert_eq!(file.read(now + Duration::from_secs(20)).unwrap(), [later]);
        assert_eq!(file.read(now + Duration::from_secs(60)).unwrap(), []);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    /// File that the server of commit 5a83802c writes, in hexadecimal.
    const KEPT: &str = include_str!("../../fixtures/5a83802c/snapshot.txt");

    #[test]
    fn a_file_is_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let (file, now) =
            (SnapshotFile::new(path.clone()), SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000));
        let bare = Stored { affiliate: "b".into(), data: Bytes::new(), endpoints: Vec::new(), ..stored() };
        file.write(vec![stored(), bare.clone()], now).unwrap();
        let hex: String = fs::read(&path).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, KEPT.trim_end());
        assert_eq!(file.read(now).unwrap(), [stored(), bare]);
    }

    #[test]
    fn a_broken_file_is_an_error_and_a_restart_goes_on_without_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let file = SnapshotFile::new(path.clone());
        assert_eq!(file.read(SystemTime::now()).unwrap_err().error.kind(), io::ErrorKind::NotFound);
        for broken in [&b"\xff\xff"[..], b"", b"\x08\x02"] {
            fs::write(&path, broken).unwrap();
            assert!(file.read(SystemTime::now()).unwrap_err().to_string().contains("state"));
        }
        let mut discovery = Discovery::new(crate::core::Limits::default());
        file.restore(&mut discovery);
        assert_eq!(discovery.totals(), crate::core::Totals::default());
    }
}
