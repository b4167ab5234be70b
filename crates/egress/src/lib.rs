//! Decisions about egress NAT: which gateways a pod asks for, how its packets reach them, and what an Egress consists of.
//!
//! * [`annotation`]: the gateways that the annotations of a pod name.
//! * [`destinations`]: the prefixes of an Egress.
//! * [`client`]: rules, routes and tunnels of a client pod, by what is known of the cluster.
//! * [`choice`]: the gateway of a client or of a flow, among those that are ready.
//! * [`endpoints`]: the gateways of an Egress, and those that a node uses.
//! * [`explain`]: which way the packets of a pod take, for the command line.
//! * [`options`]: what an Egress asks of its gateways beside destinations.
//! * [`lookup`]: how a gateway is asked who used an address and port.
//! * [`objects`]: Deployment, Service and the other objects of an Egress, to be applied.
//! * [`problem`]: why a pod does not use the gateways that it asks for.
//! * [`registration`]: which token a gateway accepts.
//! * [`selectors`]: the pods that an Egress selects by their labels; [`selection`]: the Egresses that select a pod.
//! * [`status`]: what the status of an Egress says.
//!
//! Everything is pure. The values come from watches of the controller and of the node program, which act on the results:
//! `fairlead-controller` applies objects; links, rules and routes are left to the data path. Names and numbers are Coil's
//! (`fairlead-api`), so that pods of both work together. Those of [`explain`] are read by `fairlead-cli`.

pub mod annotation;
pub mod choice;
pub mod client;
pub mod destinations;
pub mod endpoints;
pub mod explain;
pub mod lookup;
pub mod objects;
pub mod options;
pub mod problem;
pub mod registration;
pub mod selection;
pub mod selectors;
pub mod status;

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// An Egress by its namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EgressName {
    /// Namespace of the Egress.
    pub namespace: String,
    /// Name of the Egress, which is also that of its Service.
    pub name: String,
}

impl EgressName {
    /// Namespace and name of an Egress or its Service, by its metadata.
    pub fn of(metadata: &ObjectMeta) -> Self {
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
        }
    }

    /// Reads `NAMESPACE/NAME`; `None` if the text is not of that form.
    pub fn parse(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        Some(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

impl fmt::Display for EgressName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
