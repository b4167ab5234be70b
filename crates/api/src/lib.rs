//! The vocabulary of Fairlead: what every other crate must call by the same name.
//!
//! * [`client_routing`]: rules and routes of pods that use egress gateways.
//! * `conditions` (feature `resources`): conditions in the status of objects.
//! * [`fou`]: names and overhead of Foo-over-UDP links, and the gateways behind them.
//! * [`names`]: annotations, labels, finalizers, table numbers and marks, each with its source.
//! * [`source_address`]: source addresses of egress gateways on the node of their holder.
//! * `resources` (feature `resources`): the custom resources, from which `deploy/crds` is generated.
//!
//! There is no I/O here and nothing decides anything. Data-plane crates use it without the feature, so that
//! they build without the Kubernetes client.

pub mod client_routing;
#[cfg(feature = "resources")]
pub mod conditions;
pub mod fou;
pub mod names;
#[cfg(feature = "resources")]
pub mod resources;
pub mod source_address;
