//! A mesh as it grows: planning all members, following the change of one, and the discovery server that tells nodes of each other.
//!
//! No node runs here: [`mesh-scale`](crate::mesh_scale) has the whole way of a change through a real node program.

mod changes;
mod discovery;
mod load;
mod paced;
mod streams;
mod watchers;

use anyhow::Result;

use crate::report::Measurement;
use crate::{Effort, Options, progress};

pub(crate) use load::Load;

pub(crate) const CASE: &str = "mesh";
/// The word that makes this program load for a discovery server.
pub(crate) const LOAD_COMMAND: &str = "discovery-load";
const OURS: &str = "fairlead";

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let sizes: &[u32] = match (options.effort, options.peers) {
        (_, Some(peers)) => &[u32::try_from(peers)?],
        (Effort::Full, None) => &[100, 1_000, 5_000],
        (Effort::Quick, None) => &[100, 1_000],
    };
    let mut measurements = Vec::new();
    for size in sizes {
        progress(&format!("    {size} members"));
        measurements.extend(changes::measure(*size)?);
    }
    measurements.extend(discovery::measure(options.effort)?);
    Ok(measurements)
}

/// A figure of ours, which is shown at once.
fn ours(metric: impl Into<String>, unit: &'static str, samples: Vec<f64>) -> Result<Measurement> {
    let measurement = Measurement::new(CASE, OURS, metric, unit, samples)?;
    progress(&format!("    {}: {:.3} {unit}", measurement.metric, measurement.value));
    Ok(measurement)
}
