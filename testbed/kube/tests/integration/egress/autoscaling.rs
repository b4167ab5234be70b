//! The autoscaler of `deploy/examples`, which docs/egress.md explains, in the hands of Kubernetes' own controller.

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::egress::bed::bed;

const EXAMPLE: &str = include_str!("../../../../../deploy/examples/egress-autoscaling.yaml");
const GUIDE: &str = include_str!("../../../../../docs/egress.md");

const NAMESPACE: &str = "internet-egress";
const EGRESS: [&str; 2] = ["egress", "nat"];
const AUTOSCALER: [&str; 2] = ["hpa", "nat"];

/// Applies the example while its Egress has one gateway, which is fewer than the example's least. The controller of autoscalers looks at a
/// new one after 15 s only, so [`the_example_has_scaled`] is for the end of a test.
pub(crate) fn apply_the_example() {
    the_metric_is_that_of_the_guide();
    let bed = bed();
    let [kind, name] = EGRESS;
    bed.plane.kubectl(&["scale", kind, name, "--namespace", NAMESPACE, "--replicas=1"]).unwrap();
    bed.plane.apply(EXAMPLE).unwrap();
}

/// The rule of the Prometheus adapter in docs/egress.md serves what the example asks for.
fn the_metric_is_that_of_the_guide() {
    let (_, section) = GUIDE.split_once("\n## Scale by traffic\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    assert!(section.contains("`deploy/examples/egress-autoscaling.yaml`"), "{section}");
    let between = |begin: &str, end: char| {
        let found = section.split_once(begin).and_then(|(_, rest)| rest.split_once(end));
        found.map(|(found, _)| found).unwrap_or_else(|| panic!("{begin} is not in {section}"))
    };
    let series = between("seriesQuery: '", '{');
    let (matches, suffix) = (between("matches: ", ','), between("as: \"${1}", '"'));
    assert_eq!(matches, "^(.*)_total$");
    let metric = format!("{}{suffix}", series.strip_suffix("_total").unwrap());
    assert!(EXAMPLE.contains(&format!("name: {metric}\n")), "{metric} is not in {EXAMPLE}");
}

/// The controller of autoscalers has read the subresource `scale` of the Egress, and has written the example's least there.
pub(crate) fn the_example_has_scaled() {
    let bed = bed();
    bed.until(NAMESPACE, &AUTOSCALER, |autoscaler| {
        let conditions = autoscaler["status"]["conditions"].as_array().context("no conditions yet")?;
        let able = conditions.iter().find(|it| it["type"] == "AbleToScale").context("no condition")?;
        ensure!(able["status"] == "True", "{able}");
        Ok(())
    });
    bed.until(NAMESPACE, &EGRESS, |egress| {
        ensure!(egress["spec"]["replicas"] == json!(2));
        Ok(())
    });
    bed.until(NAMESPACE, &["deployment", "nat"], |deployment| {
        ensure!(deployment["spec"]["replicas"] == json!(2));
        Ok(())
    });
    bed.delete(NAMESPACE, AUTOSCALER);
}
