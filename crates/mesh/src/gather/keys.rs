//! The WireGuard keys of this node: the one in use, and the next one while it is being replaced. They are files, so that every step of a
//! rotation outlives the program.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_members::state_file;
use fairlead_port_mapping::Nonce;
use tokio::sync::watch;

use crate::gather::identity::{self, IdentityError};

/// Name of the file with the nonce of port mappings, which were requested with an earlier key.
const NONCE_FILE: &str = "port-mapping.nonce";

/// The keys at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// The identity of this node.
    pub private_key: PrivateKey,
    /// Public half of the private key.
    pub public_key: PublicKey,
    /// The public key before, if this program has replaced it: where others see that one, they see this node.
    pub previous: Option<PublicKey>,
    /// Announced key that will replace this one; `None` without a rotation.
    pub next: Option<NextKey>,
}

/// The key that is announced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextKey {
    /// The key.
    pub private_key: PrivateKey,
    /// Public half of the private key.
    pub public_key: PublicKey,
    /// Reason why the key is not in use yet, if that takes longer than it should.
    pub waits_for: Option<String>,
}

impl Keys {
    /// Key that is not being replaced.
    pub fn new(private_key: PrivateKey) -> Self {
        let public_key = private_key.public_key();
        Self { private_key, public_key, previous: None, next: None }
    }

    /// The public half of the next key.
    pub fn next_public_key(&self) -> Option<PublicKey> {
        self.next.as_ref().map(|next| next.public_key)
    }
}

/// The files of the keys, and who follows them.
pub struct KeyStore {
    directory: PathBuf,
    keys: watch::Sender<Keys>,
}

impl KeyStore {
    /// Opens the store with this key, and the next one if an earlier program had begun to replace it.
    pub fn open(directory: PathBuf, private_key: PrivateKey) -> Self {
        let keys = Keys::new(private_key);
        let next = identity::load_next(&directory).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the next WireGuard key; the key is not replaced");
            None
        });
        let next = next.map(NextKey::new).filter(|next| next.public_key != keys.public_key);
        Self { directory, keys: watch::Sender::new(Keys { next, ..keys }) }
    }

    /// The keys from now on.
    pub fn subscribe(&self) -> watch::Receiver<Keys> {
        self.keys.subscribe()
    }

    /// The keys now.
    pub fn current(&self) -> Keys {
        self.keys.borrow().clone()
    }

    /// Makes the next key, unless there is one, from `random` bytes.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn begin(&self, random: [u8; 32]) -> Result<Keys, IdentityError> {
        if self.keys.borrow().next.is_none() {
            let next = NextKey::new(identity::create_next(&self.directory, random)?);
            tracing::info!(public_key = %next.public_key, "the WireGuard key of this node will be replaced");
            self.keys.send_modify(|keys| {
                keys.next.get_or_insert(next);
            });
        }
        Ok(self.current())
    }

    /// Uses the next key instead of the present one. A crash leaves the old one or the new one in use.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn switch(&self) -> Result<(), IdentityError> {
        let Keys { public_key, next, .. } = self.current();
        let Some(NextKey { private_key, public_key: next, .. }) = next else { return Ok(()) };
        self.keep_nonce()?;
        identity::use_next(&self.directory)?;
        tracing::info!(from = %public_key, to = %next, "the WireGuard key of this node was replaced");
        self.keys.send_replace(Keys {
            private_key,
            public_key: next,
            previous: Some(public_key),
            next: None,
        });
        Ok(())
    }

    /// Says why the next key is not in use yet.
    pub fn wait_for(&self, reason: Option<String>) {
        self.keys.send_if_modified(|keys| {
            let Some(next) = keys.next.as_mut().filter(|next| next.waits_for != reason) else { return false };
            next.waits_for = reason;
            true
        });
    }

    /// The nonce of this node's port mappings: a gateway changes a mapping only for the client that requested it (RFC 6887, section 11.3), so it stays
    /// what it was before the key was replaced.
    pub fn nonce(&self) -> Nonce {
        let kept = fs::read(self.directory.join(NONCE_FILE)).ok().and_then(|bytes| bytes.try_into().ok());
        kept.map_or_else(|| Nonce::of(&self.keys.borrow().private_key.0), Nonce)
    }

    fn keep_nonce(&self) -> Result<(), IdentityError> {
        let path = self.directory.join(NONCE_FILE);
        let failed =
            |operation, source: io::Error| IdentityError::File { operation, path: path.clone(), source };
        match fs::exists(&path) {
            Ok(true) => Ok(()),
            Ok(false) => state_file::replace(&path, &self.nonce().0).map_err(|error| failed("write", error)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(failed("read", error)),
        }
    }
}

impl NextKey {
    fn new(private_key: PrivateKey) -> Self {
        let public_key = private_key.public_key();
        Self { private_key, public_key, waits_for: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(directory: &tempfile::TempDir) -> KeyStore {
        let key = identity::load_or_create(directory.path(), [7; 32]).unwrap();
        KeyStore::open(directory.path().to_owned(), key)
    }

    #[test]
    fn a_rotation_outlives_a_crash_at_every_step() {
        let directory = tempfile::tempdir().unwrap();
        let before = store(&directory).current();
        assert_eq!(before.next, None);
        let begun = store(&directory).begin([9; 32]).unwrap();
        assert_eq!(begun.public_key, before.public_key);
        // It ended after the next key was made.
        let again = store(&directory);
        assert_eq!(again.current(), begun);
        assert_eq!(again.begin([1; 32]).unwrap(), begun, "it goes on with the same key");
        again.wait_for(Some("a relay".to_owned()));
        again.switch().unwrap();
        let after = again.current();
        assert_eq!(Some(after.public_key), begun.next_public_key());
        assert_eq!((after.previous, after.next), (Some(before.public_key), None));
        // It ended after the key was replaced.
        let last = store(&directory).current();
        assert_eq!((last.public_key, last.previous, last.next), (after.public_key, None, None));
    }

    #[test]
    fn gateways_know_the_node_by_the_nonce_of_its_first_key() {
        let directory = tempfile::tempdir().unwrap();
        let first = store(&directory).nonce();
        for byte in [9, 10] {
            let store = store(&directory);
            store.begin([byte; 32]).unwrap();
            store.switch().unwrap();
            assert_eq!((store.nonce(), self::store(&directory).nonce()), (first, first));
        }
    }

    #[test]
    fn a_next_key_that_is_damaged_is_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let present = store(&directory).current();
        fs::write(directory.path().join("wireguard.next.key"), "half a k").unwrap();
        assert_eq!(store(&directory).current(), present);
        assert!(store(&directory).begin([9; 32]).unwrap().next.is_some());
    }
}
