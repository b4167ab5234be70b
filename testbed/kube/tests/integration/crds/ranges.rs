//! Ranges that something else uses are compared at apply, with ServiceCIDRs as the API server has them: 10.96.0.0/16 and fd00:10:96::/112.

use crate::crds::bed::{bed, is_refused_soon, mesh, pool, refused};

fn create_dry(yaml: &str) -> Result<String, String> {
    let arguments = ["create", "--dry-run=server", "-f", "-"];
    bed().plane.kubectl_stdin(&arguments, yaml).map_err(|error| format!("{error:#}"))
}

fn named(name: &str, object: &str) -> String {
    object.replace("name: bad", &format!("name: {name}"))
}

fn four(subnet: &str) -> String {
    named("among-services", &pool(&format!("{{subnets: [{{ipv4: {subnet}}}]}}")))
}

#[test]
fn a_new_subnet_in_a_range_of_services_is_refused_and_one_that_is_there_is_not() {
    let bed = bed();
    // Before the policy was in force; here by a binding that is not.
    let binding = "validatingadmissionpolicybinding/fairlead-pools-are-not-of-services";
    let words = "subnet 10.96.8.0/24 of pool among-services shares addresses with 10.96.0.0/16 of ServiceCIDR kubernetes";
    is_refused_soon(words, || create_dry(&four("10.96.8.0/24")));
    refused(create_dry(&four("10.96.0.0/12")), "subnet 10.96.0.0/12 of pool among-services shares addresses");
    let six = named("among-services", &pool("{subnets: [{ipv6: 'fd00:10:96::8000/120'}]}"));
    refused(create_dry(&six), "shares addresses with fd00:10:96::/112 of ServiceCIDR kubernetes");
    create_dry(&four("10.97.0.0/16")).unwrap();

    let action = |action: &str| {
        let patch = format!(r#"{{"spec": {{"validationActions": ["{action}"]}}}}"#);
        bed.plane.kubectl(&["patch", binding, "--type=merge", "-p", &patch]).unwrap();
    };
    action("Audit");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while let Err(error) = bed.plane.apply(&four("10.96.8.0/24")) {
        assert!(std::time::Instant::now() < end, "{error:#}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    action("Deny");
    is_refused_soon("shares addresses", || create_dry(&four("10.96.9.0/24").replace("among", "more")));
    // What is there can be disabled, and grow elsewhere, but not into another part of the range.
    let patch = |patch: &str| {
        let arguments = ["patch", "addresspool", "among-services", "--type=merge", "-p", patch];
        bed.plane.kubectl(&arguments).map_err(|error| format!("{error:#}"))
    };
    patch(r#"{"spec": {"disabled": true}}"#).unwrap();
    patch(r#"{"spec": {"subnets": [{"ipv4": "10.96.8.0/24"}, {"ipv4": "10.99.0.0/24"}]}}"#).unwrap();
    let grown = r#"{"spec": {"subnets": [{"ipv4": "10.96.8.0/24"}, {"ipv4": "10.99.0.0/24"}, {"ipv4": "10.96.9.0/24"}]}}"#;
    refused(patch(grown), "subnet 10.96.9.0/24 of pool among-services shares addresses");
    bed.plane.kubectl(&["delete", "addresspool", "among-services"]).unwrap();
}

#[test]
fn neither_addresses_of_the_mesh_nor_granted_prefixes_are_of_services() {
    let of = |spec: &str| named("among-services", &mesh(spec));
    let words = "spec.meshCIDR 10.96.0.0/24 of WireKubeMesh among-services shares addresses with ServiceCIDR kubernetes (10.96.0.0/16, fd00:10:96::/112)";
    is_refused_soon(words, || create_dry(&of("{meshCIDR: 10.96.0.0/24}")));
    refused(create_dry(&of("{meshCIDR: 10.0.0.0/8}")), "spec.meshCIDR 10.0.0.0/8");
    create_dry(&of("{meshCIDR: 100.64.0.0/16}")).unwrap();
    let granted = |net: &str| of(&format!("{{grants: [{{node: a, cidrs: [192.0.2.0/24, '{net}']}}]}}"));
    for net in ["10.96.7.0/24", "10.96.0.0/16", "fd00:10:96::7/128"] {
        let words = format!(
            "spec.grants of WireKubeMesh among-services has {net}, which lies in ServiceCIDR kubernetes"
        );
        refused(create_dry(&granted(net)), &words);
    }
    // Nodes leave out what is of Services.
    for net in ["10.0.0.0/8", "0.0.0.0/0", "10.97.0.0/16"] {
        create_dry(&granted(net)).unwrap();
    }
}

#[test]
fn a_new_range_of_services_over_a_pool_is_made_with_a_warning() {
    let bed = bed();
    bed.plane.apply(&named("under-services", &pool("{subnets: [{ipv4: 10.219.0.0/16}]}"))).unwrap();
    let range = |net: &str| {
        let object = format!(
            "{{apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {{name: more}}, spec: {{cidrs: [{net}]}}}}"
        );
        // Warnings are errors here, so that they can be seen.
        let arguments = ["create", "--dry-run=server", "--warnings-as-errors", "-f", "-"];
        bed.plane.kubectl_stdin(&arguments, &object).map_err(|error| format!("{error:#}"))
    };
    let words =
        "ServiceCIDR more (10.219.7.0/24) shares addresses with 10.219.0.0/16 of AddressPool under-services";
    is_refused_soon(words, || range("10.219.7.0/24"));
    range("10.220.0.0/24").unwrap();
    bed.plane.kubectl(&["delete", "addresspool", "under-services"]).unwrap();
}
