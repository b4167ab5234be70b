//! Egress NAT, which is asked for by annotations of the pod (Coil v2). It is not implemented: a pod that asks for it is not
//! attached, because without NAT its packets would leave with another source address than its author expects.
//!
//! Annotations are read from the watch cache of this node's pods. The API server is asked only for a pod that the cache does
//! not have; when it does not answer, such a pod is not attached either. Pods that the cache has start without it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::ANNOTATION_EGRESS_PREFIX;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::pods::SlimPod;
use fairlead_ipam::Key;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use tokio::time::timeout;

use super::{AttachContext, Stage, warn_at_pod};
use crate::cni::args::{Attachment, attachment};
use crate::cni::failure::{Failure, Reason};

/// How long the API server may take to return a pod that the cache does not have.
const POD_TIMEOUT: Duration = Duration::from_secs(5);

/// The first stage: nothing is made for a pod that is refused.
pub(in crate::cni) struct EgressStage {
    /// The pods of this node.
    pub(in crate::cni) pods: Arc<Cache<SlimPod>>,
    pub(in crate::cni) client: Client,
    pub(in crate::cni) events: EventPublisher,
}

#[tonic::async_trait]
impl Stage for EgressStage {
    async fn attach(&self, context: &mut AttachContext) -> Result<(), Failure> {
        // What is no pod has no annotations; a stage that needs a pod says so.
        let Ok(attachment) = attachment(&context.args) else { return Ok(()) };
        let Some(annotation) = self.annotation_of(&attachment).await? else { return Ok(()) };
        let Attachment { namespace, pod, .. } = &attachment;
        let message =
            format!("pod {namespace}/{pod} has the annotation {annotation}, and egress NAT is not supported");
        let failure = Failure::new(Reason::EgressUnsupported, message)
            .details("without NAT its packets would have another source address: remove the annotation");
        warn_at_pod(&self.events, &attachment, "SetUpEgress", &failure);
        Err(failure)
    }

    async fn detach(&self, _: &Key) -> Result<(), Failure> {
        Ok(())
    }
}

impl EgressStage {
    /// The pod's egress annotation. A pod that the API server does not have (the mirror of a static pod comes later)
    /// has none.
    async fn annotation_of(&self, attachment: &Attachment) -> Result<Option<String>, Failure> {
        let Attachment { namespace, pod: name, pod_uid, .. } = attachment;
        let cached = self.pods.store.get(&ObjectRef::new(name).within(namespace));
        // A pod of the same name may be a later one.
        let same = |pod: &&Arc<SlimPod>| pod_uid.as_ref().is_some_and(|uid| pod.uids().contains(uid));
        if let Some(pod) = cached.as_ref().filter(same) {
            return Ok(egress_annotation(pod.metadata.annotations.as_ref()));
        }
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let unavailable = |message| Failure::new(Reason::ApiServerUnavailable, message);
        match timeout(POD_TIMEOUT, pods.get_metadata_opt(name)).await {
            Ok(Ok(found)) => {
                Ok(found.and_then(|found| egress_annotation(found.metadata.annotations.as_ref())))
            }
            // Of a runtime that passes no UID, the pod of this name that was seen last.
            _ if pod_uid.is_none() && cached.is_some() => {
                Ok(cached.and_then(|pod| egress_annotation(pod.metadata.annotations.as_ref())))
            }
            Ok(Err(error)) => {
                let message = format!("cannot read pod {namespace}/{name}, which may ask for egress NAT");
                Err(unavailable(message).details(error))
            }
            Err(_) => Err(unavailable("the API server does not answer".to_owned())),
        }
    }
}

