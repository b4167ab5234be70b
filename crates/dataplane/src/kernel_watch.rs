//! Changes of the kernel's network state: one subscription for every subsystem that reconciles a part of it.
//!
//! A subsystem says which changes concern it and is woken once for a burst of them. What it does then does not depend on
//! what changed: it compares its desired state with a dump. It also runs a sweep, for what the kernel does not report
//! (routes of a link that goes down; `rtnetlink(7)`).

use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_netlink::route::{Change, Subscription};
use fairlead_netlink::{Error, Result};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::sleep;

/// Time for which changes are gathered before a subscriber is woken: a restart of a network manager makes dozens.
const DEBOUNCE: Duration = Duration::from_millis(100);

/// Subscriber: the test of which changes concern it, and the sender that wakes it.
type Subscriber = (Box<dyn Fn(&Change) -> bool + Send>, watch::Sender<()>);

/// Registry of the subsystems that subscribe to changes.
#[derive(Clone, Default)]
pub struct KernelWatch(Arc<Mutex<Vec<Subscriber>>>);

/// Wakes one subscriber.
pub struct KernelChanges(watch::Receiver<()>);

impl KernelWatch {
    /// A watch that receives changes in the network namespace of the calling thread, and the task that wakes its subscribers, which
    /// ends only by an error. Called in a runtime.
    ///
    /// # Errors
    /// The kernel refuses the subscription.
    pub fn open() -> Result<(Self, impl Future<Output = Result<()>>)> {
        let watch = Self::default();
        #[expect(
            deprecated,
            reason = "unsound only for types that do not own their descriptor; `register` is unsafe"
        )]
        let socket = AsyncFd::try_new(Subscription::open()?)
            .map_err(|error| Error::Socket { operation: "poll", source: error.into() })?;
        Ok((watch.clone(), watch.run(socket)))
    }

    /// Subscribes to the changes for which `concerns` returns true. It must be cheap: it is called for each change.
    pub fn subscribe(&self, concerns: impl Fn(&Change) -> bool + Send + 'static) -> KernelChanges {
        let (sender, receiver) = watch::channel(());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((Box::new(concerns), sender));
        KernelChanges(receiver)
    }

    async fn run(self, mut socket: AsyncFd<Subscription>) -> Result<()> {
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
            self.notify(&changes);
        }
    }

    fn notify(&self, changes: &[Change]) {
        for (concerns, sender) in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            if changes.iter().any(|change| *change == Change::Missed || concerns(change)) {
                sender.send_replace(());
            }
        }
    }
}

impl KernelChanges {
    /// Waits for a change since the last call, and for those that follow at once. Cancel safe: a change is not lost.
    pub async fn changed(&mut self) {
        // Without a sender the program is ending.
        if self.0.changed().await.is_err() {
            pending::<()>().await;
        }
        // Seen only after the pause, so that a caller that gives up meanwhile is woken again.
        self.0.mark_changed();
        sleep(DEBOUNCE).await;
        self.0.mark_unchanged();
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
