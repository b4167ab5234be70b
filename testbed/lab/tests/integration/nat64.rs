//! A host without IPv4 reaches IPv4 hosts through the NAT64 of its site, and its resolver says so.

use std::time::Duration;

use anyhow::ensure;
use testbed_lab::{Ipv6, Lab, Nat, Nat64, SiteOptions, eventually};

#[test]
fn a_host_without_ipv4_reaches_ipv4_through_the_nat64() {
    let lab = Lab::new().unwrap();
    let server = lab.public_site("internet").host("server").unwrap();
    let options = SiteOptions {
        ipv6: Ipv6::Global,
        ..SiteOptions::new(Nat::PortRestricted, "10.9.0.0/24".parse().unwrap())
    };
    let site = lab.site("mobile", options).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let nat64 = Nat64::start(&site, directory.path(), true).unwrap();
    let host = nat64.host("phone").unwrap();
    assert_eq!(
        host.shell("ip -4 -brief addr show dev eth0 scope global; ip -4 route")
            .unwrap()
            .matches("10.9")
            .count(),
        0
    );
    let translated = nat64.address_of(server.address());
    let reaches = || host.shell(&format!("ping -c 1 -W 1 {translated}")).map(drop);
    eventually(Duration::from_secs(10), reaches).unwrap();
    let resolves = || {
        let answer = host.shell("getent ahostsv6 ipv4only.arpa.")?;
        ensure!(answer.contains("2001:db8:64::c000:aa"), "{answer}");
        Ok(())
    };
    eventually(Duration::from_secs(10), resolves).unwrap();
}