/// The first annotation that chooses egress gateways.
fn egress_annotation(annotations: Option<&BTreeMap<String, String>>) -> Option<String> {
    annotations?.keys().find(|name| name.starts_with(ANNOTATION_EGRESS_PREFIX)).cloned()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use fairlead_cluster::caches;
    use fairlead_cluster::subsystem::Supervisor;
    use fairlead_wire::cni::CniArgs;
    use futures::{FutureExt, StreamExt};
    use kube::runtime::events::Reporter;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;
    use crate::ipam::tests::client;
    use crate::metrics::Metrics;

    fn pod(name: &str, annotation: &str) -> serde_json::Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "shop", "uid": "u1", "annotations": { annotation: "nat" } },
        })
    }

    /// A stage with these pods in its cache, and the paths it asks the API server for, which answers with `answer`.
    fn stage(
        supervisor: &mut Supervisor,
        cached: &[serde_json::Value],
        answer: (u16, String),
    ) -> (EgressStage, Arc<Mutex<Vec<String>>>) {
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let calls = Arc::clone(&asked);
        let client = client(move |call| {
            calls.lock().unwrap().push(call.to_owned());
            std::future::ready(answer.clone()).boxed()
        });
        let events = cached.iter().map(|pod| {
            let mut pod = serde_json::from_value(pod.clone()).unwrap();
            fairlead_cluster::pods::trimmed(&mut pod);
            Ok(Event::Apply(pod))
        });
        let events: Vec<kube::runtime::watcher::Result<Event<SlimPod>>> = events.collect();
        let events = futures::stream::iter(events).chain(futures::stream::pending());
        let pods = caches::start(supervisor.subsystem("caches"), "pods", events);
        let events = EventPublisher::start(
            supervisor.subsystem("events"),
            self::client(|_| futures::future::pending().boxed()),
            Reporter { controller: "test".to_owned(), instance: None },
            Metrics::default().events,
        );
        (EgressStage { pods: Arc::new(pods), client, events }, asked)
    }

    async fn attach(stage: &EgressStage, name: &str) -> Result<(), Failure> {
        attach_with(stage, name, "u1").await
    }

    /// Without a UID if it is empty.
    async fn attach_with(stage: &EgressStage, name: &str, uid: &str) -> Result<(), Failure> {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let args = [("K8S_POD_NAMESPACE", "shop"), ("K8S_POD_NAME", name), ("K8S_POD_UID", uid)];
        let args = CniArgs {
            container_id: "c".to_owned(),
            ifname: "eth0".to_owned(),
            netns: "/ns".to_owned(),
            args: args.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            ..CniArgs::default()
        };
        stage.attach(&mut AttachContext::new(args).unwrap()).await
    }

    #[tokio::test]
    async fn a_pod_that_asks_for_egress_is_refused_and_the_annotation_is_named() {
        let mut supervisor = Supervisor::default();
        let annotation = "egress.coil.cybozu.com/internet-egress";
        let there = (200, pod("new", annotation).to_string());
        let (stage, asked) = stage(&mut supervisor, &[pod("known", annotation)], there);
        for name in ["known", "new"] {
            let failure = attach(&stage, name).await.unwrap_err();
            assert_eq!(failure.reason, Reason::EgressUnsupported);
            assert!(failure.message.contains(annotation) && failure.message.contains(name), "{failure}");
        }
        assert_eq!(*asked.lock().unwrap(), ["GET /api/v1/namespaces/shop/pods/new"]);
    }

    #[tokio::test]
    async fn a_pod_in_the_cache_needs_no_api_server_and_another_is_read_there() {
        let mut supervisor = Supervisor::default();
        let outage = (503, r#"{"kind":"Status","apiVersion":"v1","status":"Failure","code":503}"#.to_owned());
        let (stage, asked) = stage(&mut supervisor, &[pod("known", "note")], outage);
        assert_eq!(attach(&stage, "known").await, Ok(()));
        assert!(asked.lock().unwrap().is_empty());
        assert_eq!(attach(&stage, "new").await.unwrap_err().reason, Reason::ApiServerUnavailable);
        let another_life = attach_with(&stage, "known", "u2").await.unwrap_err();
        assert_eq!(another_life.reason, Reason::ApiServerUnavailable);
        assert_eq!(attach_with(&stage, "known", "").await, Ok(()), "a runtime that passes no UID");
    }

    #[tokio::test]
    async fn a_pod_that_the_api_server_does_not_have_asks_for_nothing() {
        let mut supervisor = Supervisor::default();
        let missing =
            r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}"#;
        let (stage, _) = stage(&mut supervisor, &[], (404, missing.to_owned()));
        assert_eq!(attach(&stage, "static").await, Ok(()));
    }
}
