//! ADD, DEL and CHECK as one ordered list of stages, each the owner of one part of an attachment.
//!
//! ADD attaches in order, CHECK compares in order, and DEL detaches in reverse order. An ADD that fails detaches what its
//! stages made, the failed one included, and reports its own error. One more part of an attachment (network policy,
//! bandwidth) is one more [`Stage`] in a file of its own, and one line in [`super::start`]. Those of egress gateways are in a crate above.
//!
//! Detaching stops at the first stage that fails, for what comes before it still is in use: an address is not free while a
//! link answers to it. Runtimes repeat a DEL that failed.

pub(super) mod address;
pub(super) mod chained;
pub(super) mod link;
pub(super) mod record;
pub(super) mod result;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use fairlead_address::DualStackAddrs;
use fairlead_cluster::events::{EventPublisher, PendingEvent, pod_reference};
use fairlead_dataplane::pods::{Inspection, PodLinks};
use fairlead_egress::EgressName;
use fairlead_ipam::Key;
use fairlead_wire::cni::CniArgs;

use super::args::{self, Attachment};
use super::check::Previous;
use super::failure::Failure;

/// A part of an attachment.
#[tonic::async_trait]
pub trait Stage: Send + Sync {
    /// Makes it, or makes it anew when a runtime repeats the ADD.
    async fn attach(&self, context: &mut AttachContext) -> Result<(), Failure>;

    /// Removes all of it, or what there is of it; nothing to remove is no failure.
    async fn detach(&self, key: &Key) -> Result<(), Failure>;

    /// Adds to `context.differences` what is not as ADD made it.
    async fn check(&self, _context: &mut CheckContext) -> Result<(), Failure> {
        Ok(())
    }
}

/// Request of a pod to egress gateways, as an ADD found it before it made anything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EgressRequest {
    /// The pod's UID, if the runtime passes it.
    pub uid: Option<String>,
    /// Its egress annotations.
    pub annotations: BTreeMap<String, String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The Egresses that select it by its labels.
    pub selected: BTreeSet<EgressName>,
    /// The Egress of which the pod is a gateway, by its labels.
    pub gateway_of: Option<String>,
}

/// An ADD: the request, and what the stages have made so far.
#[derive(Debug)]
pub struct AttachContext {
    /// The interface of the container.
    pub key: Key,
    /// As the plugin passed them on; each stage parses what it needs with [`super::args`].
    pub args: CniArgs,
    /// The pool of the addresses.
    pub pool: String,
    /// Addresses of the pod.
    pub addresses: DualStackAddrs,
    /// Both ends of the pod's link, once it is made.
    pub links: Option<PodLinks>,
    /// What the pod asks of egress gateways.
    pub egress: EgressRequest,
    /// The CNI result, in JSON.
    pub result: Vec<u8>,
}

impl AttachContext {
    /// The context of a request that no stage has seen.
    ///
    /// # Errors
    /// It names no container or interface.
    pub fn new(args: CniArgs) -> Result<Self, Failure> {
        let key = args::key(&args)?;
        let (addresses, egress) = (DualStackAddrs::default(), EgressRequest::default());
        Ok(Self { key, args, pool: String::new(), addresses, links: None, egress, result: Vec::new() })
    }
}

/// A CHECK: the request, what the kernel shows, and the differences found so far.
#[derive(Debug)]
pub struct CheckContext {
    /// The interface of the container.
    pub key: Key,
    /// File of its network namespace.
    pub netns: PathBuf,
    /// Result of the ADD, if the configuration has it.
    pub previous: Option<Previous>,
    /// Both ends of the link as the kernel shows them.
    pub kernel: Inspection,
    /// The addresses that are allocated to the container.
    pub allocated: Vec<IpAddr>,
    /// One sentence each.
    pub differences: Vec<String>,
}

/// Stages that bring a pod its egress gateways.
pub struct EgressStages {
    /// The first stage, which finds what a pod asks for and refuses what it cannot have.
    pub request: Box<dyn Stage>,
    /// The stage after the one that made the pod's interface.
    pub tunnels: Box<dyn Stage>,
}

