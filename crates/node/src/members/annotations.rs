//! Annotations of this node's Node object.

use std::net::IpAddr;

use fairlead_address::{Endpoint, canonical, without_nat64};
use fairlead_api::names::{
    ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT, ANNOTATION_KILO_FORCE_INTERNAL_IP,
    ANNOTATION_KILO_KEEPALIVE, ANNOTATION_KILO_LEADER, ANNOTATION_KILO_LOCATION,
};
use fairlead_api::resources::{Granularity, InvalidAnnotation, NodeLocation};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use super::SourceProblem;
use super::cluster_addresses::UnusableAddress;

/// The endpoint an administrator chose. WireKube's annotation takes precedence over Kilo's, unless it cannot be read or names an
/// address that is `unusable`; both are added to `problems`.
pub fn manual_endpoint(
    node: &Node,
    unusable: impl Fn(IpAddr) -> Option<UnusableAddress>,
    problems: &mut Vec<SourceProblem>,
) -> Option<Endpoint> {
    let names = [ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT];
    let given = names.into_iter().filter_map(|name| Some((name, node.annotations().get(name)?)));
    let mut readable = given.filter(|(_, text)| !text.is_empty()).filter_map(|(annotation, text)| {
        let (node, value) = (node.name_any(), text.clone());
        let Ok(endpoint) = text.parse().map(publishable) else {
            problems.push(SourceProblem::InvalidEndpoint { node, annotation, value });
            return None;
        };
        // Peers see the IPv4 address behind a NAT64.
        let address = endpoint.address().map(|address| without_nat64(&[], address).ip());
        if let Some(why) = address.and_then(&unusable) {
            problems.push(SourceProblem::UnusableEndpoint { node, annotation, value, why });
            return None;
        }
        Some(endpoint)
    });
    let first = readable.next();
    // Each is read, so that each mistake is known.
    readable.for_each(drop);
    first
}

/// The one spelling of an endpoint that the API server's validation takes.
fn publishable(endpoint: Endpoint) -> Endpoint {
    match endpoint {
        Endpoint::Address(address) => Endpoint::Address(canonical(address)),
        Endpoint::Name { host, port } => Endpoint::Name { host: host.trim_end_matches('.').to_owned(), port },
    }
}

/// Seconds between keepalives to every peer; zero sends none. What cannot be read is added to `problems`.
pub fn keepalive(node: &Node, problems: &mut Vec<SourceProblem>) -> Option<u16> {
    let text = node.annotations().get(ANNOTATION_KILO_KEEPALIVE)?;
    let problem = || SourceProblem::InvalidKeepalive {
        node: node.name_any(),
        annotation: ANNOTATION_KILO_KEEPALIVE,
        value: text.clone(),
    };
    text.parse().map_err(|_| problems.push(problem())).ok()
}

