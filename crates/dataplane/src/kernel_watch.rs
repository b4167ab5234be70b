//! Changes of the kernel's network state: one subscription for every subsystem that reconciles a part of it.
//!
//! A subsystem says which changes concern it and is woken once for a burst of them. What it does then does not depend on
//! what changed: it compares its desired state with a dump. It also runs a sweep, for what the kernel does not report
//! (routes of a link that goes down; `rtnetlink(7)`).
//!
//! Tables of nftables are watched as well, because `nft flush ruleset` takes away what keeps packets in the mesh: their subscribers do not
//! wait for the end of a burst. kube-proxy changes its own tables all the time, with more notifications than are read in time; where some were
//! lost, a list of the tables tells which of them another program has deleted.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_netlink::nftables;
use fairlead_netlink::route::{Change, Subscription};
use fairlead_netlink::{Error, Family, Result, Socket};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Time for which changes are gathered before a subscriber is woken: a restart of a network manager makes dozens.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// The same for changes of nftables: a transaction is reported at once.
const DEBOUNCE_TABLES: Duration = Duration::from_millis(5);

/// Subscriber: the test of which changes concern it, and the sender that wakes it with the number of urgent changes.
type Subscriber = (Box<dyn Fn(&Change) -> bool + Send>, watch::Sender<u64>);

/// Registry of the subsystems that subscribe to changes.
#[derive(Clone, Default)]
pub struct KernelWatch(Arc<Mutex<Vec<Subscriber>>>);

/// Wakes one subscriber.
pub struct KernelChanges {
    changed: watch::Receiver<u64>,
    /// Urgent changes that it was woken for.
    urgent: u64,
}

impl KernelWatch {
    /// A watch that receives changes in the network namespace of the calling thread, and the task that wakes its subscribers, which
    /// ends only by an error. Called in a runtime.
    ///
    /// # Errors
    /// The kernel refuses the subscription.
    pub fn open() -> Result<(Self, impl Future<Output = Result<()>>)> {
        let watch = Self::default();
        let network = readable(Subscription::open()?)?;
        let tables = Tables::open()?;
        let nftables = readable(Subscription::open_nftables()?)?;
        let task = {
            let watch = watch.clone();
            async move {
                let network = watch.run(network, Ok);
                let mut tables = tables;
                let nftables = watch.run(nftables, move |changes| tables.explain(changes));
                tokio::try_join!(network, nftables).map(|((), ())| ())
            }
        };
        Ok((watch, task))
    }

    /// Subscribes to the changes for which `concerns` returns true. It must be cheap: it is called for each change.
    pub fn subscribe(&self, concerns: impl Fn(&Change) -> bool + Send + 'static) -> KernelChanges {
        let (sender, changed) = watch::channel(0);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((Box::new(concerns), sender));
        KernelChanges { changed, urgent: 0 }
    }

    async fn run(
        &self,
        mut socket: AsyncFd<Subscription>,
        mut explain: impl FnMut(Vec<Change>) -> Result<Vec<Change>>,
    ) -> Result<()> {
        loop {
            let mut ready =
                socket.readable_mut().await.map_err(|source| Error::Socket { operation: "poll", source })?;
            let changes = match ready.get_inner_mut().changes() {
                // A change that cannot be read is one of which nothing is known.
                Err(Error::Malformed { what, reason }) => {
                    tracing::debug!(what, reason, "cannot read a notification of the kernel");
                    vec![Change::Missed]
                }
                changes => changes?,
            };
            ready.clear_ready();
            self.notify(&explain(changes)?);
        }
    }

    fn notify(&self, changes: &[Change]) {
        for (concerns, sender) in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let mut those = changes.iter().filter(|change| **change == Change::Missed || concerns(change));
            let Some(first) = those.next() else { continue };
            let is_urgent = |change: &Change| matches!(change, Change::Table(_));
            let urgent = u64::from(is_urgent(first) || those.any(is_urgent));
            sender.send_modify(|count| *count = count.wrapping_add(urgent));
        }
    }
}

/// For `tokio::io::unix::AsyncFd`.
fn readable(subscription: Subscription) -> Result<AsyncFd<Subscription>> {
    #[expect(
        deprecated,
        reason = "unsound only for types that do not own their descriptor; `register` is unsafe"
    )]
    AsyncFd::try_new(subscription).map_err(|error| Error::Socket { operation: "poll", source: error.into() })
}

/// The tables of nftables, as they were when notifications were last lost.
struct Tables {
    socket: Socket,
    handles: BTreeMap<String, u64>,
}

