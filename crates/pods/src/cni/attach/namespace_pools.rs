//! Pools of the namespaces whose pods ran here, in a file beside the socket, for a program that starts while the API server is away.
//! One line per namespace: its name and the pool.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::small_file;

/// Pool of each namespace as the API server said it last.
pub(in crate::cni) struct NamespacePools {
    file: PathBuf,
    known: Mutex<BTreeMap<String, String>>,
}

impl NamespacePools {
    /// Reads the file. A line that cannot be read costs only that namespace.
    pub(in crate::cni) fn load(file: PathBuf) -> Self {
        let text = fs::read_to_string(&file).unwrap_or_default();
        let pairs = text.lines().filter_map(|line| line.split_once(' '));
        let known = pairs.map(|(namespace, pool)| (namespace.to_owned(), pool.to_owned())).collect();
        Self { file, known: Mutex::new(known) }
    }

    /// Remembers the pool of a namespace; those of namespaces that do not exist any more are forgotten.
    pub(super) fn remember(&self, namespace: &str, pool: &str, exists: impl Fn(&str) -> bool) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.get(namespace).is_some_and(|known| known == pool) {
            return;
        }
        known.retain(|name, _| exists(name));
        known.insert(namespace.to_owned(), pool.to_owned());
        if let Err(error) = self.write(&known) {
            let file = self.file.display();
            tracing::warn!(%file, %error, "cannot write the pools of namespaces: a program that starts without the API server does not know them");
        }
    }

    /// The pool of a namespace when the API server said it last.
    pub(super) fn get(&self, namespace: &str) -> Option<String> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(namespace).cloned()
    }

    fn write(&self, known: &BTreeMap<String, String>) -> io::Result<()> {
        // A pool comes from an annotation: one with a line break is no pool's name.
        let is_word = |text: &str| !text.is_empty() && !text.contains(char::is_whitespace);
        let lines = known.iter().filter(|(namespace, pool)| is_word(namespace) && is_word(pool));
        let text: String = lines.map(|(namespace, pool)| format!("{namespace} {pool}\n")).collect();
        small_file::replace(&self.file, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_program_knows_the_pools_of_namespaces_that_exist() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("coild.sock.d/pools");
        let first = NamespacePools::load(file.clone());
        assert_eq!(first.get("shop"), None);
        for (namespace, pool) in [("shop", "default"), ("gone", "default"), ("web", "old")] {
            first.remember(namespace, pool, |_| true);
        }
        first.remember("web", "internet", |name| name != "gone");
        first.remember("odd", "two\nlines", |_| true);
        let later = NamespacePools::load(file);
        let known = ["shop", "gone", "web", "odd"].map(|name| later.get(name));
        assert_eq!(known, [Some("default".to_owned()), None, Some("internet".to_owned()), None]);
    }
}
