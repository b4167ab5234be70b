//! Stages of an attachment, each the owner of one part of it.
//!
//! ADD runs them in order and hands on what each one made, CHECK compares in order, and DEL detaches in reverse order. An ADD that fails
//! detaches what its stages made, the failed one included, and reports its own error. One more part of an attachment (network policy,
//! bandwidth) is one more [`Stage`] in a file of its own, and one line each in [`Stages`] and [`super::start`]. Those of egress gateways
//! are in a crate above.
//!
//! Detaching stops at the first stage that fails, for what comes before it still is in use: an address is not free while a
//! link answers to it. Runtimes repeat a DEL that failed.

pub(super) mod address;
mod chained;
pub(super) mod link;
pub(super) mod namespace_pools;
pub(super) mod record;
mod result;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use fairlead_address::DualStackAddrs;
use fairlead_cluster::events::{EventPublisher, PendingEvent, pod_reference};
use fairlead_dataplane::pods::{Inspection, PodLinks};
use fairlead_egress::EgressName;
use fairlead_ipam::Key;
use fairlead_ipam::check::Owner;

use super::attachment::{AddRequest, Attachment};
use super::check::Previous;
use super::failure::Failure;

/// Part of an attachment. What ADD and CHECK give a stage, and what it returns, is in the trait of that stage.
#[tonic::async_trait]
pub trait Stage: Send + Sync {
    /// Removes all of it, or what there is of it; nothing to remove is no failure.
    async fn detach(&self, key: &Key) -> Result<(), Failure>;
}

/// First stage, before anything is made.
#[tonic::async_trait]
pub trait FindEgress: Stage {
    /// Finds what a pod asks of egress gateways, and refuses what it cannot have.
    async fn find(&self, attachment: &Attachment) -> Result<EgressRequest, Failure>;
}

/// Stage of the addresses of a pod.
#[tonic::async_trait]
pub(super) trait AllocateAddresses: Stage {
    async fn allocate(&self, attachment: &Attachment) -> Result<PodAddresses, Failure>;

    /// CHECK: the addresses that are allocated to the container.
    fn allocated(&self, key: &Key) -> Result<Vec<IpAddr>, Failure>;
}

/// Stage of the files that name an attachment.
pub(super) trait RecordAttachment: Stage {
    fn record(&self, key: &Key, network: Option<&str>) -> Result<(), Failure>;
}

/// Stage of the link of a pod. A runtime may repeat the ADD: then it makes the link anew.
#[tonic::async_trait]
pub(super) trait ConnectPod: Stage {
    async fn connect(&self, attachment: &Attachment, addresses: &PodAddresses) -> Result<PodLinks, Failure>;

    /// CHECK: differences from what ADD made, one sentence each.
    fn check(&self, context: &CheckContext, allocated: &[IpAddr]) -> Vec<String>;
}

/// Stage after the one that made the pod's interface.
#[tonic::async_trait]
pub trait SetUpEgress: Stage {
    /// Brings a pod what it asks of egress gateways.
    async fn set_up(
        &self,
        attachment: &Attachment,
        interface: PodInterface,
        request: EgressRequest,
    ) -> Result<(), Failure>;

    /// Compares the pod's namespace with what ADD made; returns one sentence for each difference.
    async fn check(&self, key: &Key) -> Result<Vec<String>, Failure>;
}

/// Request of a pod to egress gateways, as an ADD found it before it made anything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EgressRequest {
    /// The pod's UID, if the runtime passes it.
    pub uid: Option<String>,
    /// Egress annotations of the pod.
    pub annotations: BTreeMap<String, String>,
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// The Egresses that select it by its labels.
    pub selected: BTreeSet<EgressName>,
    /// The Egress of which the pod is a gateway, by its labels.
    pub gateway_of: Option<String>,
}

impl EgressRequest {
    /// Whether the pod is to be a client or a gateway.
    pub fn asks(&self) -> bool {
        !self.annotations.is_empty() || !self.selected.is_empty() || self.gateway_of.is_some()
    }
}

/// Addresses that are allocated to a pod, and their pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodAddresses {
    pub(super) pool: String,
    pub(super) addresses: DualStackAddrs,
}

/// Interface of a pod, made by this program or by the plugin before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodInterface {
    /// Addresses of the interface.
    pub addresses: DualStackAddrs,
    /// MTU in bytes; `None` of an interface that another plugin made.
    pub mtu: Option<u32>,
}

/// Context of a CHECK: the request, and what the kernel shows.
#[derive(Debug)]
pub(super) struct CheckContext {
    /// The interface of the container.
    pub(super) key: Key,
    /// File of its network namespace.
    pub(super) netns: PathBuf,
    /// Result of the ADD, if the configuration has it.
    pub(super) previous: Option<Previous>,
    /// Both ends of the link as the kernel shows them.
    pub(super) kernel: Inspection,
}

