//! Leader election by a Lease, with the rule and the fields of client-go's `leaderelection`. Pure; `election` does the I/O.
//!
//! A holder counts as alive for the lease duration after its record was last **observed to change**, measured on the
//! monotonic clock of the observer. The times in the record are for people: comparing them with the own clock would let
//! a dead leader whose clock was an hour ahead block the takeover for an hour.
//!
//! The Lease also shows that etcd was restored from a backup. The resource version of an object only grows, and a replica reads
//! the Lease every two seconds, before it writes. So what it reads first after a restoration is older than what it has seen. The
//! resource version of a list does not show that: other programs write at once and it soon is where it was, or the operator
//! raised it (`etcdutl snapshot restore --bump-revision`).

use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// A candidate acquires a Lease whose record has not changed for this long.
pub(crate) const LEASE_DURATION: Duration = Duration::from_secs(15);
/// A leader whose last renewal was sent longer ago stops leading. Shorter than [`LEASE_DURATION`]: it stops first.
pub(crate) const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Pause between two attempts to acquire or renew.
pub(crate) const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// One candidate's view of the Lease.
#[derive(Debug)]
pub(crate) struct Elector {
    identity: String,
    observed: Option<Observed>,
    /// Time at which the last accepted write was sent, while this candidate is the holder.
    renewed: Option<Instant>,
    /// Resource version of the Lease as last seen.
    version: Option<u64>,
}

#[derive(Debug)]
struct Observed {
    lease: Lease,
    /// Time at which its record was first seen as it is.
    since: Instant,
}

impl Elector {
    pub(crate) fn new(identity: String) -> Self {
        Self { identity, observed: None, renewed: None, version: None }
    }

    /// Whether this candidate is the leader.
    pub(crate) fn leads(&self, now: Instant) -> bool {
        self.renewed.is_some_and(|at| now.saturating_duration_since(at) < RENEW_DEADLINE)
    }

    /// Time at which it ceases to be the leader unless a renewal succeeds.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.renewed.and_then(|at| at.checked_add(RENEW_DEADLINE))
    }

    /// Takes the Lease as read from etcd; `None` if the API server has none. True if etcd was restored from a backup since the
    /// last time; also if the Lease is gone, which may have the same reason.
    pub(crate) fn observe(&mut self, now: Instant, lease: Option<Lease>) -> bool {
        let version = lease.as_ref().and_then(version);
        let seen = std::mem::replace(&mut self.version, version);
        let before = self.observed.take();
        self.observed = lease.map(|lease| {
            // Only a changed record is a sign of life; others may write the Lease's metadata.
            let unchanged = before.filter(|before| before.lease.spec == lease.spec);
            Observed { since: unchanged.map_or(now, |before| before.since), lease }
        });
        if self.holder() != Some(self.identity.as_str()) {
            self.renewed = None;
        }
        seen.is_some_and(|seen| version.is_none_or(|version| version < seen))
    }

    /// The Lease to write: to create if it was not there, else to replace, under the resource version observed. `None`
    /// while another candidate holds it.
    pub(crate) fn claim(&self, now: Instant, time: Timestamp) -> Option<Lease> {
        let Some(observed) = &self.observed else {
            return Some(self.written(Lease::default(), time, 0, None));
        };
        let spec = observed.lease.spec.clone().unwrap_or_default();
        let transitions = spec.lease_transitions.unwrap_or_default();
        if self.holder() == Some(self.identity.as_str()) {
            return Some(self.written(observed.lease.clone(), time, transitions, spec.acquire_time));
        }
        let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = seconds.map_or(LEASE_DURATION, Duration::from_secs);
        let expired = now.saturating_duration_since(observed.since) >= duration;
        (self.holder().is_none() || expired)
            .then(|| self.written(observed.lease.clone(), time, transitions.saturating_add(1), None))
    }

    /// The API server accepted a claim that was sent at `sent`, and stored this Lease.
    pub(crate) fn accepted(&mut self, sent: Instant, lease: Lease) {
        self.version = version(&lease);
        self.observed = Some(Observed { lease, since: sent });
        self.renewed = Some(sent);
    }

    /// The Lease to write on shutdown, so that the next leader need not wait; `None` unless this candidate holds it.
    pub(crate) fn release(&mut self, time: Timestamp) -> Option<Lease> {
        self.renewed.take()?;
        let mut lease = self.observed.as_ref()?.lease.clone();
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        spec.acquire_time = Some(MicroTime(time));
        spec.renew_time = Some(MicroTime(time));
        Some(lease)
    }

    /// The candidate that holds the Lease, as last observed.
    pub(crate) fn holder(&self) -> Option<&str> {
        let holder = self.observed.as_ref()?.lease.spec.as_ref()?.holder_identity.as_deref();
        holder.filter(|holder| !holder.is_empty())
    }

    fn written(&self, lease: Lease, time: Timestamp, transitions: i32, acquired: Option<MicroTime>) -> Lease {
        let seconds = i32::try_from(LEASE_DURATION.as_secs()).unwrap_or(i32::MAX);
        let spec = LeaseSpec {
            acquire_time: Some(acquired.unwrap_or(MicroTime(time))),
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(seconds),
            lease_transitions: Some(transitions),
            renew_time: Some(MicroTime(time)),
            ..lease.spec.unwrap_or_default()
        };
        Lease { metadata: lease.metadata, spec: Some(spec) }
    }
}

/// Resource versions are integers that can be compared since Kubernetes 1.35 (KEP-5504), and always were with etcd.
fn version(lease: &Lease) -> Option<u64> {
    lease.metadata.resource_version.as_ref()?.parse().ok()
}

#[cfg(test)]
mod tests;
