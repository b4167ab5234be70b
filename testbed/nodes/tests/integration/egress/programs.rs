//! BPF programs at `eth0` of client pods: which they are, and what they have counted.

use anyhow::Result;
use fairlead_fou::{Counter, Counters, Error, Settings, Tunnels};
use nix::net::if_::if_nametoindex;
use testbed_lab::{ForeignNetwork, Place as _};

/// Settings that node programs give to clients of Egresses: with the same ones, nothing is written.
const SETTINGS: Settings = Settings { port: 5555, drop_unknown: false, own: None };

/// Programs of a client at one time.
pub(crate) struct Programs {
    /// The kernel's IDs, as text.
    ids: String,
    counters: Counters,
}

impl Programs {
    /// Reads them, and attaches none where there are none of this version.
    ///
    /// # Errors
    /// There are none of this version, or the kernel refuses.
    pub(crate) fn read(place: &ForeignNetwork) -> Result<Self> {
        let others = || {
            let what = "read what the programs of a client have counted".to_owned();
            Err(Error::Invalid { what, reason: "it has none of this version".to_owned() })
        };
        place.inside(|| -> Result<Self> {
            let tunnels = Tunnels::open_with(if_nametoindex("eth0")?, SETTINGS, others)?;
            Ok(Self { ids: format!("{tunnels:?}"), counters: tunnels.counters()? })
        })?
    }

    /// What they have counted since `before`, and whether they have been replaced.
    pub(crate) fn since(&self, before: &Self) -> String {
        let counted = Counter::ALL.into_iter().filter_map(|counter| {
            let more = self.counters.of(counter).wrapping_sub(before.counters.of(counter));
            (more > 0).then(|| format!("{} {more}", counter.name()))
        });
        let counted = counted.collect::<Vec<_>>().join(", ");
        let replaced = if self.ids == before.ids { "the same programs" } else { "other programs" };
        format!("{replaced}: {counted}")
    }
}