impl Tables {
    fn open() -> Result<Self> {
        let mut socket = Socket::open(Family::Netfilter)?;
        let handles = nftables::handles(&mut socket)?;
        Ok(Self { socket, handles })
    }

    /// Puts the tables that were deleted in the place of a lost notification.
    fn explain(&mut self, mut changes: Vec<Change>) -> Result<Vec<Change>> {
        let before = changes.len();
        changes.retain(|change| *change != Change::Missed);
        if changes.len() < before {
            let present = nftables::handles(&mut self.socket)?;
            let deleted = self.handles.iter().filter(|(name, handle)| present.get(*name) != Some(*handle));
            changes.extend(deleted.map(|(name, _)| Change::Table(name.clone())));
            self.handles = present;
        }
        Ok(changes)
    }
}

impl KernelChanges {
    /// Waits for a change since the last call, and for those that follow at once. Cancel safe: a change is not lost.
    pub async fn changed(&mut self) {
        // Without a sender the program is ending.
        if self.changed.changed().await.is_err() {
            pending::<()>().await;
        }
        // Seen only after the pause, so that a caller that gives up meanwhile is woken again.
        self.changed.mark_changed();
        let mut urgent = self.changed.clone();
        let is_urgent = urgent.wait_for(|count| *count != self.urgent);
        if timeout(DEBOUNCE, is_urgent).await.is_ok() {
            sleep(DEBOUNCE_TABLES).await;
        }
        self.urgent = *self.changed.borrow();
        self.changed.mark_unchanged();
    }
}

#[cfg(test)]
mod tests {
    use fairlead_netlink::route::{IpFamily, Netconf};
    use futures::FutureExt as _;

    use super::*;

    fn forwarding(on: bool) -> Change {
        let (family, forwarding) = (IpFamily::V4, Some(on));
        Change::Netconf(Netconf { family, link: None, forwarding, reverse_path_filter: None })
    }

    #[tokio::test]
    async fn a_change_of_a_table_wakes_before_the_end_of_a_burst() {
        let watch = KernelWatch::default();
        let is_table = |change: &Change| matches!(change, Change::Table(_));
        let (mut tables, mut others) = (watch.subscribe(is_table), watch.subscribe(move |it| !is_table(it)));
        watch.notify(&[forwarding(true), Change::Table("ours".to_owned())]);
        tokio::select! {
            biased;
            () = others.changed() => panic!("the pause after other changes is longer"),
            () = tables.changed() => {}
        }
        others.changed().await;
    }

    /// kube-proxy changes more in its tables than the buffer holds.
    #[test]
    fn a_table_that_was_deleted_is_told_although_its_notification_was_lost() {
        testbed_netns::in_namespace(|| {
            testbed_netns::sh("nft add table inet ours; nft add table inet stays; nft add table inet anew");
            let mut tables = Tables::open().unwrap();
            let other = Change::Table("other".to_owned());
            assert_eq!(tables.explain(vec![other.clone()]).unwrap(), [other]);
            assert_eq!(tables.explain(vec![Change::Missed]).unwrap(), [], "nothing of ours was lost");
            testbed_netns::sh(
                "nft delete table inet ours; nft delete table inet anew; nft add table inet anew",
            );
            let told = tables.explain(vec![Change::Missed]).unwrap();
            assert_eq!(told, ["anew", "ours"].map(|name| Change::Table(name.to_owned())));
            assert_eq!(tables.explain(vec![Change::Missed]).unwrap(), []);
        });
    }

    #[tokio::test]
    async fn a_burst_wakes_once_and_only_those_it_concerns() {
        let watch = KernelWatch::default();
        let is_off = |change: &Change| matches!(change, Change::Netconf(it) if it.forwarding == Some(false));
        let (mut off, mut nothing) = (watch.subscribe(is_off), watch.subscribe(|_| false));
        watch.notify(&[forwarding(true)]);
        assert!(off.changed().now_or_never().is_none());
        watch.notify(&[forwarding(true), forwarding(false)]);
        watch.notify(&[forwarding(false)]);
        // Given up in the pause: not lost.
        assert!(off.changed().now_or_never().is_none());
        off.changed().await;
        assert!(tokio::time::timeout(DEBOUNCE * 2, off.changed()).await.is_err(), "the burst is over");
        assert!(nothing.changed().now_or_never().is_none());
        watch.notify(&[Change::Missed]);
        nothing.changed().await;
        off.changed().await;
    }
}
