//! This node's blocks as the watch of AddressBlocks shows them, kept current by its events one by one: in a large cluster most
//! changes are of other nodes' blocks, and none of those may cost a copy of all.
//!
//! A granted block carries the UID of its BlockRequest, so the same watch answers requests ([`super::requests`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_api::names::LABEL_REQUEST;
use fairlead_api::resources::AddressBlock;
use fairlead_cluster::lean;
use kube::ResourceExt;
use kube::runtime::watcher::Event;
use tokio::sync::watch;

/// The blocks with a node's label.
#[derive(Debug, Clone)]
pub struct OwnBlocks(watch::Receiver<Shown>);

/// Takes the events of the watch.
#[derive(Debug)]
pub struct Follower {
    node: String,
    /// The list that is being received.
    listing: BTreeMap<String, Arc<AddressBlock>>,
    shown: watch::Sender<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    by_name: BTreeMap<String, Arc<AddressBlock>>,
    /// Whether the first list has arrived.
    listed: bool,
}

impl OwnBlocks {
    /// The blocks of `node`, none until the follower is given events.
    pub fn of(node: &str) -> (Follower, Self) {
        let (shown, receiver) = watch::channel(Shown::default());
        (Follower { node: node.to_owned(), listing: BTreeMap::new(), shown }, Self(receiver))
    }

    /// All of them; `None` before the first list.
    pub(crate) fn listed(&self) -> Option<Vec<Arc<AddressBlock>>> {
        let shown = self.0.borrow();
        shown.listed.then(|| shown.by_name.values().cloned().collect())
    }

    /// Resolves when there was a list or a change since it resolved last.
    pub(crate) async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            // The watch has ended, which is a failure of its own.
            std::future::pending().await
        }
    }

    /// The block that was granted for the request with this UID, as soon as the watch shows it.
    pub(crate) async fn granted(&self, request: &str) -> Arc<AddressBlock> {
        let mut blocks = self.clone();
        loop {
            if let Some(block) = blocks.granted_now(request) {
                return block;
            }
            blocks.changed().await;
        }
    }

    /// The block that was granted for the request with this UID, if the watch shows it.
    pub(crate) fn granted_now(&mut self, request: &str) -> Option<Arc<AddressBlock>> {
        let shown = self.0.borrow_and_update();
        let mut blocks = shown.by_name.values();
        blocks.find(|block| block.labels().get(LABEL_REQUEST).is_some_and(|of| of == request)).cloned()
    }
}

impl Follower {
    /// Takes an event.
    pub fn observe(&mut self, event: &Event<AddressBlock>) {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(block) => {
                if block.node() == Some(&self.node) {
                    self.listing.insert(block.name_any(), trimmed(block));
                }
            }
            Event::InitDone => {
                let by_name = std::mem::take(&mut self.listing);
                self.shown.send_replace(Shown { by_name, listed: true });
            }
            Event::Apply(block) if block.node() == Some(&self.node) => {
                self.shown.send_modify(|shown| {
                    shown.by_name.insert(block.name_any(), trimmed(block));
                });
            }
            Event::Apply(block) | Event::Delete(block) => {
                self.shown.send_if_modified(|shown| shown.by_name.remove(&block.name_any()).is_some());
            }
        }
    }
}

fn trimmed(block: &AddressBlock) -> Arc<AddressBlock> {
    let mut block = block.clone();
    lean::labelled(&mut block);
    Arc::new(block)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn block(name: &str, node: &str, request: &str) -> AddressBlock {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": "10.0.0.0/30",
            "metadata": { "name": name, "uid": name, "labels": {
                "coil.cybozu.com/pool": "a", "coil.cybozu.com/node": node, "coil.cybozu.com/request": request,
            } },
        }))
        .unwrap()
    }

    fn names(blocks: &OwnBlocks) -> Option<Vec<String>> {
        blocks.listed().map(|blocks| blocks.iter().map(|block| block.name_any()).collect())
    }

    fn name_of(granted: Option<Arc<AddressBlock>>) -> Option<String> {
        granted.map(|block| block.name_any())
    }

    #[test]
    fn changes_of_other_nodes_wake_nothing() {
        let (mut follower, mut blocks) = OwnBlocks::of("n1");
        assert_eq!(names(&blocks), None);
        for event in [Event::Init, Event::InitApply(block("a-0", "n1", "u0"))] {
            follower.observe(&event);
        }
        assert!(blocks.changed().now_or_never().is_none() && blocks.listed().is_none(), "half a list");
        follower.observe(&Event::InitDone);
        assert!(blocks.changed().now_or_never().is_some());
        for event in [Event::Apply(block("a-1", "n2", "u1")), Event::Delete(block("a-1", "n2", "u1"))] {
            follower.observe(&event);
            assert!(blocks.changed().now_or_never().is_none(), "{event:?}");
        }
        assert_eq!(names(&blocks).unwrap(), ["a-0"]);
        // Another node's label on it, as after a deletion that an interrupted watch has not shown.
        follower.observe(&Event::Apply(block("a-0", "n2", "u2")));
        assert!(blocks.changed().now_or_never().is_some());
        assert_eq!(names(&blocks).unwrap(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_request_is_answered_by_the_block_that_names_it() {
        let (mut follower, blocks) = OwnBlocks::of("n1");
        let mut waits = Box::pin(blocks.granted("mine"));
        assert!(futures::poll!(&mut waits).is_pending());
        for other in [block("a-0", "n1", "other"), block("a-1", "n2", "mine")] {
            follower.observe(&Event::Apply(other));
            assert!(futures::poll!(&mut waits).is_pending());
        }
        follower.observe(&Event::Apply(block("a-2", "n1", "mine")));
        assert_eq!(waits.await.name_any(), "a-2");
    }

    #[tokio::test]
    async fn an_answer_that_came_before_the_wait_or_with_a_list_is_not_missed() {
        let (mut follower, blocks) = OwnBlocks::of("n1");
        follower.observe(&Event::Apply(block("a-0", "n1", "early")));
        assert_eq!(name_of(blocks.granted("early").now_or_never()).as_deref(), Some("a-0"));

        // The watch is interrupted; what it missed is in the next list.
        let mut waits = Box::pin(blocks.granted("missed"));
        for event in [Event::Init, Event::InitApply(block("a-1", "n1", "missed"))] {
            follower.observe(&event);
            assert!(futures::poll!(&mut waits).is_pending());
        }
        follower.observe(&Event::InitDone);
        assert_eq!(waits.await.name_any(), "a-1");
        assert_eq!(names(&blocks).unwrap(), ["a-1"], "a-0 was deleted meanwhile");
    }

    #[tokio::test]
    async fn a_block_that_was_deleted_answers_nothing() {
        let (mut follower, blocks) = OwnBlocks::of("n1");
        follower.observe(&Event::Apply(block("a-0", "n1", "u")));
        follower.observe(&Event::Delete(block("a-0", "n1", "u")));
        let mut waits = Box::pin(blocks.granted("u"));
        assert!(futures::poll!(&mut waits).is_pending());
        // Nor does the end of the watch, which ends the program.
        drop(follower);
        assert!(futures::poll!(&mut waits).is_pending());
    }
}
