//! Other programs that lead packets past the mesh.

use fairlead_dataplane::mesh::{Foreign, ForeignRule, GuardProblem};
use fairlead_netlink::route::{IpFamily, Route, Rule};
use prometheus_client::registry::Registry;

use super::*;
use crate::tell::metrics::MeshMetrics;

#[test]
fn rules_of_other_programs_and_what_the_guard_drops_are_problems_and_metrics() {
    let kernel = Shared::default();
    let since = SystemTime::UNIX_EPOCH;
    let rule = Rule::lookup(IpFamily::V4, 50, 52, 3);
    let route = Route::onto(52, 3, IpFamily::V4.everything(), 7);
    {
        let mut record = kernel.lock().unwrap();
        record.foreign = vec![Foreign::Routing(Box::new(ForeignRule { rule, route, since, at_least: 10 }))];
        record.guarded.packets = 12;
        record.guarded.problem = Some(GuardProblem { since, at_least: 10 });
    }
    let report = mesh(&kernel).reconcile(&three(), Instant::now()).unwrap();
    let told: Vec<String> = report.problems.iter().map(|it| format!("{}: {it}", it.reason())).collect();
    let [guarded, foreign] = &told[..] else { panic!("{told:#?}") };
    assert!(guarded.starts_with("PacketsOutsideMesh: "), "{guarded}");
    assert!(guarded.contains("at least 10 since 1970-01-01T00:00:00Z"), "{guarded}");
    assert!(foreign.starts_with("ForeignRoutingRule: "), "{foreign}");
    assert!(foreign.contains("IPv4 rule 50 to table 52"), "{foreign}");
    let mut all = Registry::default();
    MeshMetrics::register(&mut all).update("node-1", &report, false);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &all).unwrap();
    for line in [
        "fairlead_mesh_problems 2",
        "fairlead_mesh_guard_dropped_packets_total 12",
        "fairlead_mesh_foreign_rules{reason=\"ForeignRoutingRule\"} 1",
        "fairlead_mesh_foreign_rules{reason=\"ForeignPacketMark\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
    }
}
