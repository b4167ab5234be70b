//! Addresses of pods that are gone, in the real kernel and with the real programs.

use std::time::Duration;

use anyhow::ensure;
use fairlead_demo::{World, topology};
use testbed_lab::Host;
use testbed_lab::Progress;

/// Two looks a minute apart, and a slow machine.
const TIMEOUT: Duration = Duration::from_secs(240);

fn metrics(host: &Host, port: u16) -> String {
    let get =
        format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3");
    host.shell(&format!("bash -c {}", shell_word(&get))).unwrap()
}

fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

/// A pod's namespace vanishes without a DEL: its address is freed, the other pod keeps its own, the count says
/// so, and the DEL that comes in the end finds nothing to do.
#[test]
fn an_address_whose_pod_vanished_without_del_is_freed_and_counted() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    let name = world.nodes[0].name.clone();
    let stays = world.start_pod("stays", &name).unwrap().clone();
    let vanishes = world.start_pod("vanishes", &name).unwrap().clone();
    let node = &world.nodes[0];
    let used = "fairlead_ipam_addresses_used{pool=\"default\"}";
    let freed = "fairlead_ipam_leaked_addresses_freed_total";
    let before = metrics(&node.host, 9384);
    assert_eq!((value(&before, used), value(&before, freed)), (Some(2.0), Some(0.0)), "{before}");
    let controller = metrics(world.plane_host(), 9386);
    let granted = value(&controller, "coil_controller_allocated_blocks{pool=\"default\"}");
    assert!(granted.is_some_and(|granted| granted >= 1.0), "{controller}");
    let most = value(&controller, "coil_controller_max_blocks{pool=\"default\"}");
    assert!(most > granted, "{controller}");

    // What the end of the namespace does to its links.
    vanishes.namespace.shell("ip link delete eth0").unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let now = metrics(&world.nodes[0].host, 9384);
            let counts = (value(&now, used), value(&now, freed));
            ensure!(counts == (Some(1.0), Some(1.0)), "{counts:?}");
            Ok(())
        })
        .unwrap();
    let plugin = world.nodes[0].plugin().unwrap();
    assert_eq!(plugin.add(&stays.container).unwrap(), stays.addresses, "a living pod keeps what it has");
    plugin.del(&vanishes.container).unwrap();
    assert_eq!(value(&metrics(&world.nodes[0].host, 9384), used), Some(1.0));
}
