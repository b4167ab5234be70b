//! The vocabulary of Fairlead: what every other crate must call by the same name.
//!
//! * `conditions` (feature `resources`): conditions in the status of objects.
//! * [`fou`]: names and overhead of Foo-over-UDP links.
//! * [`names`]: annotations, labels, finalizers, table numbers and marks, each with its source.
//! * `resources` (feature `resources`): the custom resources, from which `deploy/crds` is generated.
//!
//! There is no I/O here and nothing decides anything. Data-plane crates use it without the feature, so that
//! they build without the Kubernetes client.

#[cfg(feature = "resources")]
pub mod conditions;
pub mod fou;
pub mod names;
#[cfg(feature = "resources")]
pub mod resources;
