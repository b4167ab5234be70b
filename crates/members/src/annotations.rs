//! Annotations of this node's Node object.

use std::net::{IpAddr, SocketAddr};

use fairlead_address::{Endpoint, canonical, without_nat64};
use fairlead_api::names::{
    ANNOTATION_ENDPOINT, ANNOTATION_INTERNAL_IP, ANNOTATION_KILO_FORCE_ENDPOINT,
    ANNOTATION_KILO_FORCE_INTERNAL_IP, ANNOTATION_KILO_KEEPALIVE, ANNOTATION_KILO_LEADER,
    ANNOTATION_KILO_LOCATION,
};
use fairlead_api::resources::{Granularity, InvalidAnnotation, NodeFilters, NodeLocation, Topology};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use super::cluster_addresses::UnusableAddress;
use super::{SourceProblem, nodes};

/// Most endpoints of a node beside the first.
const MAX_EXTRA: usize = 16;

/// The endpoint an administrator chose, the first where there are several. WireKube's annotation takes precedence over Kilo's, unless it cannot be read or names an
/// address that is `unusable`; both are added to `problems`.
pub fn manual_endpoint(
    node: &Node,
    unusable: impl Fn(IpAddr) -> Option<UnusableAddress>,
    problems: &mut Vec<SourceProblem>,
) -> Option<Endpoint> {
    let names = [ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT];
    let given = names.into_iter().filter_map(|name| Some((name, node.annotations().get(name)?.as_str())));
    // Only that of WireKube is a list.
    let first_of = |(name, text)| {
        (name, if name == ANNOTATION_ENDPOINT { entries(text).next().unwrap_or_default() } else { text })
    };
    let given = given.map(first_of).filter(|(_, text)| !text.is_empty());
    let mut readable = given.filter_map(|(annotation, text)| {
        endpoint(node, annotation, text, &unusable).map_err(|problem| problems.push(problem)).ok()
    });
    let first = readable.next();
    // Each is read, so that each mistake is known.
    readable.for_each(drop);
    first
}

/// The UDP port on which the node listens: that of the endpoint in Kilo's annotation, as with Kilo. An endpoint that counts for nothing, which
/// [`manual_endpoint`] says, does not change it, and neither does that of WireKube: its port is that of a router, which may lead to another.
pub fn listen_port(node: &Node, unusable: impl Fn(IpAddr) -> Option<UnusableAddress>) -> Option<u16> {
    let text = node.annotations().get(ANNOTATION_KILO_FORCE_ENDPOINT)?;
    let endpoint = endpoint(node, ANNOTATION_KILO_FORCE_ENDPOINT, text, unusable).ok()?;
    Some(endpoint.port())
}

fn endpoint(
    node: &Node,
    annotation: &'static str,
    text: &str,
    unusable: impl Fn(IpAddr) -> Option<UnusableAddress>,
) -> Result<Endpoint, SourceProblem> {
    let node = node.name_any();
    let value = text.to_owned();
    let Ok(endpoint) = text.parse().map(publishable) else {
        return Err(SourceProblem::InvalidEndpoint { node, annotation, value });
    };
    // Peers see the IPv4 address behind a NAT64.
    let address = endpoint.address().map(|address| without_nat64(&[], address).ip());
    match address.and_then(unusable) {
        Some(why) => Err(SourceProblem::UnusableEndpoint { node, annotation, value, why }),
        None => Ok(endpoint),
    }
}

/// Endpoints that the annotation of WireKube names beside the first, each once: addresses where peers reach the node as well, as KubeSpan's
/// `extraAnnouncedEndpoints`. Names are resolved by peers, which learn only one. What is left out is added to `problems`.
pub fn extra_endpoints(
    node: &Node,
    unusable: impl Fn(IpAddr) -> Option<UnusableAddress>,
    problems: &mut Vec<SourceProblem>,
) -> Vec<SocketAddr> {
    let text = node.annotations().get(ANNOTATION_ENDPOINT).map(String::as_str).unwrap_or_default();
    let mut extra = Vec::new();
    for entry in entries(text).skip(1).filter(|entry| !entry.is_empty()) {
        let annotation = ANNOTATION_ENDPOINT;
        let invalid = |why| SourceProblem::InvalidExtraEndpoint {
            node: node.name_any(),
            annotation,
            value: entry.to_owned(),
            why,
        };
        let address = match entry.parse::<Endpoint>().map(publishable) {
            Ok(Endpoint::Address(address)) => address,
            Ok(Endpoint::Name { .. }) => {
                problems.push(invalid("is a name: only the first endpoint may be one"));
                continue;
            }
            Err(_) => {
                problems.push(invalid("is no endpoint: write ADDRESS:PORT or [IPV6 ADDRESS]:PORT"));
                continue;
            }
        };
        if let Some(why) = unusable(without_nat64(&[], address).ip()) {
            let value = entry.to_owned();
            problems.push(SourceProblem::UnusableEndpoint { node: node.name_any(), annotation, value, why });
        } else if extra.len() >= MAX_EXTRA {
            problems.push(invalid("is one too many: a node publishes 16 beside the first"));
            break;
        } else if !extra.contains(&address) {
            extra.push(address);
        }
    }
    extra
}

fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim)
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

/// Filters in the annotations of this Node. What cannot be read is added to `problems`.
pub fn filters(node: &Node, problems: &mut Vec<SourceProblem>) -> NodeFilters {
    let (filters, invalid) = NodeFilters::of(node);
    let invalid = invalid.into_iter().map(|InvalidAnnotation { annotation, value, expected }| {
        SourceProblem::InvalidNodeFilter { node: node.name_any(), annotation, value, expected }
    });
    problems.extend(invalid);
    filters
}

/// The internal addresses of a Node, without what it excludes from the mesh.
pub fn own_addresses(node: &Node) -> Vec<IpAddr> {
    let (NodeFilters { excluded, .. }, _) = NodeFilters::of(node);
    let mut addresses = nodes::addresses(node, nodes::INTERNAL);
    addresses.retain(|address| !excluded.iter().any(|prefix| prefix.contains(address)));
    addresses
}

/// Annotations about the location of this node that have no effect: unreadable, or in a mesh without locations.
pub fn location_problems(node: &Node, topology: &Topology) -> Vec<SourceProblem> {
    let (_, invalid) = NodeLocation::of(node, topology);
    let invalid = invalid.into_iter().map(|InvalidAnnotation { annotation, value, expected }| {
        SourceProblem::InvalidLocation { node: node.name_any(), annotation, value, expected }
    });
    let (without_effect, granularity, wanted): (&[&str], _, _) = match topology.granularity {
        Granularity::Cross => (&[ANNOTATION_KILO_LEADER], "cross", "location"),
        Granularity::Full => {
            let all = &[
                ANNOTATION_INTERNAL_IP,
                ANNOTATION_KILO_FORCE_INTERNAL_IP,
                ANNOTATION_KILO_LEADER,
                ANNOTATION_KILO_LOCATION,
            ];
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
    use fairlead_api::names::ANNOTATION_KUBESPAN_EXCLUDED;
    use fairlead_topology::Member;
    use k8s_openapi::api::core::v1::{NodeAddress, NodeStatus};

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
        let unusable = |address| UnusableAddress::of::<Member>(address, &[], &services);
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
    fn a_node_listens_on_the_port_that_kilo_s_annotation_names() {
        let port = |annotations: &[(&str, &str)]| {
            let services = ["10.96.0.0/12".parse().unwrap()];
            let unusable = |address| UnusableAddress::of::<Member>(address, &[], &services);
            listen_port(&node(annotations), unusable)
        };
        let kilo = |text| (ANNOTATION_KILO_FORCE_ENDPOINT, text);
        for endpoint in ["home.example:51821", "192.0.2.1:51821", "[2001:db8::1]:51821"] {
            assert_eq!(port(&[kilo(endpoint)]), Some(51821), "{endpoint}");
        }
        // The port of the router may be another one.
        let both = [kilo("home.example:51821"), (ANNOTATION_ENDPOINT, "home.example:40000")];
        assert_eq!((port(&both), endpoint(&both).0.as_deref()), (Some(51821), Some("home.example:40000")));
        assert_eq!(port(&[(ANNOTATION_ENDPOINT, "home.example:40000")]), None);
        for bad in ["", "home.example", "home.example:0", "home.example:70000", "10.96.0.1:51821", "[::1]:7"]
        {
            assert_eq!(port(&[kilo(bad)]), None, "{bad}");
        }
    }

    /// Extra endpoints, and the reasons of problems.
    fn extra(text: &str) -> (Vec<String>, Vec<&'static str>) {
        let mut problems = Vec::new();
        let unusable =
            |address| UnusableAddress::of::<Member>(address, &[], &["10.96.0.0/12".parse().unwrap()]);
        let extra = extra_endpoints(&node(&[(ANNOTATION_ENDPOINT, text)]), unusable, &mut problems);
        (
            extra.iter().map(ToString::to_string).collect(),
            problems.iter().map(SourceProblem::reason).collect(),
        )
    }

    #[test]
    fn endpoints_beside_the_first_are_read_and_a_bad_one_is_left_out_with_a_reason() {
        let several = "node.example:7, 192.0.2.1:5,[2001:db8::1]:6, 192.0.2.1:5,";
        assert_eq!(endpoint(&[(ANNOTATION_ENDPOINT, several)]), (Some("node.example:7".to_owned()), vec![]));
        let both = ["192.0.2.1:5", "[2001:db8::1]:6"].map(str::to_owned).to_vec();
        assert_eq!(extra(several), (both.clone(), vec![]));
        // None of them is preferred.
        assert_eq!(endpoint(&[(ANNOTATION_ENDPOINT, ",192.0.2.1:5")]), (None, vec![]));
        assert_eq!(extra(",192.0.2.1:5,[2001:db8::1]:6").0, both);
        for (bad, reason) in [
            ("b.example:7", "InvalidExtraEndpoint"),
            ("192.0.2.9", "InvalidExtraEndpoint"),
            ("10.96.0.1:443", "UnusableEndpoint"),
            ("127.0.0.1:1", "UnusableEndpoint"),
        ] {
            let text = format!("a:1,192.0.2.1:5,{bad},[2001:db8::1]:6");
            assert_eq!(extra(&text), (both.clone(), vec![reason]), "{bad}");
        }
        let many = (0..40).map(|port| format!(",192.0.2.1:{}", 1000 + port)).collect::<String>();
        let (read, problems) = extra(&many);
        assert_eq!((read.len(), problems), (MAX_EXTRA, vec!["InvalidExtraEndpoint"]));
        assert_eq!(extra("a:1"), (vec![], vec![]));
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
        let topology = |granularity| Topology { granularity, ..Topology::default() };
        let reasons = |annotations: &[(&str, &str)], granularity| {
            let problems = location_problems(&node(annotations), &topology(granularity));
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
        let problem = location_problems(&node(&bad), &topology(Granularity::Cross)).remove(0).to_string();
        assert!(problem.contains("10.0.0.1") && problem.contains("ADDRESS/LENGTH"), "{problem}");
    }

    proptest::proptest! {
        #[test]
        fn hostile_annotations_of_endpoints_and_keepalives_never_panic(
            texts in proptest::collection::vec("[0-9a-z.:,\\[\\]%/ -]{0,60}|.{0,300}", 6),
        ) {
            let names = [ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT, ANNOTATION_KILO_KEEPALIVE];
            let names = names.into_iter().chain(NodeFilters::ANNOTATIONS.iter().copied());
            let given: Vec<(&str, &str)> = names.zip(texts.iter().map(String::as_str)).collect();
            let (node, mut problems) = (node(&given), Vec::new());
            manual_endpoint(&node, |_| None, &mut problems);
            proptest::prop_assert_ne!(listen_port(&node, |_| None), Some(0));
            filters(&node, &mut problems);
            let extra = extra_endpoints(&node, |_| None, &mut problems);
            proptest::prop_assert!(extra.len() <= MAX_EXTRA);
            keepalive(&node, &mut problems);
            proptest::prop_assert!(problems.iter().all(|problem| problem.to_string().len() < 10_000));
        }
    }

    #[test]
    fn a_node_has_no_address_in_the_mesh_that_it_excludes() {
        let of = |text: &str| {
            let mut node = node(&[(ANNOTATION_KUBESPAN_EXCLUDED, text)]);
            let address =
                |address: &str| NodeAddress { address: address.to_owned(), type_: "InternalIP".to_owned() };
            let addresses = ["10.0.0.7", "192.168.1.7", "fd00::7"].map(address).to_vec();
            node.status = Some(NodeStatus { addresses: Some(addresses), ..NodeStatus::default() });
            let mut problems = Vec::new();
            filters(&node, &mut problems);
            let addresses = own_addresses(&node).iter().map(ToString::to_string).collect::<Vec<_>>();
            (addresses.join(" "), problems)
        };
        assert_eq!(of(""), ("10.0.0.7 192.168.1.7 fd00::7".to_owned(), vec![]));
        assert_eq!(of("192.168.0.0/16,fd00::/8"), ("10.0.0.7".to_owned(), vec![]));
        assert_eq!(of("0.0.0.0/0,::/0").0, "");
        let (addresses, problems) = of("192.168.1.7/33,10.0.0.7/32");
        let [problem] = &problems[..] else { panic!("{problems:?}") };
        assert_eq!((addresses.as_str(), problem.reason()), ("192.168.1.7 fd00::7", "InvalidNodeFilter"));
        let sentence = problem.to_string();
        assert!(sentence.contains("\"192.168.1.7/33\"") && sentence.contains("ADDRESS/LENGTH"), "{sentence}");
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
