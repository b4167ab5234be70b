//! Members that left, in the file: who was deleted, and whose prefixes are guarded, outlives this program and a reboot.

use std::time::{Duration, Instant};

use anyhow::Result;
use fairlead_topology::Member;
use ipnet::IpNet;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::SavedMember;
use crate::departures::{Deleted, Departures, GUARD, KEEP_DELETIONS, Missing, ReleasedBlocks};

/// [`Departures`], with times of a clock that a reboot does not set back to zero.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedDepartures {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deleted: Vec<SavedDeletion>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    missing: Vec<SavedMissing>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    released: Vec<SavedBlock>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedDeletion {
    name: String,
    public_key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next_key: Option<String>,
    until: Timestamp,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedMissing {
    member: SavedMember,
    is_discovered: bool,
    is_guarded: bool,
    until: Timestamp,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedBlock {
    block: IpNet,
    until: Timestamp,
}

impl SavedDepartures {
    /// Departures with times of day in place of instants; `now` is the present time by both clocks.
    pub fn of(departures: &Departures, now: (Instant, Timestamp)) -> Self {
        let until = |at: Instant| {
            let left = SignedDuration::try_from(at.saturating_duration_since(now.0)).unwrap_or_default();
            now.1.checked_add(left).unwrap_or(Timestamp::MAX)
        };
        let released = departures.released().iter();
        let released = released.map(|(block, at)| SavedBlock { block: *block, until: until(at) });
        let (deleted, missing) = departures.remembered();
        let deleted = deleted.iter().map(|(name, deleted)| SavedDeletion {
            name: name.clone(),
            public_key: deleted.public_key.to_string(),
            next_key: deleted.next_key.map(|key| key.to_string()),
            until: until(deleted.until),
        });
        let missing = missing.values().map(|missing| SavedMissing {
            member: SavedMember::from(&missing.member),
            is_discovered: missing.member.discovery.is_only_source,
            is_guarded: missing.is_guarded,
            until: until(missing.until),
        });
        Self { deleted: deleted.collect(), missing: missing.collect(), released: released.collect() }
    }

    /// The departures that count now. A clock that was set back makes nothing last longer than it may.
    ///
    /// # Errors
    /// A key or a member cannot be parsed.
    pub fn restored(self, now: (Instant, Timestamp)) -> Result<Departures> {
        let until = |at: Timestamp, longest: Duration| {
            let left = Duration::try_from(at.duration_since(now.1)).unwrap_or_default();
            now.0 + left.min(longest)
        };
        let deleted = self.deleted.into_iter().map(|saved| {
            let until = until(saved.until, KEEP_DELETIONS);
            let next_key = saved.next_key.map(|key| key.parse()).transpose()?;
            Ok((saved.name, Deleted { public_key: saved.public_key.parse()?, next_key, until }))
        });
        let missing = self.missing.into_iter().map(|saved| {
            let mut member = Member::try_from(saved.member)?;
            member.discovery.is_only_source = saved.is_discovered;
            let until = until(saved.until, GUARD);
            Ok((member.name.clone(), Missing { member, until, is_guarded: saved.is_guarded }))
        });
        let released = self.released.into_iter().map(|saved| (saved.block, until(saved.until, GUARD)));
        let released = ReleasedBlocks::restored(released.collect());
        Ok(Departures::restored(deleted.collect::<Result<_>>()?, missing.collect::<Result<_>>()?, released))
    }
}

#[cfg(test)]
mod tests {
    use fairlead_keys::PublicKey;
    use fairlead_topology::ByDiscovery;

    use super::*;

    #[test]
    fn what_is_guarded_and_deleted_outlives_a_reboot_and_a_clock_that_is_set_back() {
        let (now, wall) = (Instant::now(), Timestamp::now());
        let member = Member {
            public_key: Some(PublicKey([2; 32])),
            discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
            ..Member::named("n2")
        };
        let hour = Duration::from_secs(3600);
        let missing = Missing { member, until: now + hour, is_guarded: true };
        let deleted = Deleted {
            public_key: PublicKey([1; 32]),
            next_key: Some(PublicKey([3; 32])),
            until: now + 3 * hour,
        };
        let block = "10.64.0.0/26".parse().unwrap();
        let departures = Departures::restored(
            [("n1".to_owned(), deleted)].into(),
            [("n2".to_owned(), missing)].into(),
            ReleasedBlocks::restored([(block, now + hour)].into()),
        );
        let json = serde_json::to_vec(&SavedDepartures::of(&departures, (now, wall))).unwrap();
        let restored = |now, wall| {
            serde_json::from_slice::<SavedDepartures>(&json).unwrap().restored((now, wall)).unwrap()
        };
        assert_eq!(restored(now, wall), departures);
        let rebooted = restored(now, wall + 2 * hour);
        assert_eq!(rebooted.remembered().0["n1"].until, now + hour);
        assert_eq!(rebooted.remembered().1["n2"].until, now, "it is over");
        let set_back = restored(now, wall - 1000 * hour);
        assert_eq!(set_back.remembered().1["n2"].until, now + GUARD);
        assert_eq!(set_back.released().iter().collect::<Vec<_>>(), [(&block, now + GUARD)]);
    }
}
