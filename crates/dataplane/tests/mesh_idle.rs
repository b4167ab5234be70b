//! An unchanged mesh sends nothing: `ip monitor` and `nft monitor` report nothing, and our own counter agrees. The counter
//! is the whole process's, so this binary has one test only.
#![cfg(test)]

mod mesh_common;

use fairlead_dataplane::mesh::{Bypass, MeshState};
use fairlead_dataplane::nft_table::Applied;
use fairlead_netlink::changes_sent;
use mesh_common::{Namespace, apply, run, targets};
use testbed_netns::Monitor;

#[test]
fn only_what_differs_is_sent() {
    let namespace = Namespace::new();
    namespace.run(|| {
        // Without addresses of the kernel's making, whose duplicate address detection `ip monitor` would report later.
        run("ip link add mesh0 type veth peer name far0; \
             for link in mesh0 far0; do ip link set $link addrgenmode none; ip link set $link up; done");
        let (targets_v4, targets_v6) = targets(1000);
        let mut state = MeshState {
            interface: "mesh0".into(),
            mtu: 1420,
            targets_v4,
            targets_v6,
            bypass: Bypass::default(),
        };
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
        let sent = || {
            let before = changes_sent();
            move || changes_sent() - before
        };

        let (mut ip, mut nft) = (Monitor::ip(&namespace), Monitor::nft(&namespace));
        ip.wait_idle();
        nft.wait_idle();
        let counted = sent();
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        assert_eq!(counted(), 0);
        assert_eq!((ip.reported(), nft.reported()), (vec![], vec![]));

        // One of a thousand peers goes: one element, one message.
        let handles = || run("nft -a list table inet talos_kubespan | grep -o 'handle [0-9]*$'");
        let before = handles();
        state.targets_v4.remove(500);
        let counted = sent();
        assert_eq!(apply(&state).unwrap(), Applied::Elements { deleted: 1, added: 0 });
        assert_eq!(counted(), 1);
        let reported = nft.reported();
        let changes: Vec<&String> = reported.iter().filter(|line| !line.starts_with('#')).collect();
        assert!(matches!(&changes[..], [one] if one.starts_with("delete element inet")), "{reported:?}");
        assert_eq!(handles(), before, "rules and sets are the same objects");

        // The order and the spelling of prefixes mean nothing.
        state.targets_v6.reverse();
        state.targets_v4.push("10.0.0.7/32".parse().unwrap());
        let counted = sent();
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        assert_eq!(counted(), 0);
        assert_eq!((ip.reported(), nft.reported()), (vec![], vec![]));
    });
}
