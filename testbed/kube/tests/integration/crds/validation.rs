//! Objects that cannot work are refused, with a reason.

use crate::crds::bed::{KEY, bed, block, checkout, egress, kilo_peer, mesh, pool, request, wirekube_peer};

#[test]
fn bad_objects_are_refused_with_a_reason() {
    let bed = bed();
    let kilo =
        |fields: &str| kilo_peer(&format!("{{publicKey: {KEY}, allowedIPs: [10.0.0.1/32], {fields}}}"));
    let table = [
        (pool("{subnets: []}"), "should have at least 1 items"),
        (pool("{subnets: [{}]}"), "a subnet needs ipv4, ipv6 or both"),
        (pool("{subnets: [{ipv4: 10.2.0.0}]}"), "'10.2.0.0' is not an IPv4 prefix"),
        (pool("{subnets: [{ipv4: 10.2.0.0/33}]}"), "'10.2.0.0/33' is not an IPv4 prefix"),
        (pool("{subnets: [{ipv4: 'fd00::/112'}]}"), "'fd00::/112' is not an IPv4 prefix"),
        (pool("{subnets: [{ipv6: 10.2.0.0/16}]}"), "'10.2.0.0/16' is not an IPv6 prefix"),
        (pool("{subnets: [{ipv4: 10.2.0.0/28}]}"), "too narrow subnet: 10.2.0.0/28"),
        (pool("{blockSizeBits: 9, subnets: [{ipv6: 'fd00::/120'}]}"), "too narrow subnet: fd00::/120"),
        (pool("{subnets: [{ipv4: 10.2.0.0/16, ipv6: 'fd00::/64'}]}"), "must have the same size: 10.2.0.0/16 and fd00::/64"),
        (pool("{subnets: [{ipv4: 10.2.0.0/16}, {ipv6: 'fd00::/112'}]}"), "must have the same address families"),
        (pool("{subnets: [{ipv4: 10.2.0.0/16}, {ipv4: 10.3.0.0/16}, {ipv4: 10.3.7.0/24}]}"), "subnet 10.3.0.0/16 overlaps"),
        (pool("{subnets: [{ipv6: 'fd00::/112'}, {ipv6: 'fd00::/112'}]}"), "subnet fd00::/112 overlaps"),
        (pool("{blockSizeBits: -1, subnets: [{ipv4: 10.2.0.0/16}]}"), "greater than or equal to 0"),
        (pool("{subnets: [{ipv4: 10.2.0.0/16}]}").replace("bad", &"x".repeat(64)), "at most 63 characters"),
        (block("index: 1"), "a block needs ipv4, ipv6 or both"),
        (block("ipv4: 10.2.0.0/27"), "index: Required value"),
        (block("index: -1, ipv4: 10.2.0.0/27"), "greater than or equal to 0"),
        (block("index: 1, ipv4: ten"), "'ten' is not an IPv4 prefix"),
        ("{apiVersion: coil.cybozu.com/v2, kind: BlockRequest, metadata: {name: bad}, spec: {nodeName: n1}}".to_owned(), "poolName: Required value"),
        (request("bad", "n1").replace("poolName: default", "poolName: 'default?'"), "spec.poolName"),
        (request("bad", "n1").replace("poolName: default", "poolName: default/status"), "spec.poolName"),
        (request("bad", "../n1"), "spec.nodeName"),
        (request("bad", "n1").replace("default}", "default, inUse: {index: 1, ipv4: ten}}"), "'ten' is not an IPv4 prefix"),
        (egress("{destinations: []}"), "should have at least 1 items"),
        (egress("{destinations: [0.0.0.0/0, 192.0.2.1]}"), "'192.0.2.1' is not a prefix"),
        (egress("{destinations: [0.0.0.0/0], excludedDestinations: [192.0.2.1]}"), "'192.0.2.1' is not a prefix"),
        (egress("{destinations: [0.0.0.0/0], replicas: 0}"), "greater than or equal to 1"),
        (egress("{destinations: [0.0.0.0/0], strategy: {type: BigBang}}"), "must be Recreate or RollingUpdate"),
        (egress("{destinations: [0.0.0.0/0], sessionAffinity: Sticky}"), "supported values: \"ClientIP\", \"None\""),
        (egress("{destinations: [0.0.0.0/0], podDisruptionBudget: {minAvailable: 1, maxUnavailable: 1}}"), "cannot both be set"),
        (egress("{destinations: [0.0.0.0/0], podDisruptionBudget: {minAvailable: 101%}}"), "percentage from 0% to 100%"),
        (egress("{destinations: [0.0.0.0/0], podDisruptionBudget: {maxUnavailable: -1}}"), "not negative"),
        (egress("{destinations: [0.0.0.0/0], template: {metadata: {labels: {a: 'b c'}}}}"), "template.metadata.labels.a"),
        (egress("{destinations: [0.0.0.0/0], template: {spec: {hostNetwork: sure}}}"), "spec.template.spec.hostNetwork"),
        (egress("{destinations: [0.0.0.0/0], sourceAddresses: [192.0.2.1/32]}"), "'192.0.2.1/32' is not an IP address"),
        (egress("{destinations: [0.0.0.0/0], sourceAddresses: ['2001:db8::1', '2001:db8:0::1']}"), "is there twice"),
        (egress("{destinations: [0.0.0.0/0], sourceAddresses: [192.0.2.1, 192.0.2.2, '2001:db8::1']}"), "as many IPv6 as IPv4"),
        (egress("{destinations: [0.0.0.0/0], healthCheck: {targets: [192.0.2.1, 'example.com:443']}}"), "'example.com:443' is neither"),
        (egress("{destinations: [0.0.0.0/0], healthCheck: {targets: ['192.0.2.1:65536']}}"), "'192.0.2.1:65536' is neither"),
        (egress("{destinations: [0.0.0.0/0], healthCheck: {targets: ['[192.0.2.1]:80']}}"), "is neither"),
        (egress("{destinations: [0.0.0.0/0], healthCheck: {targets: []}}"), "should have at least 1 items"),
        (egress("{destinations: [0.0.0.0/0], maxConnectionsPerClient: 0}"), "greater than or equal to 1"),
        (egress("{destinations: [0.0.0.0/0], selectors: [{}]}"), "namespaceSelector or podSelector must be given"),
        (mesh("{listenPort: 80}"), "greater than or equal to 1024"),
        (mesh("{listenPort: 65536}"), "less than or equal to 65535"),
        (mesh("{interfaceName: a/b}"), "'a/b' cannot be the name of a network device"),
        (mesh("{revokedPeers: [{}]}"), "name or publicKey is required"),
        (mesh("{revokedPeers: [{publicKey: x}]}"), "must be a WireGuard key"),
        (mesh("{mtu: 100}"), "greater than or equal to 576"),
        (mesh("{stunServers: [stun.example.com:3478]}"), "should have at least 2 items"),
        (mesh("{stunServers: [stun.example.com:3478, 'http://x']}"), "STUN server http://x is not host:port"),
        (mesh("{apiServerURL: 10.0.0.1}"), "'10.0.0.1' is not an https URL"),
        (mesh("{meshCIDR: 'fd00::/64'}"), "'fd00::/64' is not an IPv4 prefix"),
        (mesh("{routing: {excludeCIDRs: [10.0.0.1]}}"), "'10.0.0.1' is not a prefix"),
        (mesh("{endpointFilters: [10.0.0.0/8, '!10.0.0.0/33']}"), "'!10.0.0.0/33' is no prefix"),
        (mesh("{peerEndpointFilters: [a.example]}"), "'a.example' is no prefix"),
        (mesh("{endpointFilters: ['!10.0.0.0/8']}"), "every entry takes addresses away"),
        (mesh("{grants: [{node: a, cidrs: [10.0.0.1]}]}"), "'10.0.0.1' is not a prefix"),
        (mesh("{grants: [{node: a, peer: b, cidrs: [10.0.0.0/8]}]}"), "a grant is for a node or for a peer"),
        (mesh("{grants: [{cidrs: [10.0.0.0/8]}]}"), "a grant is for a node or for a peer"),
        (mesh("{grants: [{node: a, cidrs: []}]}"), "should have at least 1 items"),
        (mesh("{natTraversal: {directConnectedWindowSeconds: 200}}"), "at least 30 more"),
        (mesh("{natTraversal: {birthdayAttack: maybe}}"), "supported values: \"disabled\", \"enabled\""),
        (mesh("{relay: {mode: auto}}"), "provider: Required value"),
        (mesh("{relay: {provider: external}}"), "spec.relay.external is required"),
        (wirekube_peer("{publicKey: abc}"), "must be a WireGuard key"),
        (wirekube_peer(&format!("{{publicKey: {}}}", KEY.replace("g=", "h="))), "must be a WireGuard key"),
        (wirekube_peer("{nextPublicKey: abc}"), "must be a WireGuard key"),
        (wirekube_peer("{endpoint: 192.0.2.1}"), "'192.0.2.1' is not host:port"),
        (wirekube_peer("{endpoint: '192.0.2.1:0'}"), "'192.0.2.1:0' is not host:port"),
        (wirekube_peer("{endpoint: '192.0.2.1:65536'}"), "'192.0.2.1:65536' is not host:port"),
        (wirekube_peer("{endpoint: '[fd00::g]:1'}"), "'[fd00::g]:1' is not host:port"),
        (wirekube_peer("{endpoint: '[fd00:::1]:1'}"), "'[fd00:::1]:1' is not host:port"),
        (wirekube_peer("{allowedIPs: [10.0.0.1/32, 10.0.0.2]}"), "'10.0.0.2' is not a prefix"),
        (wirekube_peer("{persistentKeepalive: -1}"), "greater than or equal to 0"),
        (kilo("endpoint: {port: 1}"), "dnsOrIP: Required value"),
        (kilo("endpoint: {dnsOrIP: {}, port: 1}"), "give ip or dns"),
        (kilo("endpoint: {dnsOrIP: {ip: 192.0.2.1}, port: 0}"), "greater than or equal to 1"),
        (kilo("endpoint: {dnsOrIP: {ip: 192.0.2.1}, port: 65536}"), "less than or equal to 65535"),
        (kilo("endpoint: {dnsOrIP: {ip: a.example}, port: 1}"), "'a.example' is not an IP address"),
        (kilo("endpoint: {dnsOrIP: {dns: 'a_b'}, port: 1}"), "'a_b' is not a DNS name"),
        (kilo("presharedKey: secret"), "must be a WireGuard key"),
        (kilo("presharedKeyRef: {key: a/b}"), "'a/b' is no key of a Secret"),
        (kilo(&format!("presharedKey: {KEY}, presharedKeyRef: {{key: a}}")), "not both"),
        (kilo_peer(&format!("{{publicKey: {KEY}}}")), "allowedIPs: Required value"),
        (kilo_peer(&format!("{{publicKey: {KEY}, allowedIPs: [10.0.0.0/99]}}")), "'10.0.0.0/99' is not a prefix"),
    ];
    let objects: Vec<&str> = table.iter().map(|(object, _)| object.as_str()).collect();
    let created =
        bed.plane.kubectl_stdin(&["create", "--dry-run=server", "-f", "-"], &objects.join("\n---\n"));
    let errors = created.expect_err("all are bad").to_string();
    // One answer per object, in their order.
    let errors: Vec<&str> = errors.split("Error from server").skip(1).collect();
    assert_eq!(errors.len(), table.len(), "{errors:#?}");
    for ((object, words), error) in table.iter().zip(errors) {
        assert!(error.contains(words), "expected '{words}' for {object} in: {error}");
        assert!(words.contains("too narrow") || !error.contains("too narrow"), "misleading: {error}");
        // No noise: a rule without a message, or one that could not be evaluated, would say so.
        assert!(!error.contains("no such overload") && !error.contains("failed rule"), "{error}");
        assert!(words.contains("Required value") || !error.contains("evaluation"), "{error}");
    }
}