/// The stages of an attachment in the order of ADD.
pub(super) struct Stages(pub(super) Vec<Box<dyn Stage>>);

impl Stages {
    /// ADD. When `repeated`, an earlier ADD of this attachment has succeeded: what it made is left for DEL.
    pub(super) async fn attach(&self, context: &mut AttachContext, repeated: bool) -> Result<(), Failure> {
        for (at, stage) in self.0.iter().enumerate() {
            let Err(failure) = stage.attach(context).await else { continue };
            if !repeated && let Err(error) = detach(self.0.iter().take(at + 1), &context.key).await {
                let (container, reason) = (&context.key.container_id, failure.reason.as_str());
                tracing::warn!(container, reason, %error, "cannot roll back a failed ADD; DEL will remove the rest");
            }
            return Err(failure);
        }
        Ok(())
    }

    /// DEL.
    pub(super) async fn detach(&self, key: &Key) -> Result<(), Failure> {
        detach(self.0.iter(), key).await
    }

    /// CHECK.
    pub(super) async fn check(&self, context: &mut CheckContext) -> Result<(), Failure> {
        for stage in &self.0 {
            stage.check(context).await?;
        }
        Ok(())
    }
}

async fn detach<'a>(
    attached: impl DoubleEndedIterator<Item = &'a Box<dyn Stage>>,
    key: &Key,
) -> Result<(), Failure> {
    for stage in attached.rev() {
        stage.detach(key).await?;
    }
    Ok(())
}

/// Warning at the pod of an attachment, where users look for the reason.
pub fn warn_at_pod(
    events: &EventPublisher,
    attachment: &Attachment,
    action: &'static str,
    failure: &Failure,
) {
    let Attachment { namespace, pod, pod_uid, .. } = attachment;
    events.warn(PendingEvent {
        regarding: pod_reference(namespace, pod, pod_uid.clone()),
        reason: failure.reason.as_str(),
        action,
        note: failure.message.clone(),
    });
}

/// A stage that attaches nothing, and detaches what an earlier program with other settings attached.
pub(super) struct DetachOnly(pub(super) Box<dyn Stage>);

#[tonic::async_trait]
impl Stage for DetachOnly {
    async fn attach(&self, _: &mut AttachContext) -> Result<(), Failure> {
        Ok(())
    }

