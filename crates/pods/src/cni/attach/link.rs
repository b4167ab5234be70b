//! The pod's link: a veth pair with its addresses and routes.

use std::time::Duration;

use fairlead_dataplane::pods::{self, PodSpec, Removal};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_ipam::Key;
use tokio::time::timeout;

use super::{AttachContext, CheckContext, Stage};
use crate::cni::args::{Attachment, attachment};
use crate::cni::failure::{Failure, Reason, blocking};
use crate::cni::mtu::PodMtu;
use crate::cni::{calico, check};

/// How often to poll whether a link is gone while the kernel deletes it.
const DELETION_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Makes and removes links.
pub(in crate::cni) struct LinkStage {
    /// Of the pods' routes on the host.
    pub(in crate::cni) ids: RoutingIds,
    pub(in crate::cni) mtu: PodMtu,
    /// Whether links on the host have the names that Calico's policy program expects.
    pub(in crate::cni) calico_names: bool,
}

#[tonic::async_trait]
impl Stage for LinkStage {
    async fn attach(&self, context: &mut AttachContext) -> Result<(), Failure> {
        let Attachment { key, netns, namespace, pod, .. } = attachment(&context.args)?;
        let mtu = self.mtu.clone();
        let spec = PodSpec {
            container_id: key.container_id,
            ifname: key.ifname,
            netns,
            pool: context.pool.clone(),
            addresses: context.addresses,
            mtu: None,
            link_name: self.calico_names.then(|| calico::link_name(&namespace, &pod)),
            ids: self.ids,
        };
        let add = move || pods::add(&PodSpec { mtu: mtu.value(), ..spec });
        context.links = Some(blocking("setting up the pod's link", add).await??);
        Ok(())
    }

    async fn detach(&self, key: &Key) -> Result<(), Failure> {
        let Key { container_id, ifname } = key.clone();
        let find = move || Removal::find(&container_id, &ifname);
        match blocking("looking up the pod's link", find).await?.map_err(removal_failure)? {
            removal if removal.is_needed() => delete(removal).await,
            _ => Ok(()),
        }
    }

    async fn check(&self, context: &mut CheckContext) -> Result<(), Failure> {
        check::link(&context.key.ifname, &context.allocated, &context.kernel, &mut context.differences);
        Ok(())
    }
}

/// Returns as soon as the links are gone. The kernel blocks the thread that asked for it until their memory is free,
/// several times as long.
async fn delete(removal: Removal) -> Result<(), Failure> {
    let links = removal.clone();
    let mut deletion = Box::pin(blocking("removing the pod's link", move || links.apply()));
    loop {
        match timeout(DELETION_POLL_INTERVAL, &mut deletion).await {
            Ok(outcome) => return outcome?.map_err(removal_failure),
            Err(_) if removal.is_over() => return Ok(()),
            Err(_) => {}
        }
    }
}

/// Whatever the kernel says to a DEL, the request was valid.
fn removal_failure(error: pods::Error) -> Failure {
    Failure::new(Reason::DataPlaneFailed, error.to_string())
}