#[test]
fn good_objects_at_the_limits_are_accepted() {
    let bed = bed();
    let many: Vec<String> =
        (0..64).map(|i| format!("{{ipv4: 10.{i}.0.0/16, ipv6: 'fd00:0:0:{i:x}::/112'}}")).collect();
    let objects = [
        pool(&format!("{{subnets: [{}]}}", many.join(", "))),
        pool("{blockSizeBits: 0, subnets: [{ipv4: 192.0.2.1/32, ipv6: '2001:db8::1/128'}]}"),
        pool("{blockSizeBits: 20, subnets: [{ipv6: 'fd00::/64'}]}"),
        pool("{subnets: [{ipv4: 10.2.3.4/16}]}"),
        egress("{destinations: [0.0.0.0/0], podDisruptionBudget: {minAvailable: 100%}}"),
        egress("{destinations: [0.0.0.0/0], template: {spec: {fieldOfTomorrow: 1}}}").replace("bad", "good"),
        egress(
            "{destinations: [0.0.0.0/0], sourceAddresses: ['2001:db8::1', 192.0.2.1, '2001:db8::2', 192.0.2.2]}",
        ),
        egress(
            "{destinations: [0.0.0.0/0], healthCheck: {targets: ['2001:db8::1', '[2001:db8::1]:443', 192.0.2.1, '192.0.2.1:1']}}",
        ),
        egress(
            "{destinations: [0.0.0.0/0], selectors: [{podSelector: {}}, {namespaceSelector: {matchLabels: {a: b}}}]}",
        ),
        mesh("{}"),
        mesh("{stunServers: ['stun:[2001:db8::1]:3478', stun.example.com]}"),
        wirekube_peer("{endpoint: '[2001:db8::7]:51820', persistentKeepalive: 0}"),
        wirekube_peer("{endpoint: 'gateway.example.com:1'}"),
        kilo_peer(&format!(
            "{{publicKey: {KEY}, allowedIPs: [], endpoint: {{dnsOrIP: {{ip: 'fd00::1'}}, port: 65535}}}}"
        )),
    ];
    let create = ["create", "--dry-run=server", "--validate=ignore", "-f", "-"];
    bed.plane.kubectl_stdin(&create, &objects.join("\n---\n")).unwrap();
    // A dry run does not make the Namespace of the examples.
    bed.namespace("internet-egress");
    bed.plane
        .kubectl(&[
            "apply",
            "--dry-run=server",
            "-R",
            "-f",
            checkout().join("deploy/examples").to_str().unwrap(),
        ])
        .unwrap();
}

