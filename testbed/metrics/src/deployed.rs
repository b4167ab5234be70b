//! The dashboard and the alerts of `deploy/`.

use anyhow::Result;

use crate::Exposed;
use crate::query::{self, Query};

/// Beginnings of the names of metrics that only the controller has.
const CONTROLLER_PREFIXES: &[&str] =
    &["coil_controller_", "controller_runtime_", "fairlead_controller_", "workqueue_"];

/// Beginnings of the names of metrics that only gateways of Egresses have.
const GATEWAY_PREFIXES: &[&str] = &["coil_egress_"];

/// A program that exposes metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Exposes what is only its own.
    Controller,
    /// A gateway of an Egress: exposes what is only its own.
    Gateway,
    /// Exposes everything else.
    Node,
}

impl Program {
    fn has(self, metric: &str) -> bool {
        let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| metric.starts_with(prefix));
        match self {
            Self::Controller => begins(CONTROLLER_PREFIXES),
            Self::Gateway => begins(GATEWAY_PREFIXES),
            // Prometheus itself records `up`.
            Self::Node => !begins(CONTROLLER_PREFIXES) && !begins(GATEWAY_PREFIXES) && metric != "up",
        }
    }

    /// Metrics and labels of this program that the dashboard and the alerts use, and `exposed` lacks.
    ///
    /// # Errors
    /// The dashboard is no JSON.
    pub fn unknown(self, exposed: &Exposed) -> Result<Vec<String>> {
        let queries = deployed_queries()?;
        Ok(queries.iter().flat_map(|query| query.unknown(exposed, |metric| self.has(metric))).collect())
    }
}

/// All queries of the dashboard and the alerts.
///
/// # Errors
/// The dashboard is no JSON.
pub fn deployed_queries() -> Result<Vec<Query>> {
    let mut queries = query::of_dashboard(include_str!("../../../deploy/grafana/fairlead.json"))?;
    queries.extend(query::of_rules(include_str!("../../../deploy/components/monitoring/alerts.yaml")));
    Ok(queries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dashboard_and_the_alerts_have_queries_of_all_programs() {
        assert!(deployed_queries().unwrap().len() > 30);
        let nothing = Exposed::default();
        for (program, metric) in [
            (Program::Controller, "coil_controller_max_blocks"),
            (Program::Gateway, "coil_egress_unhealthy"),
            (Program::Node, "fairlead_peers"),
        ] {
            let unknown = program.unknown(&nothing).unwrap();
            assert!(unknown.iter().any(|it| it.starts_with(&format!("metric {metric} "))), "{unknown:#?}");
        }
    }
}
