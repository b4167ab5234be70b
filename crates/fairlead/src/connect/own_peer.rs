//! The Peer of this machine.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use fairlead_api::names::{LABEL_MANAGED_BY, MANAGED_BY_CONNECT};
use fairlead_api::resources::{KiloPeer, KiloPeerSpec};
use fairlead_cli::peer::{self, Cluster};
use fairlead_keys::{PresharedKey, PublicKey};
use ipnet::IpNet;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, ResourceExt as _};
use tokio::time::timeout;

use super::entries::choose;
use crate::arguments::connect::ConnectArguments;

/// Time-out of one request to the API server.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Step by which the Peer comes to be there.
#[derive(Debug, PartialEq)]
pub(super) enum Plan {
    Create(KiloPeer),
    Keep(KiloPeer),
    Replace(KiloPeer),
}

/// Whether this command has made the Peer, and deletes it.
pub(super) fn is_managed(peer: &KiloPeer) -> bool {
    peer.labels().get(LABEL_MANAGED_BY).is_some_and(|value| value == MANAGED_BY_CONNECT)
}

/// Decides what to do; `cluster` has all Peers if the user may list them. No address of the machine's own `networks` is chosen.
///
/// # Errors
/// The Peer is another machine's, what the user asks for is not possible, or belongs to others.
pub(super) fn plan(
    name: &str,
    key: PublicKey,
    arguments: &ConnectArguments,
    present: Option<KiloPeer>,
    (cluster, lists_peers): (&Cluster, bool),
    networks: &[IpNet],
) -> anyhow::Result<Plan> {
    cluster.check_nodes(&arguments.entry_nodes)?;
    let Some(peer) = present else {
        let spec = new_spec(key, arguments, (cluster, lists_peers), networks)?;
        let mut peer = KiloPeer::new(name, spec);
        peer.labels_mut().insert(LABEL_MANAGED_BY.to_owned(), MANAGED_BY_CONNECT.to_owned());
        return Ok(Plan::Create(peer));
    };
    check_key(&peer, key)?;
    if is_managed(&peer) {
        let mut changed = peer.clone();
        update(&mut changed.spec, arguments, cluster)?;
        return Ok(if changed == peer { Plan::Keep(peer) } else { Plan::Replace(changed) });
    }
    let has = |all: &[String], wanted: &[String]| wanted.iter().all(|one| all.contains(one));
    let entry_nodes = peer.spec.entry_nodes.as_deref().unwrap_or_default();
    ensure!(
        has(&peer.spec.allowed_ips, &texts(&arguments.addresses)) && has(entry_nodes, &arguments.entry_nodes),
        "Peer '{name}' was not made by this command, and has no such address or entry node: change it with kubectl, or choose another name"
    );
    Ok(Plan::Keep(peer))
}

/// Refuses the Peer of another machine.
///
/// # Errors
/// The key is another one.
pub(super) fn check_key(peer: &KiloPeer, key: PublicKey) -> anyhow::Result<()> {
    ensure!(
        peer.spec.parse_public_key().ok() == Some(key),
        "Peer '{0}' has another key: it is another machine's, or its key was lost. Choose another name, give its key with --private-key, \
         or delete it (`fairlead peer remove {0}`)",
        peer.name_any()
    );
    Ok(())
}

/// Whether an older Peer has an address of this one; nodes decide by the same.
pub(super) fn is_contested(own: &KiloPeer, all: &[KiloPeer]) -> bool {
    let age = |peer: &KiloPeer| (peer.creation_timestamp(), peer.uid());
    let claims: Vec<IpNet> = own.spec.parse_allowed_ips().0;
    all.iter().filter(|other| other.uid() != own.uid() && age(other) < age(own)).any(|other| {
        let theirs = other.spec.parse_allowed_ips().0;
        theirs.iter().any(|theirs| claims.iter().any(|own| fairlead_address::overlap(own, theirs)))
    })
}

