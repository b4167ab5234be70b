//! Prometheus metrics of the node program. Each subsystem declares its own; names and units follow the Prometheus
//! conventions, counters end in `_total`.

use fairlead_cluster::events::EventMetrics;
use fairlead_cluster::metrics::{self, Exposition};
use fairlead_cluster::process;
use fairlead_cluster::requests::RequestMetrics;
use fairlead_mesh::tell::metrics::MeshMetrics;
use fairlead_pods::cni::metrics::CniMetrics;
use fairlead_pods::ipam::metrics::IpamMetrics;
use fairlead_pods::pod_network::metrics::PodNetworkMetrics;
use prometheus_client::registry::Registry;

use crate::routes::metrics::RouterMetrics;

/// All metrics of the program.
pub struct Metrics {
    registry: Registry,
    /// Requests to the API server.
    pub requests: RequestMetrics,
    /// CNI operations.
    pub cni: CniMetrics,
    /// Kubernetes Events.
    pub events: EventMetrics,
    /// Egress gateways of pods.
    pub egress: fairlead_egress_client::Metrics,
    /// Addresses and blocks.
    pub ipam: IpamMetrics,
    /// The mesh.
    pub mesh: MeshMetrics,
    /// The network of the pods.
    pub pod_network: PodNetworkMetrics,
    /// The built-in router.
    pub router: RouterMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        process::register_process(&mut registry);
        let ours = registry.sub_registry_with_prefix("fairlead");
        Self {
            requests: RequestMetrics::register(ours),
            events: EventMetrics::register(ours),
            cni: CniMetrics::register(&mut registry),
            egress: fairlead_egress_client::Metrics::register(&mut registry),
            ipam: IpamMetrics::register(&mut registry),
            mesh: MeshMetrics::register(&mut registry),
            pod_network: PodNetworkMetrics::register(&mut registry),
            router: RouterMetrics::register(&mut registry),
            registry,
        }
    }
}

impl Metrics {
    /// The text of a scrape.
    pub fn text(&self, exposition: Exposition) -> String {
        metrics::text(&self.registry, exposition)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use std::time::Duration;

    use fairlead_cluster::requests::Kind;
    use fairlead_ipam::BlockUsage;
    use fairlead_members::provenance::{DiscoveryStatus, ServiceStatus};
    use fairlead_path::NatType;
    use fairlead_pods::cni::Reason;
    use fairlead_pods::cni::metrics::Operation;
    use fairlead_pods::pod_network::metrics::Object;
    use testbed_metrics::{Exposed, Program, reference};

    use super::*;
    use crate::status::tests::{peer, report};

    fn filled() -> Metrics {
        let metrics = Metrics::default();
        let usage = |block: &str, used| BlockUsage {
            block: block.to_owned(),
            pool: "default".to_owned(),
            used,
            capacity: 32,
            open: true,
        };
        metrics.ipam.blocks(&[usage("default-0", 32), usage("default-1", 3)]);
        metrics.ipam.block_wait(Duration::from_millis(3));
        metrics.ipam.block_released(true);
        metrics.ipam.leaked_address_freed();
        metrics.requests.count(Kind { resource: "namespaces".to_owned(), verb: "get" }, Some(200));
        metrics.cni.served(Operation::Add, Duration::from_millis(7), None);
        metrics.cni.served(Operation::Del, Duration::from_millis(2), Some(Reason::DataPlaneFailed));
        metrics.cni.served(Operation::Check, Duration::from_millis(2), None);
        metrics.cni.grpc_call(Operation::Add).answered(tonic::Code::Ok);
        metrics.cni.grpc_call(Operation::Check).answered(tonic::Code::Cancelled);
        metrics.pod_network.corrected(Object::Rule);
        metrics
    }

    /// OpenMetrics 1.0: every family declares its type and help before its samples, counters end in `_total`, no sample
    /// occurs twice, and the text ends with `# EOF`.
    #[test]
    fn a_scrape_follows_open_metrics() {
        let text = filled().text(Exposition::OpenMetrics);
        let (mut types, mut helped, mut samples) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let body = text.strip_suffix("# EOF\n").expect("the end is marked");
        for line in body.lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "TYPE", family, kind] => {
                    assert_eq!(types.insert(family.to_owned(), kind.to_owned()), None)
                }
                ["#", "HELP", family, _] => assert!(helped.insert(family.to_owned()), "{line}"),
                ["#", "UNIT", family, unit] => assert!(family.ends_with(unit), "{line}"),
                _ => {
                    let (series, value) = line.rsplit_once(' ').expect("a value");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    assert!(samples.insert(series.to_owned()), "twice: {line}");
                    let name = series.split('{').next().unwrap();
                    assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{line}");
                    let (family, kind) =
                        types.iter().filter(|(family, _)| name.starts_with(*family)).max().expect("a family");
                    let ending = &name[family.len()..];
                    let endings: &[&str] = match kind.as_str() {
                        "counter" => &["_total"],
                        "gauge" => &[""],
                        _ => &["_bucket", "_count", "_sum"],
                    };
                    assert!(endings.contains(&ending), "{kind}: {line}");
                    assert!(helped.contains(family), "{line}");
                }
            }
        }
        assert!(samples.len() > 30, "{text}");
    }

    #[test]
    fn blocks_of_a_pool_are_added_up_and_released_ones_disappear() {
        let metrics = filled();
        let text = metrics.text(Exposition::Text);
        for line in [
            "fairlead_ipam_addresses_used{pool=\"default\"} 35",
            "fairlead_ipam_addresses{pool=\"default\"} 64",
            "fairlead_ipam_blocks{pool=\"default\"} 2",
            "fairlead_ipam_leaked_addresses_freed_total 1",
            "grpc_server_handled_total{grpc_type=\"unary\",grpc_service=\"pkg.cnirpc.CNI\",grpc_method=\"Add\",grpc_code=\"OK\"} 1",
            "grpc_server_handled_total{grpc_type=\"unary\",grpc_service=\"pkg.cnirpc.CNI\",grpc_method=\"Check\",grpc_code=\"Canceled\"} 1",
            "fairlead_ipam_blocks_released_total{result=\"ok\"} 1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        metrics.ipam.blocks(&[]);
        assert!(!metrics.text(Exposition::Text).contains("pool="));
    }

    fn exposed() -> Exposed {
        let metrics = filled();
        metrics.mesh.update("n", &report(NatType::Cone, vec![peer()]), true);
        metrics.mesh.failed();
        let service = ServiceStatus {
            server: "https://a:443".to_owned(),
            is_connected: true,
            is_published: true,
            members: 1,
            error: String::new(),
        };
        metrics
            .mesh
            .update_discovery(&DiscoveryStatus { services: vec![service], ..DiscoveryStatus::default() });
        metrics.router.synced("n", 1);
        Exposed::parse(&metrics.text(Exposition::Text))
    }

    #[test]
    fn the_dashboard_and_the_alerts_query_existing_metrics_and_labels() {
        let unknown = Program::Node.unknown(&exposed()).unwrap();
        assert!(unknown.is_empty(), "{unknown:#?}");
    }

    #[test]
    fn the_reference_of_metrics_is_current() {
        reference::check("node", &exposed()).unwrap();
    }
}
