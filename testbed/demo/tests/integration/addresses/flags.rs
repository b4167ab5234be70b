//! Flags of Coil's that change where routes stand, what links are called, and who comes first.

use super::*;

/// Also for pods of before, which keep what they have.
pub(super) fn other_numbers_and_names_are_used(world: &mut World) {
    let before = container(world, "before", objects::NAMESPACE);
    let output = call(node(world, OTHER), "ADD", &before, &configuration(node(world, OTHER)));
    assert!(output.status.success(), "{output:?}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let first = result["ips"][0]["address"].as_str().unwrap().trim_end_matches("/32").to_owned();
    let flags =
        "--pod-table-id=1116 --pod-rule-prio=1990 --export-table-id=1119 --protocol-id=40 --compat-calico";
    restart(world, flags);
    let other = node(world, OTHER);
    let one = container(world, "numbered", objects::NAMESPACE);
    let output = call(other, "ADD", &one, &configuration(other));
    assert!(output.status.success(), "{output:?}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    // printf demo.numbered | sha1sum
    assert_eq!(result["interfaces"][1]["name"], "veth09a67b96e47");
    let table = other.host.shell("ip -4 route show table 1116; ip rule show priority 1990").unwrap();
    let second = result["ips"][0]["address"].as_str().unwrap().trim_end_matches("/32");
    for words in [
        format!("{first} dev veth"),
        format!("{second} dev veth09a67b96e47 proto 40"),
        "lookup 1116".to_owned(),
    ] {
        assert!(table.contains(&words), "{words}: {table}");
    }
    let exported = other.host.shell("ip -4 route show table 1119").unwrap();
    assert!(exported.contains("dev lo proto 40"), "{exported}");
    for pod in [first.as_str(), second] {
        other.host.shell(&format!("ping -c 1 -W 10 {pod}")).unwrap();
    }
    // No kubelet, so no Pod objects; that is all there is to find.
    let (_, text) = ipam(other, &["check"]);
    let findings: Vec<&str> = text.lines().filter(|line| !line.starts_with(' ')).collect();
    let findings = findings.iter().filter(|line| line.starts_with("warning") || line.starts_with("error"));
    assert!(findings.clone().all(|line| line.starts_with("warning PodGone:")), "{text}");
    for container in [&before, &one] {
        assert!(call(other, "DEL", container, &configuration(other)).status.success());
    }
    let output = other
        .host
        .command(executable("fairlead").unwrap())
        .unwrap()
        .args(["node", "--node-name", "x", "--pod-table-id=254"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("table of pods 254 is one of the kernel's own"),
        "{said}"
    );
}

fn restart(world: &mut World, flags: &str) {
    let other = world.node(OTHER).unwrap();
    other.kill().unwrap();
    other.arguments = flags.split_whitespace().map(str::to_owned).collect();
    other.start().unwrap();
    other.wait_ready(TIMEOUT).unwrap();
}

pub(super) fn behind_another_plugin_nothing_is_made(world: &mut World) {
    let sandbox = world.lab().bare_namespace("chained").unwrap();
    let one =
        Container { namespace: "demo".to_owned(), ..fairlead_demo::cni::container("chained", &sandbox) };
    sandbox
        .shell(
            "ip link add eth0 address 02:00:00:00:00:07 type veth peer name peer0; ip link set peer0 up; \
                ip link set eth0 up; ip addr add 10.20.0.7/24 dev eth0",
        )
        .unwrap();
    let previous = json!({
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:07", "sandbox": one.netns}, {"name": "cni0"}],
        "ips": [{"address": "10.20.0.7/24", "interface": 0, "gateway": "10.20.0.1"}],
        "routes": [], "dns": {"nameservers": ["10.0.0.10"]},
    });
    let chained = |node: &Node| {
        let mut configuration = configuration(node);
        configuration["prevResult"] = previous.clone();
        configuration
    };
    // With addresses of its own it has to be the first.
    let here = node(world, NODE);
    let (code, text) = refused(&call(here, "ADD", &one, &chained(here)));
    assert!(code == NETWORK_CONFIG && text.contains("coil must be called as the first plugin"), "{text}");
    // And what is there already cannot be made.
    let (code, text) = refused(&call(here, "ADD", &one, &configuration(here)));
    assert!(code == ENVIRONMENT && text.contains("CNI_IFNAME") && text.contains("already exists"), "{text}");
    assert!(call(here, "DEL", &one, &configuration(here)).status.success());

    restart(world, "--enable-ipam=false");
    let there = node(world, OTHER);
    let (code, text) = refused(&call(there, "ADD", &one, &configuration(there)));
    assert!(code == NETWORK_CONFIG && text.contains("must be called after another plugin"), "{text}");
    let output = call(there, "ADD", &one, &chained(there));
    assert!(output.status.success(), "{output:?}");
    let mut passed: Value = serde_json::from_slice(&output.stdout).unwrap();
    passed.as_object_mut().unwrap().entry("routes").or_insert(json!([]));
    assert_eq!(passed, previous, "the result of the plugin before is passed on");
    for operation in ["CHECK", "STATUS", "GC"] {
        let output = call(there, operation, &one, &chained(there));
        assert!(output.status.success(), "{operation}: {output:?}");
    }
    sandbox.shell("ip addr flush dev eth0").unwrap();
    let (code, text) = refused(&call(there, "CHECK", &one, &chained(there)));
    assert!(code == CHANGED && text.contains("lacks 10.20.0.7/24"), "{text}");
    for _ in 0..2 {
        assert!(call(there, "DEL", &one, &chained(there)).status.success());
    }
    sandbox.shell("ip link show eth0").unwrap();
    let output = there
        .host
        .command(executable("fairlead").unwrap())
        .unwrap()
        .args(["node", "--node-name", "x", "--enable-ipam=false", "--enable-egress=false"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("both IPAM and egress are disabled"), "{said}");
}
