//! The pod's link: a veth pair with its addresses and routes.

use std::net::IpAddr;
use std::time::Duration;

use fairlead_dataplane::pods::{self, PodLinks, PodSpec, Removal};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_ipam::Key;
use tokio::time::timeout;

use super::{CheckContext, ConnectPod, PodAddresses, Stage};
use crate::cni::attachment::Attachment;
use crate::cni::failure::{Failure, Reason, blocking};
use crate::cni::mtu::PodMtu;
use crate::cni::{calico, check};

/// Interval at which a link that the kernel deletes is polled until it is gone.
const DELETION_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Makes and removes links.
pub(in crate::cni) struct LinkStage {
    /// Routing IDs of the pods' routes on the host.
    pub(in crate::cni) ids: RoutingIds,
    pub(in crate::cni) mtu: PodMtu,
    /// Whether links on the host have the names that Calico's policy program expects.
    pub(in crate::cni) calico_names: bool,
}

#[tonic::async_trait]
impl ConnectPod for LinkStage {
    async fn connect(&self, attachment: &Attachment, allocated: &PodAddresses) -> Result<PodLinks, Failure> {
        let Attachment { key, netns, pod } = attachment.clone();
        let mtu = self.mtu.clone();
        let spec = PodSpec {
            container_id: key.container_id,
            ifname: key.ifname,
            netns,
            pool: allocated.pool.clone(),
            addresses: allocated.addresses,
            mtu: None,
            link_name: self.calico_names.then(|| calico::link_name(&pod.namespace, &pod.name)),
            ids: self.ids,
        };
        let add = move || pods::add(&PodSpec { mtu: mtu.value(), ..spec });
        Ok(blocking("setting up the pod's link", add).await??)
    }

    fn check(&self, context: &CheckContext, allocated: &[IpAddr]) -> Vec<String> {
        check::link(&context.key.ifname, allocated, &context.kernel)
    }
}

#[tonic::async_trait]
impl Stage for LinkStage {
    async fn detach(&self, key: &Key) -> Result<(), Failure> {
        let Key { container_id, ifname } = key.clone();
        let find = move || Removal::find(&container_id, &ifname);
        match blocking("looking up the pod's link", find).await?.map_err(removal_failure)? {
            removal if removal.is_needed() => delete(removal).await,
            _ => Ok(()),
        }
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

/// Failure of a DEL in the data path. The reason is never an invalid request, whatever the kernel says.
fn removal_failure(error: pods::Error) -> Failure {
    Failure::new(Reason::DataPlaneFailed, error.to_string())
}
