//! Callers by address: how often they ask, and what of theirs is here.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::{Limits, Refusal};

/// Longest wait of a request for its turn.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Addresses that are remembered. Those that have nothing here are forgotten within a second.
const MAX_SOURCES: usize = 100_000;

/// The address of a caller: of IPv6 the first 64 bits, which one host has all of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source(Option<IpAddr>);

impl Source {
    /// Of an address.
    pub fn of(ip: IpAddr) -> Self {
        Self(Some(fairlead_tls::network(ip)))
    }

    /// No caller: what was restored from disk. It has no limits.
    pub(crate) fn unknown() -> Self {
        Self(None)
    }

    /// Its address, if it is known.
    pub(crate) fn ip(self) -> Option<IpAddr> {
        self.0
    }
}

#[derive(Debug, Default)]
pub(super) struct Sources(HashMap<Source, Usage>);

#[derive(Debug)]
struct Usage {
    /// When all requests so far would have been made at the permitted rate (the theoretical arrival time of the generic cell
    /// rate algorithm, ITU-T I.371).
    paced: Instant,
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
        let Some(interval) = Duration::from_secs(1).checked_div(limits.rate) else {
            return Ok(Duration::ZERO);
        };
        let usage = self.usage(source, now).ok_or(Refusal::Rate)?;
        let paced = usage.paced.max(now).checked_add(interval).ok_or(Refusal::Rate)?;
        let ahead = paced.saturating_duration_since(now);
        let wait = ahead.saturating_sub(interval.saturating_mul(limits.burst.max(1)));
        if wait > MAX_WAIT {
            return Err(Refusal::Rate);
        }
        usage.paced = paced;
        Ok(wait)
    }

    pub(super) fn affiliates(&self, source: Source) -> usize {
        self.0.get(&source).map_or(0, |usage| usage.affiliates)
    }

    pub(super) fn count_affiliate(&mut self, source: Source, now: Instant) {
        if let Some(usage) = self.usage(source, now) {
            usage.affiliates = usage.affiliates.saturating_add(1);
        }
    }

    pub(super) fn uncount_affiliate(&mut self, source: Source) {
        if let Some(usage) = self.0.get_mut(&source) {
            usage.affiliates = usage.affiliates.saturating_sub(1);
        }
    }

    pub(super) fn count_watch(&mut self, source: Source, now: Instant, limit: usize) -> Result<(), Refusal> {
        let usage = self.usage(source, now).ok_or(Refusal::SourceWatches)?;
        if usage.watches >= limit {
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
        self.0.retain(|_, usage| usage.paced > now || usage.affiliates > 0 || usage.watches > 0);
    }

    /// `None` if there are too many, or for no caller.
    fn usage(&mut self, source: Source, now: Instant) -> Option<&mut Usage> {
        source.0?;
        if self.0.len() >= MAX_SOURCES && !self.0.contains_key(&source) {
            return None;
        }
        Some(self.0.entry(source).or_insert(Usage { paced: now, affiliates: 0, watches: 0 }))
    }
}
