//! Writes of clients: under the condition that nothing else was written meanwhile.

use std::time::{Duration, Instant};

use fairlead_limits::{doubled, part};
use fairlead_wire::etcd::compare::{CompareResult, CompareTarget, TargetUnion};
use fairlead_wire::etcd::request_op::Request as Operation;
use fairlead_wire::etcd::response_op::Response as Outcome;
use fairlead_wire::etcd::{
    Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
};
use tokio::time::sleep;
use tonic::{Code, Status};

use super::statistics::add;
use super::{Etcd, Live, in_words, random, value, within};
use crate::core::{Proposal, Refusal, Source, Update};
use crate::server::state::Shared;

/// Attempts while other replicas change the same affiliate: the first ones at once, then after random pauses up to the longest.
const ATTEMPTS: u32 = 20;
const AT_ONCE: u32 = 4;
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// A write was not made, as far as is known.
#[derive(Debug)]
pub(in crate::server) enum WriteError {
    Refused(Refusal),
    /// The client may try again.
    Unavailable(String),
}

impl From<Refusal> for WriteError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// Result of an attempt to write.
enum Attempt {
    /// Written at this revision.
    Written(i64),
    /// Something else is there: `None` if that is nothing.
    Conflict(Option<KeyValue>),
}

impl Etcd {
    /// Writes what a client publishes, then stores it.
    pub(in crate::server) async fn update(
        &self,
        shared: &Shared,
        source: Source,
        update: &Update,
    ) -> Result<(), WriteError> {
        // What is wrong with a request is said also while etcd is away.
        let mut proposal = shared.state().discovery.propose(source, update, Instant::now())?;
        let mut replaces = proposal.replaces;
        for attempt in 0..ATTEMPTS {
            sleep(pause(attempt, random())).await;
            let live = self.live().map_err(|reason| self.fail(reason))?;
            match self.attempt(&live, &proposal, replaces).await {
                Ok(Attempt::Written(revision)) => {
                    add(&self.statistics.writes);
                    let mut state = shared.state();
                    state.discovery.complete(&proposal, revision, Instant::now());
                    state.wake();
                    return Ok(());
                }
                Ok(Attempt::Conflict(current)) => {
                    add(&self.statistics.conflicts);
                    let there = current.as_ref().map_or(0, |kv| kv.mod_revision);
                    if let Some(current) = current {
                        self.take_over(&live, shared, &current)
                            .await
                            .map_err(|status| self.failed(&status))?;
                    }
                    proposal = shared.state().discovery.propose(source, update, Instant::now())?;
                    // The watch may have told of something newer meanwhile. What is left out here is replaced.
                    replaces = proposal.replaces.max(there);
                }
                Err(status) => return Err(self.failed(&status)),
            }
        }
        Err(self.fail("other replicas change the same affiliate".to_owned()))
    }

    /// Deletes an affiliate for all replicas.
    pub(in crate::server) async fn delete(
        &self,
        shared: &Shared,
        cluster: &str,
        affiliate: &str,
    ) -> Result<(), WriteError> {
        shared.state().discovery.check_ids(cluster, affiliate)?;
        let mut live = self.live().map_err(|reason| self.fail(reason))?;
        let request = DeleteRangeRequest { key: self.keys.of(cluster, affiliate).into() };
        let answer = within(live.keys.delete_range(request)).await;
        let answer = answer.map_err(|status| self.failed(&status))?.into_inner();
        add(&self.statistics.writes);
        let revision = answer.header.map_or(0, |header| header.revision);
        let mut state = shared.state();
        state.discovery.forget(cluster, affiliate, revision, Instant::now());
        state.wake();
        Ok(())
    }

    async fn attempt(&self, live: &Live, proposal: &Proposal, replaces: i64) -> Result<Attempt, Status> {
        let stored = &proposal.affiliate.stored;
        let key = prost::bytes::Bytes::from(self.keys.of(&stored.cluster, &stored.affiliate));
        let age = live.lease.granted.elapsed();
        let put = PutRequest {
            key: key.clone(),
            value: value::encode(&proposal.affiliate, age).into(),
            lease: live.lease.id,
        };
        let read = RangeRequest { key: key.clone(), ..RangeRequest::default() };
        let unchanged = Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key,
            target_union: Some(TargetUnion::ModRevision(replaces)),
        };
        let request = TxnRequest {
            compare: vec![unchanged],
            success: vec![RequestOp { request: Some(Operation::RequestPut(put)) }],
            failure: vec![RequestOp { request: Some(Operation::RequestRange(read)) }],
        };
        let answer = within(live.keys.clone().txn(request)).await?.into_inner();
        outcome(answer)
    }

    /// Stores the value that another replica has written meanwhile, before the watch tells of it.
    async fn take_over(&self, live: &Live, shared: &Shared, current: &KeyValue) -> Result<(), Status> {
        let has_been_told = current.mod_revision <= shared.state().discovery.position();
        if !has_been_told {
            self.learn_leases(&live.leases, std::slice::from_ref(current)).await?;
            self.adopt(shared, current, Instant::now());
        }
        Ok(())
    }

    fn failed(&self, status: &Status) -> WriteError {
        // The lease is over, or etcd was restored: the session gets another one.
        if status.code() == Code::NotFound {
            self.renew.notify_one();
        }
        self.fail(in_words(status))
    }

    fn fail(&self, reason: String) -> WriteError {
        add(&self.statistics.failed_writes);
        WriteError::Unavailable(format!("cannot write to etcd: {reason}"))
    }
}

fn pause(attempt: u32, random: u32) -> Duration {
    let Some(retry) = attempt.checked_sub(AT_ONCE) else { return Duration::ZERO };
    part(doubled(Duration::from_millis(1), retry, LONGEST_PAUSE), random)
}

fn outcome(answer: TxnResponse) -> Result<Attempt, Status> {
    let revision = answer.header.map(|header| header.revision);
    let response = answer.responses.into_iter().next().and_then(|response| response.response);
    match (answer.succeeded, response, revision) {
        (true, _, Some(revision)) => Ok(Attempt::Written(revision)),
        (false, Some(Outcome::ResponseRange(read)), _) => Ok(Attempt::Conflict(read.kvs.into_iter().next())),
        _ => Err(Status::internal("etcd's answer is not one to the transaction")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_that_meet_again_and_again_part_at_random() {
        assert_eq!(pause(0, u32::MAX), Duration::ZERO);
        assert_eq!(pause(AT_ONCE, u32::MAX), Duration::from_millis(1));
        assert_eq!(pause(AT_ONCE + 3, u32::MAX), Duration::from_millis(8));
        assert_eq!(pause(AT_ONCE + 3, 0), Duration::ZERO);
        assert_eq!(pause(ATTEMPTS, u32::MAX), LONGEST_PAUSE);
    }
}