/// Stages that bring a pod its egress gateways.
pub struct EgressStages {
    /// The first stage.
    pub request: Box<dyn FindEgress>,
    /// The stage after the one that made the pod's interface.
    pub tunnels: Box<dyn SetUpEgress>,
}

/// Stages of an attachment in the order of ADD.
pub(super) struct Stages {
    pub(super) request: Box<dyn FindEgress>,
    pub(super) address: Box<dyn AllocateAddresses>,
    pub(super) record: Box<dyn RecordAttachment>,
    pub(super) link: Box<dyn ConnectPod>,
    pub(super) tunnels: Box<dyn SetUpEgress>,
    /// Whether another plugin allocates addresses and makes interfaces before. Then `address` and `link` only detach: there usually is
    /// nothing, but what an earlier run with other settings made still goes.
    pub(super) behind_plugin: bool,
}

impl Stages {
    /// ADD; returns the CNI result in JSON. When `repeated`, an earlier ADD of this attachment has succeeded: what it made is left for DEL.
    pub(super) async fn attach(&self, add: &AddRequest, repeated: bool) -> Result<Vec<u8>, Failure> {
        let mut entered = Vec::new();
        let outcome = self.attach_in_order(add, &mut entered).await;
        if let Err(failure) = &outcome
            && !repeated
            && let Err(error) = detach(&entered, &add.key).await
        {
            let container = &add.key.container_id;
            let reason = failure.reason.as_str();
            tracing::warn!(container, reason, %error, "cannot roll back a failed ADD; DEL will remove the rest");
        }
        outcome
    }

    /// `entered` are the stages that may have made something.
    async fn attach_in_order<'a>(
        &'a self,
        add: &AddRequest,
        entered: &mut Vec<&'a dyn Stage>,
    ) -> Result<Vec<u8>, Failure> {
        entered.push(&*self.request);
        let pod = match &add.attachment {
            Ok(attachment) => Ok((attachment, self.request.find(attachment).await?)),
            Err(failure) => Err(failure.clone()),
        };
        entered.push(&*self.address);
        if self.behind_plugin {
            return self.attach_behind_plugin(add, pod.ok(), entered).await;
        }
        if add.is_chained {
            return Err(chained::not_first());
        }
        let (attachment, request) = pod?;
        let allocated = self.address.allocate(attachment).await?;
        entered.push(&*self.record);
        self.record.record(&add.key, add.network.as_deref())?;
        entered.push(&*self.link);
        let links = self.link.connect(attachment, &allocated).await?;
        entered.push(&*self.tunnels);
        let interface = PodInterface { addresses: allocated.addresses, mtu: Some(links.mtu) };
        self.tunnels.set_up(attachment, interface, request).await?;
        Ok(result::result(attachment, &allocated.addresses, &links).to_string().into_bytes())
    }

    /// `pod` is `None` for what is no Kubernetes pod, which has no egress.
    async fn attach_behind_plugin<'a>(
        &'a self,
        add: &AddRequest,
        pod: Option<(&Attachment, EgressRequest)>,
        entered: &mut Vec<&'a dyn Stage>,
    ) -> Result<Vec<u8>, Failure> {
        entered.push(&*self.record);
        self.record.record(&add.key, None)?;
        entered.push(&*self.link);
        let result = chained::pass_on(&add.configuration)?;
        entered.push(&*self.tunnels);
        if let Some((attachment, request)) = pod {
            let interface = chained::interface(&add.configuration, &add.key.ifname);
            self.tunnels.set_up(attachment, interface, request).await?;
        }
        Ok(result)
    }

    /// DEL.
    pub(super) async fn detach(&self, key: &Key) -> Result<(), Failure> {
        detach(&self.all(), key).await
    }

    /// CHECK; returns differences from what ADD made, one sentence each.
    pub(super) async fn check(&self, context: &CheckContext) -> Result<Vec<String>, Failure> {
        if self.behind_plugin {
            return Ok([chained::check(context), self.tunnels.check(&context.key).await?].concat());
        }
        let link = self.link.check(context, &self.address.allocated(&context.key)?);
        Ok([link, self.tunnels.check(&context.key).await?, result::check(context)].concat())
    }

    fn all(&self) -> [&dyn Stage; 5] {
        [&*self.request, &*self.address, &*self.record, &*self.link, &*self.tunnels]
    }
}

async fn detach(attached: &[&dyn Stage], key: &Key) -> Result<(), Failure> {
    for stage in attached.iter().rev() {
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
    let Owner { namespace, name, uid } = &attachment.pod;
    events.warn(PendingEvent {
        regarding: pod_reference(namespace, name, uid.clone()),
        reason: failure.reason.as_str(),
        action,
        note: failure.message.clone(),
    });
}

#[cfg(test)]
mod tests;