/// Other entry nodes, if the user has named none and the Peer has none left that the mesh has.
pub(super) fn with_entry_nodes(
    peer: &KiloPeer,
    arguments: &ConnectArguments,
    cluster: &Cluster,
) -> Option<KiloPeer> {
    if !is_managed(peer) || !arguments.entry_nodes.is_empty() {
        return None;
    }
    let mut changed = peer.clone();
    changed.spec.entry_nodes = Some(entry_nodes(&peer.spec, arguments, cluster).ok()?);
    (changed != *peer).then_some(changed)
}

fn new_spec(
    key: PublicKey,
    arguments: &ConnectArguments,
    (cluster, lists_peers): (&Cluster, bool),
    networks: &[IpNet],
) -> anyhow::Result<KiloPeerSpec> {
    let near = |address: IpAddr| networks.iter().any(|network| network.contains(&address));
    let taken = peer::taken(cluster);
    let addresses = match &arguments.addresses[..] {
        [] if !lists_peers => {
            bail!("you may not list Peers, so that no free address can be chosen: give one with --allowed-ip")
        }
        [] => vec![
            peer::first_free(|address| taken.contains(address) || near(address))
                .with_context(|| format!("no address of {} is free: use --allowed-ip", peer::RANGE))?,
        ],
        given => hosts(given),
    };
    if let Some(prefix) = addresses.iter().find(|prefix| taken.overlapping(**prefix).is_some()) {
        bail!("{prefix} is in use by pods, Services, a node or another Peer: choose another address");
    }
    let mut spec = KiloPeerSpec {
        allowed_ips: texts(&addresses),
        preshared_key: Some(PresharedKey(rand::random()).to_base64()),
        public_key: key.to_string(),
        ..KiloPeerSpec::default()
    };
    update(&mut spec, arguments, cluster)?;
    Ok(spec)
}

/// Updates the spec: arguments go before what an earlier process has chosen.
fn update(spec: &mut KiloPeerSpec, arguments: &ConnectArguments, cluster: &Cluster) -> anyhow::Result<()> {
    if !arguments.addresses.is_empty() {
        spec.allowed_ips = texts(&arguments.addresses);
    }
    spec.entry_nodes = Some(entry_nodes(spec, arguments, cluster)?);
    spec.persistent_keepalive = Some(arguments.persistent_keepalive);
    Ok(())
}

fn entry_nodes(
    spec: &KiloPeerSpec,
    arguments: &ConnectArguments,
    cluster: &Cluster,
) -> anyhow::Result<Vec<String>> {
    if !arguments.entry_nodes.is_empty() {
        return Ok(arguments.entry_nodes.clone());
    }
    let known = spec.entry_nodes.clone().unwrap_or_default();
    if known.iter().any(|name| cluster.objects.peers.iter().any(|node| node.name_any() == *name)) {
        return Ok(known);
    }
    let chosen = choose(&cluster.objects.peers);
    ensure!(!chosen.is_empty(), "no node of the mesh publishes an endpoint: is there a mesh?");
    Ok(chosen)
}

/// An address, also one with the length of its network, is a prefix of its own.
fn hosts(addresses: &[IpNet]) -> Vec<IpNet> {
    addresses.iter().map(|address| IpNet::from(address.addr())).collect()
}

fn texts(addresses: &[IpNet]) -> Vec<String> {
    hosts(addresses).iter().map(ToString::to_string).collect()
}

/// Carries out a plan.
///
/// # Errors
/// The API server refuses or does not answer.
pub(super) async fn carry_out(peers: &Api<KiloPeer>, plan: Plan) -> anyhow::Result<KiloPeer> {
    match plan {
        Plan::Create(peer) => {
            let name = peer.name_any();
            let created = within(peers.create(&PostParams::default(), &peer)).await;
            let created = created.with_context(|| format!("cannot create Peer '{name}'"))?;
            tracing::info!(peer = name, "created the Peer of this machine");
            Ok(created)
        }
        Plan::Keep(peer) => Ok(peer),
        Plan::Replace(peer) => {
            let name = peer.name_any();
            let replaced = within(peers.replace(&name, &PostParams::default(), &peer)).await;
            replaced.with_context(|| format!("cannot change Peer '{name}'"))
        }
    }
}

