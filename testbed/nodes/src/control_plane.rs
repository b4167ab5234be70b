//! The control plane of a cluster: beside the first node, or a part of it on every node.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use testbed_kube::{ControlPlane, Member, Options};
use testbed_lab::{Host, Nat, NatSite};

use crate::machine::Program;
use crate::topology::{Placement, Topology};

/// TCP port of API servers.
pub(crate) const API_PORT: u16 = 6443;
/// Token of every kube-proxy.
pub(crate) const PROXY_TOKEN: &str = "token-of-kube-proxy";

/// Token by which a kubelet proves who it is; kubeadm's certificates would say the same.
pub(crate) fn token(node: &str) -> String {
    format!("token-of-{node}")
}

/// Starts the control plane beside the first node; or makes certificates and kubeconfigs for its programs, which the nodes run: [`programs`].
///
/// # Errors
/// The control plane does not become ready, or its programs cannot be built.
pub(crate) fn prepare(
    topology: &Topology,
    sites: &[NatSite],
    hosts: &[Host],
    directory: &Path,
) -> Result<ControlPlane> {
    let first = hosts.first().context("a cluster needs a node")?;
    let families = topology.families;
    match topology.control_plane {
        Placement::EveryNode => {
            let addresses = hosts.iter().flat_map(|host| families.addresses(host)).collect();
            let member =
                |host: &Host| Member { name: host.name().to_owned(), address: host.address().into() };
            let members = hosts.iter().map(member).collect();
            ControlPlane::of_members(options(hosts, first, addresses, directory)?, members)
        }
        Placement::FirstNode => {
            let mut addresses = families.addresses(first);
            if let Some(site) = sites.first().filter(|site| site.router().nat() != Nat::None) {
                forward_api_server(site, first)?;
                addresses.insert(0, first.public_address().into());
            }
            ControlPlane::start(options(hosts, first, addresses, directory)?)
        }
    }
}

/// URL of the API server that a node uses, where it has one of its own.
pub(crate) fn own_server(topology: &Topology, host: &Host) -> Option<String> {
    (topology.control_plane == Placement::EveryNode).then(|| format!("https://{}:{API_PORT}", host.address()))
}

/// Programs of the control plane that a node runs; etcd's data is in the node's directory.
pub(crate) fn programs(plane: &ControlPlane, node: &str, directory: &Path) -> Vec<Program> {
    let programs = plane.member_programs(node, &directory.join("etcd"));
    programs.into_iter().map(|(name, command)| Program { name: name.to_owned(), command }).collect()
}

/// Has a router pass on what is for the API server, also what comes from behind it (hairpinning).
fn forward_api_server(site: &NatSite, host: &Host) -> Result<()> {
    let (public, inside, lan) = (host.public_address(), host.address(), site.router().lan());
    site.router()
        .shell(&format!(
            "nft 'insert rule ip lab forward iifname \"wan\" tcp dport {API_PORT} accept'\n\
             nft 'insert rule ip lab prerouting ip daddr {public} tcp dport {API_PORT} dnat to {inside}'\n\
             nft 'insert rule ip lab postrouting oifname \"lan\" ip saddr {lan} ct status dnat masquerade'"
        ))
        .map(drop)
}

/// Options of a control plane that all nodes may ask; kubectl runs where `first` is.
fn options(hosts: &[Host], first: &Host, addresses: Vec<IpAddr>, directory: &Path) -> Result<Options> {
    let mut tokens = format!("{PROXY_TOKEN},system:kube-proxy,kube-proxy\n");
    for node in hosts.iter().map(|host| host.name()) {
        tokens += &format!("{},system:node:{node},{node},system:nodes\n", token(node));
    }
    let file = directory.join("tokens.csv");
    fs::write(&file, tokens).context("cannot write the token file")?;
    let inside = first.clone();
    Ok(Options {
        launcher: Some(Box::new(move |program| {
            // A lab that has ended cannot start anything; the command then fails with that reason.
            inside.command(program).unwrap_or_else(|_| Command::new("/nonexistent"))
        })),
        addresses,
        parent: Some(directory.to_owned()),
        port: Some(API_PORT),
        controllers: true,
        scheduler: true,
        apiserver_args: vec![
            format!("--token-auth-file={}", file.display()),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
        ],
        controller_args: vec!["--node-monitor-grace-period=20s".to_owned()],
        ..Options::default()
    })
}
