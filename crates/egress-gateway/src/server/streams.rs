//! The streams of node programs: one of each Node.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::registry::StreamId;
use crate::registry::store::Store;

/// The open streams.
pub(crate) struct Streams {
    store: Arc<Store>,
    open: Mutex<BTreeMap<String, (StreamId, CancellationToken)>>,
}

impl Streams {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        Self { store, open: Mutex::default() }
    }

    /// Begins a stream; the token is cancelled when a newer one of the same Node replaces it.
    pub(super) fn begin(&self, node: &str) -> (StreamId, CancellationToken) {
        let replaced = CancellationToken::new();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = self.store.update(|registry| registry.begin(node));
        if let Some((_, earlier)) = open.insert(node.to_owned(), (stream, replaced.clone())) {
            earlier.cancel();
        }
        (stream, replaced)
    }

    /// Ends a stream.
    pub(super) fn end(&self, node: &str, stream: StreamId) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.get(node).is_some_and(|(current, _)| *current == stream) {
            open.remove(node);
        }
        self.store.update(|registry| registry.end(node, stream));
    }

    /// Number of open streams.
    pub(crate) fn count(&self) -> usize {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