    async fn detach(&self, key: &Key) -> Result<(), Failure> {
        self.0.detach(key).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::cni::failure::Reason;

    /// Writes down what is asked of it, and fails where the test says.
    struct Fake {
        name: &'static str,
        attach_fails: bool,
        detach_fails: bool,
        calls: Arc<Mutex<Vec<String>>>,
    }

    impl Fake {
        fn call(&self, what: &str, fails: bool) -> Result<(), Failure> {
            let call = format!("{what} {}", self.name);
            self.calls.lock().unwrap().push(call.clone());
            if fails { Err(Failure::new(Reason::DataPlaneFailed, call)) } else { Ok(()) }
        }
    }

    #[tonic::async_trait]
    impl Stage for Fake {
        async fn attach(&self, context: &mut AttachContext) -> Result<(), Failure> {
            context.result.extend(self.name.as_bytes());
            self.call("attach", self.attach_fails)
        }

        async fn detach(&self, _: &Key) -> Result<(), Failure> {
            self.call("detach", self.detach_fails)
        }

        async fn check(&self, context: &mut CheckContext) -> Result<(), Failure> {
            context.differences.push(self.name.to_owned());
            self.call("check", self.attach_fails)
        }
    }

    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    /// Stages of [`NAMES`], of which one fails to attach and one to detach; and what is asked of them.
    fn stages(attach_fails: Option<usize>, detach_fails: Option<usize>) -> (Stages, Arc<Mutex<Vec<String>>>) {
        let calls = Arc::<Mutex<Vec<String>>>::default();
        let stage = |(at, name)| -> Box<dyn Stage> {
            let (attach_fails, detach_fails) = (attach_fails == Some(at), detach_fails == Some(at));
            Box::new(Fake { name, attach_fails, detach_fails, calls: Arc::clone(&calls) })
        };
        (Stages(NAMES.into_iter().enumerate().map(stage).collect()), calls)
    }

    fn add() -> AttachContext {
        let (container_id, ifname) = ("c".to_owned(), "eth0".to_owned());
        AttachContext::new(CniArgs { container_id, ifname, ..CniArgs::default() }).unwrap()
    }

    fn calls(what: &str, names: impl IntoIterator<Item = &'static str>) -> Vec<String> {
        names.into_iter().map(|name| format!("{what} {name}")).collect()
    }

    #[tokio::test]
    async fn add_runs_the_stages_in_order_and_del_in_reverse() {
        let (stages, asked) = stages(None, None);
        let mut context = add();
        assert_eq!(stages.attach(&mut context, false).await, Ok(()));
        assert_eq!(context.result, b"abcd");
        assert_eq!(stages.detach(&context.key).await, Ok(()));
        let expected = [calls("attach", NAMES), calls("detach", NAMES.into_iter().rev())].concat();
        assert_eq!(*asked.lock().unwrap(), expected);
    }

    #[tokio::test]
    async fn an_add_that_fails_at_any_stage_detaches_what_was_attached_in_reverse() {
        for (at, name) in NAMES.into_iter().enumerate() {
            let (stages, asked) = stages(Some(at), None);
            let failure = stages.attach(&mut add(), false).await.unwrap_err();
            assert_eq!(failure.message, format!("attach {name}"));
            let attached = || NAMES.into_iter().take(at + 1);
            let expected = [calls("attach", attached()), calls("detach", attached().rev())].concat();
            assert_eq!(*asked.lock().unwrap(), expected, "{at}");
        }
    }

    #[tokio::test]
    async fn a_rollback_that_fails_stops_there_and_does_not_hide_the_first_error() {
        for undo in 0..NAMES.len() {
            let (stages, asked) = stages(Some(3), Some(undo));
            let failure = stages.attach(&mut add(), false).await.unwrap_err();
            assert_eq!(failure.message, "attach d", "{undo}");
            let detached = NAMES.into_iter().skip(undo).rev();
            let expected = [calls("attach", NAMES), calls("detach", detached)].concat();
            assert_eq!(*asked.lock().unwrap(), expected, "{undo}");
        }
    }

    #[tokio::test]
    async fn a_repeated_add_that_fails_keeps_what_the_first_one_made() {
        let (stages, asked) = stages(Some(2), None);
        let failure = stages.attach(&mut add(), true).await.unwrap_err();
        assert_eq!(failure.message, "attach c");
        assert_eq!(*asked.lock().unwrap(), calls("attach", ["a", "b", "c"]));
    }

    #[tokio::test]
    async fn a_del_stops_at_the_stage_that_fails() {
        let (stages, asked) = stages(None, Some(1));
        let failure = stages.detach(&add().key).await.unwrap_err();
        assert_eq!(failure.message, "detach b");
        assert_eq!(*asked.lock().unwrap(), calls("detach", ["d", "c", "b"]));
    }

    #[tokio::test]
    async fn check_collects_the_differences_of_all_stages() {
        let (stages, _) = stages(None, None);
        let kernel = Inspection {
            host: None,
            led_to_pod: Vec::new(),
            pod: None,
            pod_routes: Vec::new(),
            connected: false,
        };
        let (netns, previous) = (PathBuf::new(), None);
        let mut context = CheckContext {
            key: add().key,
            netns,
            previous,
            kernel,
            allocated: Vec::new(),
            differences: Vec::new(),
        };
        assert_eq!(stages.check(&mut context).await, Ok(()));
        assert_eq!(context.differences, NAMES);
    }

    #[tokio::test]
    async fn a_stage_that_only_detaches_makes_nothing() {
        let (Stages(list), asked) = stages(None, None);
        let stages =
            Stages(list.into_iter().map(|stage| -> Box<dyn Stage> { Box::new(DetachOnly(stage)) }).collect());
        assert_eq!(stages.attach(&mut add(), false).await, Ok(()));
        assert_eq!(stages.detach(&add().key).await, Ok(()));
        assert_eq!(*asked.lock().unwrap(), calls("detach", NAMES.into_iter().rev()));
    }
}