#[test]
fn pools_only_grow() {
    let bed = bed();
    let named = |spec: &str| pool(spec).replace("name: bad", "name: grows");
    bed.plane.apply(&named("{subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}")).unwrap();
    let changes = [
        ("{subnets: [{ipv4: 10.0.0.0/16}]}", "may only grow at its end"),
        ("{subnets: [{ipv4: 10.1.0.0/16}, {ipv4: 10.0.0.0/16}]}", "may only grow at its end"),
        ("{subnets: [{ipv4: 10.0.0.0/17}, {ipv4: 10.1.0.0/16}]}", "may only grow at its end"),
        (
            "{subnets: [{ipv4: 10.2.0.0/16}, {ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}",
            "may only grow at its end",
        ),
        (
            "{blockSizeBits: 6, subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}",
            "spec.blockSizeBits cannot be changed",
        ),
    ];
    for (spec, words) in changes {
        let error = bed.plane.apply(&named(spec)).expect_err(spec).to_string();
        assert!(error.contains(words), "expected '{words}' for {spec} in: {error}");
    }
    bed.plane
        .apply(&named("{subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.2.0.0/16}]}"))
        .unwrap();
}

#[test]
fn blocks_and_requests_do_not_change() {
    let bed = bed();
    let named = |fields: &str| block(fields).replace("name: bad-0", "name: fixed-0");
    bed.plane.apply(&named("index: 0, ipv4: 10.0.0.0/27")).unwrap();
    for fields in [
        "index: 1, ipv4: 10.0.0.0/27",
        "index: 0, ipv4: 10.0.0.32/27",
        "index: 0, ipv4: 10.0.0.0/27, ipv6: 'fd00::/123'",
    ] {
        let error = bed.plane.apply(&named(fields)).expect_err(fields).to_string();
        assert!(error.contains("of a block cannot be changed"), "{error}");
    }
    bed.plane.apply(&request("fixed", "n1")).unwrap();
    let error = bed.plane.apply(&request("fixed", "n2")).unwrap_err().to_string();
    assert!(error.contains("cannot be changed; delete it and make another"), "{error}");
}