/// The Peer of this name.
///
/// # Errors
/// The API server refuses or does not answer.
pub(super) async fn get(peers: &Api<KiloPeer>, name: &str) -> anyhow::Result<Option<KiloPeer>> {
    within(peers.get_opt(name)).await.with_context(|| format!("cannot read Peer '{name}'"))
}

/// Deletes the Peer, but no other one that has its name by now.
///
/// # Errors
/// The API server refuses or does not answer; what to do then.
pub(super) async fn delete(peers: &Api<KiloPeer>, peer: &KiloPeer) -> anyhow::Result<()> {
    let name = peer.name_any();
    let preconditions = Preconditions { uid: peer.uid(), resource_version: None };
    let parameters = DeleteParams::default().preconditions(preconditions);
    match within(peers.delete(&name, &parameters)).await {
        Err(error) if is_gone(&error) => Ok(()),
        deleted => deleted.map(drop).with_context(|| {
            format!("cannot delete Peer '{name}', which stays: delete it with `fairlead peer remove {name}`")
        }),
    }
}

fn is_gone(error: &anyhow::Error) -> bool {
    // 409: the UID is another one's.
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if matches!(status.code, 404 | 409))
}

async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> anyhow::Result<T> {
    let answer = timeout(TIMEOUT, request).await;
    Ok(answer.with_context(|| format!("the API server does not answer in {} s", TIMEOUT.as_secs()))??)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use fairlead_members::configuration::Objects;
    use serde_json::json;

    use super::*;
    use crate::arguments::{Arguments, Command};

    const KEY: PublicKey = PublicKey([5; 32]);

    fn arguments(more: &[&str]) -> ConnectArguments {
        let parsed = Arguments::parse_from(["fairlead", "connect", "laptop"].iter().chain(more));
        let Command::Connect(connect) = parsed.command else { panic!("unexpected command") };
        *connect
    }

    fn cluster() -> Cluster {
        let node = |(name, number): (&str, u8)| {
            serde_json::from_value(json!({
                "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": name },
                "spec": {
                    "publicKey": PublicKey([number; 32]).to_string(), "endpoint": format!("203.0.113.{number}:51820"),
                    "allowedIPs": [format!("203.0.113.{number}/32")],
                },
                "status": {
                    "endpointDiscoveryMethod": "manual",
                    "node": { "internalIPs": [format!("203.0.113.{number}")] },
                },
            }))
            .unwrap()
        };
        let objects = Objects { peers: [("a", 1), ("b", 2)].map(node).into(), ..Objects::default() };
        Cluster {
            objects,
            pools: vec!["10.64.0.0/16".parse().unwrap()],
            services: Vec::new(),
            dns: Vec::new(),
        }
    }

    fn planned(arguments: &ConnectArguments, present: Option<KiloPeer>, lists: bool) -> anyhow::Result<Plan> {
        plan("laptop", KEY, arguments, present, (&cluster(), lists), &[])
    }

    fn created(more: &[&str]) -> KiloPeer {
        let Plan::Create(peer) = planned(&arguments(more), None, true).unwrap() else {
            panic!("not created")
        };
        peer
    }

    #[test]
    fn a_new_peer_has_an_address_a_preshared_key_and_entry_nodes() {
        let peer = created(&[]);
        assert!(is_managed(&peer) && peer.spec.parse_preshared_key().unwrap().is_some());
        assert_eq!(
            (&peer.spec.allowed_ips[..], peer.spec.persistent_keepalive),
            (&["10.10.10.1/32".to_owned()][..], Some(10))
        );
        assert_eq!(peer.spec.entry_nodes, Some(vec!["a".to_owned(), "b".to_owned()]));
        let near = ["10.10.10.0/30".parse().unwrap()];
        let elsewhere = plan("laptop", KEY, &arguments(&[]), None, (&cluster(), true), &near).unwrap();
        let Plan::Create(elsewhere) = elsewhere else { panic!("not created") };
        assert_eq!(elsewhere.spec.allowed_ips, ["10.10.10.4/32"]);
        let named = created(&["-a", "10.9.0.1", "--entry-node", "b", "--persistent-keepalive", "0"]).spec;
        assert_eq!(
            (&named.allowed_ips[0][..], named.entry_nodes),
            ("10.9.0.1/32", Some(vec!["b".to_owned()]))
        );
    }

    #[test]
    fn what_cannot_be_is_refused_before_anything_is_made() {
        let refused = |more: &[&str], present, lists| {
            planned(&arguments(more), present, lists).unwrap_err().to_string()
        };
        assert!(refused(&["-a", "10.64.0.1"], None, true).contains("10.64.0.1/32 is in use"));
        assert!(refused(&["--entry-node", "c"], None, true).contains("node c"));
        assert!(refused(&[], None, false).contains("--allowed-ip"));
        let mut other = created(&[]);
        other.spec.public_key = PublicKey([6; 32]).to_string();
        assert!(refused(&[], Some(other), true).contains("another key"));
        let mut foreign = created(&[]);
        foreign.metadata.labels = None;
        assert!(refused(&["-a", "10.9.0.1"], Some(foreign.clone()), true).contains("kubectl"));
        assert_eq!(
            planned(&arguments(&["--entry-node", "b"]), Some(foreign.clone()), false).unwrap(),
            Plan::Keep(foreign)
        );
    }

    #[test]
    fn what_an_earlier_process_has_made_is_taken_over_and_changed_as_the_arguments_say() {
        let left = created(&[]);
        assert_eq!(planned(&arguments(&[]), Some(left.clone()), false).unwrap(), Plan::Keep(left.clone()));
        let Plan::Replace(changed) =
            planned(&arguments(&["--entry-node", "b"]), Some(left.clone()), false).unwrap()
        else {
            panic!("not changed")
        };
        assert_eq!(
            (changed.spec.entry_nodes, changed.spec.preshared_key),
            (Some(vec!["b".to_owned()]), left.spec.preshared_key)
        );
    }

    #[test]
    fn of_two_machines_with_one_address_the_newer_gives_way() {
        let with = |uid: &str, second: &str, address: &str| {
            let mut peer = created(&["-a", address]);
            peer.metadata.uid = Some(uid.to_owned());
            let at = json!(format!("1970-01-01T00:00:{second}Z"));
            peer.metadata.creation_timestamp = serde_json::from_value(at).unwrap();
            peer
        };
        let (first, second) = (with("b", "01", "10.10.10.1"), with("a", "02", "10.10.10.1"));
        let all = [first.clone(), second.clone(), with("c", "01", "10.10.10.2")];
        assert_eq!((is_contested(&first, &all), is_contested(&second, &all)), (false, true));
        let same = with("c", "02", "10.10.10.1");
        assert!(is_contested(&same, &[second, same.clone()]));
    }

    #[test]
    fn entry_nodes_that_left_the_mesh_are_replaced_unless_the_user_named_them() {
        let mut peer = created(&[]);
        assert_eq!(with_entry_nodes(&peer, &arguments(&[]), &cluster()), None);
        peer.spec.entry_nodes = Some(vec!["gone".to_owned()]);
        let changed = with_entry_nodes(&peer, &arguments(&[]), &cluster()).unwrap();
        assert_eq!(changed.spec.entry_nodes, Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(with_entry_nodes(&peer, &arguments(&["--entry-node", "a"]), &cluster()), None);
    }
}
