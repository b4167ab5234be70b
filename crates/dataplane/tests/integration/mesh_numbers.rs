//! Beside another program with the numbers of KubeSpan, in a namespace of its own. There is no Talos here: the test makes what KubeSpan makes.

use crate::mesh_common::{apply, in_namespace, run};
use fairlead_dataplane::mesh::{Bypass, MeshState, numbers, remove};

/// The name of our device.
const OURS: &str = "mesh0";

fn mesh() -> MeshState {
    MeshState {
        interface: OURS.into(),
        mtu: 1420,
        addresses: Vec::new(),
        targets_v4: vec!["10.1.0.0/16".parse().unwrap()],
        targets_v6: Vec::new(),
        bypass: Bypass { own: vec!["192.0.2.1/32".parse().unwrap()], ..Bypass::default() },
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: Vec::new(),
        without_default: Vec::new(),
        listen_port: 51820,
        sources: Vec::new(),
        uplinks: Vec::new(),
    }
}

/// Makes the mesh as Fairlead does; the device is the kernel's other kind of tunnel, which needs no module.
fn start_ours() {
    run("ip tuntap add mesh0 mode tun && ip link set mesh0 up");
    apply(&mesh()).unwrap();
}

/// Commands that make the state of KubeSpan, in its order.
const KUBESPAN: [&str; 4] = [
    "ip tuntap add kubespan mode tun && ip link set kubespan up",
    "ip rule add priority 32500 fwmark 0x40/0x60 lookup 180 protocol static",
    "ip route replace default dev kubespan table 180 proto static",
    "nft 'delete table inet talos_kubespan' 2> /dev/null; nft 'add table inet talos_kubespan { chain kubespan_outgoing { accept; }; }'",
];

fn taken() -> Option<String> {
    numbers::taken(OURS).unwrap()
}

#[test]
fn what_fairlead_made_is_not_taken_for_another_program() {
    in_namespace(|| {
        assert_eq!(taken(), None);
        start_ours();
        assert_eq!(taken(), None);
        // Also where the device has the name of KubeSpan's, and another one is asked for now.
        run("ip link set mesh0 down && ip link set mesh0 name kubespan && ip link set kubespan up");
        apply(&MeshState { interface: "kubespan".into(), ..mesh() }).unwrap();
        assert_eq!(taken(), None);
        assert_eq!(numbers::taken("kubespan").unwrap(), None);
    });
}

#[test]
fn what_kubespan_left_is_replaced() {
    in_namespace(|| {
        run("ip rule add priority 32500 fwmark 0x40/0x60 lookup 180 protocol static");
        run("nft 'add table inet talos_kubespan { chain kubespan_outgoing { accept; }; }'");
        assert_eq!(taken(), None);
        start_ours();
        assert!(run("nft list table inet talos_kubespan").contains("fairlead_own_ipv4"));
    });
}

#[test]
fn a_kubespan_is_noticed_by_its_device_and_by_its_route() {
    in_namespace(|| {
        run(KUBESPAN[0]);
        assert!(taken().unwrap().contains("the device kubespan"), "{:?}", taken());
        assert!(numbers::taken("kubespan").unwrap().is_none(), "it may be ours");
        run("ip link del kubespan");
        // Another program, whatever the name of its device is.
        run("ip link add other0 type veth peer name far0 && ip link set other0 up");
        run("ip route add default dev other0 table 180 proto static");
        assert!(taken().unwrap().contains("a default route in table 180"), "{:?}", taken());
        run("ip route flush table 180");
        assert_eq!(taken(), None);
        // An administrator may have a rule for the mark.
        run("ip rule add priority 900 fwmark 0x40/0x60 lookup 77 protocol static");
        assert_eq!(taken(), None);
    });
}

#[test]
fn to_leave_the_mesh_takes_nothing_from_a_kubespan_that_was_started_beside_it() {
    in_namespace(|| {
        start_ours();
        KUBESPAN.iter().for_each(|made| drop(run(made)));
        assert!(taken().is_some());
        remove().unwrap();
        let left = || {
            run(
                "ip rule; ip route show table 180; nft list table inet talos_kubespan; ip -o link show kubespan",
            )
        };
        for made in ["fwmark 0x40/0x60 lookup 180 proto static", "default dev kubespan", "kubespan_outgoing"]
        {
            assert!(left().contains(made), "{}", left());
        }
        assert!(!run("ip rule").contains("proto 30"), "{}", run("ip rule"));
        assert!(!run("ip link").contains("mesh0"), "{}", run("ip link"));
        run("ip link del kubespan");
    });
}

#[test]
fn to_leave_the_mesh_removes_our_table_also_while_another_program_has_the_route() {
    in_namespace(|| {
        start_ours();
        KUBESPAN.iter().take(3).for_each(|made| drop(run(made)));
        remove().unwrap();
        assert!(!run("nft list tables").contains("talos_kubespan"));
        assert!(run("ip route show table 180").contains("default dev kubespan"));
    });
}
