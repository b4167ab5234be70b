//! Egress gateways, which a pod asks for by its annotations (Coil v2), in two stages: the first one finds what can be refused
//! before anything is made, the second one sets the tunnels up in the pod's namespace. A pod that does not get what it asks for is
//! not attached, because its packets would leave with another source address than its author expects.
//!
//! Annotations are read from the watch cache of this node's pods. The API server is asked only for a pod that the cache does
//! not have; when it does not answer, such a pod is not attached either. Pods that the cache has start without it, and those that asked for
//! nothing at an earlier ADD ([`super::without_egress`]).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::pods::{SlimPod, gateway_of};
use fairlead_ipam::Key;
use fairlead_ipam::check::Owner;
use fairlead_pods::cni::{
    Attachment, EgressRequest, EgressStages, Failure, FindEgress, PodInterface, Reason, SetUpEgress, Stage,
    warn_at_pod,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use tokio::time::timeout;

use super::Egress;
use super::annotations::egress_annotations;

/// Longest time in which the API server returns a pod that the cache does not have.
const POD_TIMEOUT: Duration = Duration::from_secs(5);

/// The first stage: nothing is made for a pod that is refused.
struct EgressRequestStage {
    /// The pods of this node.
    pods: Arc<Cache<SlimPod>>,
    client: Client,
    egress: Egress,
    events: EventPublisher,
}

#[tonic::async_trait]
impl FindEgress for EgressRequestStage {
    /// A pod that asked for nothing at its last ADD asks for nothing where only the API server could say more.
    async fn find(&self, attachment: &Attachment) -> Result<EgressRequest, Failure> {
        let of_last_add = |failure: Failure| match &attachment.pod.uid {
            Some(uid)
                if failure.reason == Reason::ApiServerUnavailable
                    && self.egress.0.sandboxes.without_egress().has(uid) =>
            {
                Ok(EgressRequest { uid: Some(uid.clone()), ..EgressRequest::default() })
            }
            _ => Err(failure),
        };
        let mut request = match self.request_of(&attachment.pod).await {
            Ok(request) => request,
            Err(failure) => return of_last_add(failure),
        };
        let examined = self.egress.examine(&attachment.pod.namespace, &mut request).await;
        let asks = !request.annotations.is_empty() || request.gateway_of.is_some();
        let examined = examined.map(|()| request);
        let examined = examined.or_else(|failure| if asks { Err(failure) } else { of_last_add(failure) });
        examined.inspect_err(|failure| warn_at_pod(&self.events, attachment, "SetUpEgress", failure))
    }
}

#[tonic::async_trait]
impl Stage for EgressRequestStage {
    async fn detach(&self, _: &Key) -> Result<(), Failure> {
        Ok(())
    }
}

impl Egress {
    /// The stages of an attachment that bring a pod its gateways. `pods` are those of this node.
    pub fn stages(&self, pods: Arc<Cache<SlimPod>>, client: Client, events: EventPublisher) -> EgressStages {
        let tunnels = EgressStage { egress: self.clone(), events: events.clone() };
        let request = EgressRequestStage { pods, client, egress: self.clone(), events };
        EgressStages { request: Box::new(request), tunnels: Box::new(tunnels) }
    }
}

/// The stage after the one that made the pod's interface.
struct EgressStage {
    egress: Egress,
    events: EventPublisher,
}

#[tonic::async_trait]
impl SetUpEgress for EgressStage {
    async fn set_up(
        &self,
        attachment: &Attachment,
        interface: PodInterface,
        request: EgressRequest,
    ) -> Result<(), Failure> {
        let uid = request.uid.clone();
        let asks = request.asks();
        let attached = self.egress.attach(attachment, interface, request).await;
        if let (Ok(()), Some(uid)) = (&attached, &uid) {
            self.egress.0.sandboxes.without_egress().record(uid, asks);
        }
        attached.inspect_err(|failure| warn_at_pod(&self.events, attachment, "SetUpEgress", failure))
    }

    async fn check(&self, key: &Key) -> Result<Vec<String>, Failure> {
        self.egress.check(key).await
    }
}

#[tonic::async_trait]
impl Stage for EgressStage {
    async fn detach(&self, key: &Key) -> Result<(), Failure> {
        self.egress.detach(key);
        let pods = &self.egress.0.deps.pods;
        if pods.is_ready() {
            let present: BTreeSet<String> = pods.store.state().iter().flat_map(|pod| pod.uids()).collect();
            self.egress.0.sandboxes.without_egress().forget(SystemTime::now(), |uid| present.contains(uid));
        }
        Ok(())
    }
}

impl EgressRequestStage {
    /// Request of a pod for egress. A pod that the API server does not have (the mirror of a static pod comes later) asks for nothing.
    async fn request_of(&self, pod: &Owner) -> Result<EgressRequest, Failure> {
        let Owner { namespace, name, uid } = pod;
        let cached = self.pods.store.get(&ObjectRef::new(name).within(namespace));
        // A pod of the same name may be a later one.
        let same = |pod: &&Arc<SlimPod>| uid.as_ref().is_some_and(|uid| pod.uids().contains(uid));
        if let Some(pod) = cached.as_ref().filter(same) {
            return Ok(request(uid.as_ref(), &pod.metadata));
        }
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let unavailable = |message| Failure::new(Reason::ApiServerUnavailable, message);
        match timeout(POD_TIMEOUT, pods.get_metadata_opt(name)).await {
            Ok(Ok(found)) => Ok(found
                .map(|found| request(uid.as_ref(), &found.metadata))
                .unwrap_or_else(|| EgressRequest { uid: uid.clone(), ..EgressRequest::default() })),
            // Of a runtime that passes no UID, the pod of this name that was seen last.
            _ if uid.is_none() && cached.is_some() => {
                Ok(cached.map(|pod| request(None, &pod.metadata)).unwrap_or_default())
            }
            Ok(Err(error)) => {
                let message =
                    format!("cannot read pod {namespace}/{name}, which may ask for egress gateways");
                Err(unavailable(message).details(error))
            }
            Err(_) => Err(unavailable("the API server does not answer".to_owned())),
        }
    }
}

/// `uid` is the one that the runtime passes.
fn request(uid: Option<&String>, metadata: &ObjectMeta) -> EgressRequest {
    EgressRequest {
        uid: uid.or(metadata.uid.as_ref()).cloned(),
        annotations: egress_annotations(metadata.annotations.as_ref()),
        labels: metadata.labels.clone().unwrap_or_default(),
        selected: BTreeSet::new(),
        gateway_of: gateway_of(metadata.labels.as_ref()).map(str::to_owned),
    }
}

#[cfg(test)]
mod tests;