/// Annotations about the location of this node that have no effect: unreadable, or in a mesh without locations.
pub fn location_problems(node: &Node, granularity: Granularity) -> Vec<SourceProblem> {
    let (_, invalid) = NodeLocation::of(node);
    let invalid = invalid.into_iter().map(|InvalidAnnotation { annotation, value, expected }| {
        SourceProblem::InvalidLocation { node: node.name_any(), annotation, value, expected }
    });
    let (without_effect, granularity, wanted): (&[&str], _, _) = match granularity {
        Granularity::Cross => (&[ANNOTATION_KILO_LEADER], "cross", "location"),
        Granularity::Full => {
            let all = &[ANNOTATION_KILO_FORCE_INTERNAL_IP, ANNOTATION_KILO_LEADER, ANNOTATION_KILO_LOCATION];
            (all, "full", "cross or location")
        }
        Granularity::Location => (&[], "", ""),
    };
    let given = without_effect.iter().filter(|name| node.annotations().contains_key(**name));
    let given: Vec<&str> = given.copied().collect();
    let without_effect = (!given.is_empty()).then(|| SourceProblem::LocationWithoutEffect {
        node: node.name_any(),
        annotations: given.join(", "),
        granularity,
        wanted,
    });
    invalid.chain(without_effect).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(annotations: &[(&str, &str)]) -> Node {
        let mut node = Node::default();
        node.annotations_mut().extend(annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        node
    }

    /// The endpoint as it is published, and the reasons of problems.
    fn endpoint(annotations: &[(&str, &str)]) -> (Option<String>, Vec<&'static str>) {
        let mut problems = Vec::new();
        let services = ["10.96.0.0/12", "fd96::/112"].map(|range| range.parse().unwrap());
        let unusable = |address| UnusableAddress::of(address, &[], &services);
        let endpoint = manual_endpoint(&node(annotations), unusable, &mut problems);
        (endpoint.map(|it| it.to_string()), problems.iter().map(SourceProblem::reason).collect())
    }

    #[test]
    fn the_endpoint_of_wirekube_takes_precedence_over_that_of_kilo() {
        let kilo = (ANNOTATION_KILO_FORCE_ENDPOINT, "kilo:1");
        let wirekube = |text| (ANNOTATION_ENDPOINT, text);
        assert_eq!(endpoint(&[kilo]), (Some("kilo:1".to_owned()), vec![]));
        assert_eq!(endpoint(&[kilo, wirekube("wirekube:1")]), (Some("wirekube:1".to_owned()), vec![]));
        assert_eq!(endpoint(&[wirekube("")]), (None, vec![]));
    }

    #[test]
    fn a_bad_endpoint_is_left_out_with_a_reason() {
        let kilo = |text| (ANNOTATION_KILO_FORCE_ENDPOINT, text);
        for bad in ["192.0.2.1", "node.example", "[::1]:+5", "a b:1", "192.0.2.1:0", "http://a:1"] {
            assert_eq!(endpoint(&[(ANNOTATION_ENDPOINT, bad)]), (None, vec!["InvalidEndpoint"]), "{bad}");
            let other = endpoint(&[(ANNOTATION_ENDPOINT, bad), kilo("kilo:1")]);
            assert_eq!(other, (Some("kilo:1".to_owned()), vec!["InvalidEndpoint"]), "{bad}");
            let both = endpoint(&[(ANNOTATION_ENDPOINT, "a:1"), kilo(bad)]);
            assert_eq!(both, (Some("a:1".to_owned()), vec!["InvalidEndpoint"]), "{bad}");
        }
    }

    #[test]
    fn an_address_where_no_peer_reaches_the_node_is_left_out_with_a_reason() {
        let bad =
            ["10.96.0.1:443", "[fd96::1]:51820", "[64:ff9b::a60:1]:443", "[fe80::1%3]:5", "127.0.0.1:51820"];
        for bad in bad {
            let other = endpoint(&[(ANNOTATION_ENDPOINT, bad), (ANNOTATION_KILO_FORCE_ENDPOINT, "kilo:1")]);
            assert_eq!(other, (Some("kilo:1".to_owned()), vec!["UnusableEndpoint"]), "{bad}");
        }
    }

    /// `rules::host_and_port` refuses these spellings, and with them the whole object.
    #[test]
    fn an_endpoint_is_published_in_the_spelling_that_the_api_server_takes() {
        for (given, published) in [
            ("node.example.:1", "node.example:1"),
            ("[::ffff:192.0.2.1]:5", "192.0.2.1:5"),
            ("192.0.2.1:00005", "192.0.2.1:5"),
        ] {
            assert_eq!(endpoint(&[(ANNOTATION_ENDPOINT, given)]), (Some(published.to_owned()), vec![]));
        }
    }

    #[test]
    fn annotations_about_locations_that_have_no_effect_are_problems() {
        let reasons = |annotations: &[(&str, &str)], granularity| {
            let problems = location_problems(&node(annotations), granularity);
            problems.iter().map(SourceProblem::reason).collect::<Vec<_>>()
        };
        let lab = [(ANNOTATION_KILO_LOCATION, "lab")];
        assert_eq!(reasons(&lab, Granularity::Cross), Vec::<&str>::new());
        assert_eq!(reasons(&lab, Granularity::Full), ["LocationWithoutEffect"]);
        assert_eq!(reasons(&[], Granularity::Full), Vec::<&str>::new());
        let leader = [(ANNOTATION_KILO_LEADER, "")];
        for granularity in [Granularity::Cross, Granularity::Full] {
            assert_eq!(reasons(&leader, granularity), ["LocationWithoutEffect"]);
        }
        assert_eq!(reasons(&leader, Granularity::Location), Vec::<&str>::new());
        let bad = [(ANNOTATION_KILO_FORCE_INTERNAL_IP, "10.0.0.1")];
        assert_eq!(reasons(&bad, Granularity::Cross), ["InvalidLocation"]);
        let problem = location_problems(&node(&bad), Granularity::Cross).remove(0).to_string();
        assert!(problem.contains("10.0.0.1") && problem.contains("ADDRESS/LENGTH"), "{problem}");
    }

    #[test]
    fn a_keepalive_that_is_no_number_is_a_problem() {
        let read = |text| {
            let mut problems = Vec::new();
            let seconds = keepalive(&node(&[(ANNOTATION_KILO_KEEPALIVE, text)]), &mut problems);
            (seconds, problems.pop())
        };
        assert_eq!((read("7"), read("0")), ((Some(7), None), (Some(0), None)));
        let (seconds, problem) = read("often");
        let problem = problem.unwrap();
        assert_eq!((seconds, problem.reason()), (None, "InvalidKeepalive"));
        assert!(problem.to_string().contains("\"often\""), "{problem}");
        assert_eq!(keepalive(&node(&[]), &mut Vec::new()), None);
    }
}
