//! Callers by address: how often they ask, and what of theirs is here.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_limits::{Rate, TokenBucket, network};

use super::{Limits, Refusal};

/// Longest wait of a request for its turn.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Addresses that are remembered. Those that have nothing here are forgotten within a second.
const MAX_SOURCES: usize = 100_000;

/// The address of a caller: of IPv6 the first 64 bits, which one host has all of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source(Option<IpAddr>);

impl Source {
    /// Source of a caller with this address. All addresses of an IPv6 network of 64 bits are one source.
    pub fn of(ip: IpAddr) -> Self {
        Self(Some(network(ip)))
    }

    /// No caller: what was restored from disk. It has no limits.
    pub(crate) fn unknown() -> Self {
        Self(None)
    }

    /// Address of the source, if it is known.
    pub(crate) fn ip(self) -> Option<IpAddr> {
        self.0
    }
}

#[derive(Debug, Default)]
pub(super) struct Sources(HashMap<Source, Usage>);

#[derive(Debug)]
struct Usage {
    requests: TokenBucket,
    affiliates: usize,
    watches: usize,
}

impl Sources {
    pub(super) fn admit(
        &mut self,
        source: Source,
        now: Instant,
        limits: &Limits,
    ) -> Result<Duration, Refusal> {
        if limits.rate == 0 {
            return Ok(Duration::ZERO);
        }
        let requests = &mut self.usage(source, now, limits).ok_or(Refusal::Rate)?.requests;
        if requests.wait(now, 1) > MAX_WAIT { Err(Refusal::Rate) } else { Ok(requests.charge(now, 1)) }
    }

    pub(super) fn affiliates(&self, source: Source) -> usize {
        self.0.get(&source).map_or(0, |usage| usage.affiliates)
    }

    pub(super) fn count_affiliate(&mut self, source: Source, now: Instant, limits: &Limits) {
        if let Some(usage) = self.usage(source, now, limits) {
            usage.affiliates = usage.affiliates.saturating_add(1);
        }
    }

    pub(super) fn uncount_affiliate(&mut self, source: Source) {
        if let Some(usage) = self.0.get_mut(&source) {
            usage.affiliates = usage.affiliates.saturating_sub(1);
        }
    }

    pub(super) fn count_watch(
        &mut self,
        source: Source,
        now: Instant,
        limits: &Limits,
    ) -> Result<(), Refusal> {
        let usage = self.usage(source, now, limits).ok_or(Refusal::SourceWatches)?;
        if usage.watches >= limits.watches_per_source {
            return Err(Refusal::SourceWatches);
        }
        usage.watches = usage.watches.saturating_add(1);
        Ok(())
    }

    pub(super) fn uncount_watch(&mut self, source: Source) {
        if let Some(usage) = self.0.get_mut(&source) {
            usage.watches = usage.watches.saturating_sub(1);
        }
    }

    pub(super) fn forget_idle(&mut self, now: Instant) {
        self.0.retain(|_, usage| !usage.requests.is_full(now) || usage.affiliates > 0 || usage.watches > 0);
    }

    /// `None` if there are too many, or for no caller.
    fn usage(&mut self, source: Source, now: Instant, limits: &Limits) -> Option<&mut Usage> {
        source.0?;
        if self.0.len() >= MAX_SOURCES && !self.0.contains_key(&source) {
            return None;
        }
        let rate = Rate::per_second(limits.rate.into(), limits.burst.max(1).into());
        let new = || Usage { requests: TokenBucket::full(rate, now), affiliates: 0, watches: 0 };
        Some(self.0.entry(source).or_insert_with(new))
    }
}