/// Decided by the API server alone: no controller runs here.
#[test]
fn no_address_may_be_in_two_pools() {
    let bed = bed();
    let named = |name: &str, spec: &str| {
        pool(spec).replace("name: bad", &format!("name: {name}, labels: {{overlap: judged}}"))
    };
    let ours = named("ours", "{subnets: [{ipv4: 10.201.0.0/16, ipv6: 'fd00:201::/112'}]}");
    bed.plane.apply(&ours).unwrap();
    let dry = |yaml: &str| {
        let refused = bed.plane.kubectl_stdin(&["create", "--dry-run=server", "-f", "-"], yaml);
        refused.err().map(|error| format!("{error:#}")).unwrap_or_default()
    };
    let four = |subnet: &str| named("theirs", &format!("{{subnets: [{{ipv4: {subnet}}}]}}"));
    // The policy comes into force, and sees a pool, a moment after it was made.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while dry(&four("10.201.0.0/16")).is_empty() {
        assert!(std::time::Instant::now() < end, "the policy does not come into force");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    for (yaml, words) in [
        (
            four("10.201.7.0/24"),
            "subnet 10.201.7.0/24 of pool theirs overlaps 10.201.0.0/16 of pool ours: no address may be in two pools",
        ),
        (four("10.200.0.0/13"), "subnet 10.200.0.0/13 of pool theirs overlaps 10.201.0.0/16 of pool ours"),
        (
            named("theirs", "{subnets: [{ipv6: 'fd00:201::80/121'}]}"),
            "subnet fd00:201::80/121 of pool theirs overlaps fd00:201::/112",
        ),
    ] {
        let error = dry(&yaml);
        assert!(error.contains(words), "{words} is not in {error}");
    }
    assert_eq!(dry(&four("10.203.0.0/16")), "");
    // A change that adds nothing is no overlap with itself, and growing is judged like creating.
    let patch = |patch: &str| {
        bed.plane.kubectl(&["patch", "addresspool", "ours", "--dry-run=server", "--type=merge", "-p", patch])
    };
    patch(r#"{"spec": {"disabled": true}}"#).unwrap();
    bed.plane.apply(&four("10.203.0.0/16")).unwrap();
    let grown = r#"{"spec": {"subnets": [{"ipv4": "10.201.0.0/16", "ipv6": "fd00:201::/112"}, {"ipv4": "10.203.5.0/24", "ipv6": "fd00:203::/120"}]}}"#;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !patch(grown).err().is_some_and(|error| format!("{error:#}").contains("of pool theirs")) {
        assert!(std::time::Instant::now() < end, "a pool may grow into another one");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    bed.plane.kubectl(&["delete", "addresspool", "ours", "theirs"]).unwrap();
}

/// A cluster that comes from Coil: the API server must not call a webhook that is gone.
#[test]
fn coils_webhooks_are_removed() {
    let bed = bed();
    for (kind, name, ours) in [
        ("MutatingWebhookConfiguration", "coilv2-mutating-ipam-webhook-configuration", "policy"),
        ("ValidatingWebhookConfiguration", "coilv2-validating-ipam-webhook-configuration", "policy"),
        ("MutatingWebhookConfiguration", "coilv2-mutating-egress-webhook-configuration", "components/egress"),
        (
            "ValidatingWebhookConfiguration",
            "coilv2-validating-egress-webhook-configuration",
            "components/egress",
        ),
    ] {
        // For resources of no other test.
        let coils = format!(
            "apiVersion: admissionregistration.k8s.io/v1\nkind: {kind}\nmetadata: {{name: {name}}}\n\
             webhooks: [{{name: pool.kb.io, admissionReviewVersions: [v1], sideEffects: None, failurePolicy: Fail,\n\
             clientConfig: {{service: {{name: coil, namespace: kube-system}}}},\n\
             rules: [{{apiGroups: [none.example], apiVersions: [v2], operations: [CREATE], resources: [nones]}}]}}]\n"
        );
        // As Coil is installed: not server-side.
        bed.plane.kubectl_stdin(&["apply", "-f", "-"], &coils).unwrap();
        let called =
            || bed.plane.kubectl(&["get", kind, name, "-o", "jsonpath={.webhooks[*].name}"]).unwrap();
        assert_eq!(called(), "pool.kb.io");
        let ours = checkout().join("deploy").join(ours).join("coil-webhooks.yaml");
        bed.plane.kubectl(&["apply", "-f", ours.to_str().unwrap()]).unwrap();
        assert_eq!(called(), "");
    }
}
