//! Adoption of what etcd has: the core stores it, unless it is not acceptable.

use std::time::Instant;

use fairlead_wire::etcd::KeyValue;

use super::value::Rejection;
use super::{Etcd, lock, value};
use crate::core::Refusal;
use crate::server::state::Shared;

impl Etcd {
    /// Has the core adopt what etcd has at a key, unless it is not acceptable. The age of its lease must be known by now.
    pub(super) fn adopt(&self, shared: &Shared, kv: &KeyValue, now: Instant) {
        if let Err(rejection) = self.try_adopt(shared, kv, now) {
            self.statistics.reject(rejection);
            if lock(&self.throttle).permits(rejection, now) {
                let key = kv.key.escape_ascii();
                tracing::warn!(%key, revision = kv.mod_revision, %rejection, "left out what etcd has");
            }
        }
    }

    fn try_adopt(&self, shared: &Shared, kv: &KeyValue, now: Instant) -> Result<(), Rejection> {
        let name = self.keys.parse(&kv.key).ok_or(Rejection::Key)?;
        let age = lock(&self.leases).age(kv.lease, now).ok_or(Rejection::Lease)?;
        let affiliate = value::decode(name, kv.value.clone(), age)?;
        let mut state = shared.state();
        let adopted = state.discovery.adopt(&affiliate, kv.mod_revision, now);
        state.wake();
        match adopted {
            // What the operator does not list is no error.
            Ok(()) | Err(Refusal::NotListed) => Ok(()),
            Err(refusal) => Err(Rejection::Limit(refusal)),
        }
    }
}
