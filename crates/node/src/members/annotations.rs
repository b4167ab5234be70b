//! Annotations of this node's Node object.

use fairlead_api::names::{ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT, ANNOTATION_KILO_KEEPALIVE};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use super::SourceProblem;

/// The endpoint an administrator chose. WireKube's annotation takes precedence over Kilo's.
pub fn manual_endpoint(node: &Node) -> Option<&str> {
    [ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT]
        .iter()
        .find_map(|name| node.annotations().get(*name))
        .map(String::as_str)
        .filter(|endpoint| !endpoint.is_empty())
}

/// Seconds between keepalives to every peer.
///
/// # Errors
/// The annotation is no such number.
pub fn keepalive(node: &Node) -> Result<Option<u16>, SourceProblem> {
    let Some(text) = node.annotations().get(ANNOTATION_KILO_KEEPALIVE) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| SourceProblem::InvalidKeepalive {
        node: node.name_any(),
        annotation: ANNOTATION_KILO_KEEPALIVE,
        value: text.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(annotations: &[(&str, &str)]) -> Node {
        let mut node = Node::default();
        node.annotations_mut().extend(annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        node
    }

    #[test]
    fn the_endpoint_of_wirekube_takes_precedence_over_that_of_kilo() {
        let kilo = (ANNOTATION_KILO_FORCE_ENDPOINT, "kilo:1");
        assert_eq!(manual_endpoint(&node(&[kilo])), Some("kilo:1"));
        assert_eq!(manual_endpoint(&node(&[kilo, (ANNOTATION_ENDPOINT, "wirekube:1")])), Some("wirekube:1"));
        assert_eq!(manual_endpoint(&node(&[(ANNOTATION_ENDPOINT, "")])), None);
    }

    #[test]
    fn a_keepalive_that_is_no_number_is_a_problem() {
        assert_eq!(keepalive(&node(&[])), Ok(None));
        assert_eq!(keepalive(&node(&[(ANNOTATION_KILO_KEEPALIVE, "7")])), Ok(Some(7)));
        let problem = keepalive(&node(&[(ANNOTATION_KILO_KEEPALIVE, "often")])).unwrap_err();
        assert_eq!(problem.reason(), "InvalidKeepalive");
        assert!(problem.to_string().contains("\"often\""), "{problem}");
    }
}
