//! `fairlead peer add`.

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};
use fairlead_address::PrefixSet;
use fairlead_api::resources::{KiloPeer, KiloPeerSpec, PeerEndpoint, PresharedKeyRef, WireKubePeer};
use fairlead_keys::{PresharedKey, PrivateKey, PublicKey};
use ipnet::{IpNet, Ipv4Net};
use kube::Api;
use kube::api::{DynamicObject, PostParams};
use serde_json::json;

use super::cluster::Cluster;
use super::configuration::peer_endpoint;
use super::{machine, secret};
use crate::arguments::peers::PeerAdd;

/// Range from which the first free address is taken (Kilo's `kgctl connect` has its first host by default).
pub const RANGE: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 10, 10, 0), 24);

pub(super) async fn run(arguments: &PeerAdd) -> anyhow::Result<ExitCode> {
    let client = arguments.machine.api.client().await?;
    let mut cluster = Cluster::read(&client).await?;
    ensure!(cluster.peer(&arguments.name).is_none(), "there is a Peer '{}' already", arguments.name);
    cluster.check_nodes(&arguments.entry_nodes)?;
    let private_key = match (&arguments.public_key, machine::read_private_key(&arguments.machine)?) {
        (None, None) => Some(new_private_key()),
        (_, key) => key,
    };
    let derived = || private_key.as_ref().map(PrivateKey::public_key);
    let public_key = arguments.public_key.or_else(derived).context("there is no key")?;
    let spec = spec(arguments, public_key, &cluster)?;
    let preshared_key = spec.preshared_key.clone();
    let published = match &preshared_key {
        Some(key) if arguments.preshared_key_secret => {
            ensure!(
                !secret::has(&client, &arguments.name).await?,
                "the Secret with preshared keys has a key '{}' already, which another Peer may use: delete it, or choose another name",
                arguments.name
            );
            // First the key, as the Peer has no tunnel without it.
            secret::set(&client, &arguments.name, key).await?;
            let reference = PresharedKeyRef { key: arguments.name.clone() };
            KiloPeerSpec { preshared_key: None, preshared_key_ref: Some(reference), ..spec }
        }
        _ => spec,
    };
    let has_secret = published.preshared_key_ref.is_some();
    let peers: Api<KiloPeer> = Api::all(client.clone());
    let created = peers.create(&PostParams::default(), &KiloPeer::new(&arguments.name, published)).await;
    if created.is_err() && has_secret {
        secret::remove(&client, &arguments.name).await?;
    }
    let mut created = created.with_context(|| format!("cannot create Peer '{}'", arguments.name))?;
    (created.spec.preshared_key, created.spec.preshared_key_ref) = (preshared_key, None);
    let object: DynamicObject =
        serde_json::from_value(json!(created)).context("cannot read what was created")?;
    cluster.objects.external.push(object);
    machine::print(&cluster, &arguments.name, None, private_key.as_ref(), &arguments.machine)
}

/// Private key as `wg genkey` makes it.
pub fn new_private_key() -> PrivateKey {
    clamped(PrivateKey(rand::random()))
}

/// Key in the form that devices show (RFC 7748, section 5); its public key is the same.
pub fn clamped(PrivateKey(mut key): PrivateKey) -> PrivateKey {
    let [first, .., last] = &mut key;
    *first &= 248;
    *last = (*last & 127) | 64;
    PrivateKey(key)
}

fn spec(arguments: &PeerAdd, public_key: PublicKey, cluster: &Cluster) -> anyhow::Result<KiloPeerSpec> {
    let taken = taken(cluster);
    let addresses = match &arguments.addresses[..] {
        [] => vec![
            first_free(|address| taken.contains(address))
                .with_context(|| format!("no address of {RANGE} is free: use --address"))?,
        ],
        given => given.iter().map(|address| IpNet::from(address.addr())).collect(),
    };
    let networks = arguments.networks.iter().map(IpNet::trunc);
    let allowed_ips: Vec<IpNet> = addresses.into_iter().chain(networks).collect();
    if let Some(prefix) = allowed_ips.iter().find(|prefix| taken.overlapping(**prefix).is_some()) {
        bail!("{prefix} is in use by pods, Services, a node or another Peer: choose another one");
    }
    let endpoint = arguments.endpoint.as_deref().map(endpoint).transpose()?;
    let preshared_key = (!arguments.no_preshared_key).then(|| PresharedKey(rand::random()).to_base64());
    Ok(KiloPeerSpec {
        allowed_ips: allowed_ips.iter().map(ToString::to_string).collect(),
        endpoint,
        entry_nodes: Some(arguments.entry_nodes.clone()).filter(|nodes| !nodes.is_empty()),
        persistent_keepalive: Some(arguments.keepalive),
        preshared_key,
        preshared_key_ref: None,
        public_key: public_key.to_string(),
    })
}

fn endpoint(text: &str) -> anyhow::Result<PeerEndpoint> {
    peer_endpoint(text).with_context(|| format!("--endpoint '{text}' is not HOST:PORT"))
}

/// Prefixes that belong to others: nodes, Peers, pools and Services.
pub fn taken(cluster: &Cluster) -> PrefixSet {
    let nodes = cluster.objects.peers.iter().flat_map(|peer: &WireKubePeer| peer.spec.parse_allowed_ips().0);
    let peers = cluster.objects.external.iter().flat_map(|peer| {
        let claims = peer.data.get("spec").and_then(|spec| spec.get("allowedIPs")?.as_array());
        claims.into_iter().flatten().filter_map(|text| text.as_str()?.parse::<IpNet>().ok())
    });
    let all: Vec<IpNet> = nodes
        .chain(peers)
        .chain(cluster.pools.iter().copied())
        .chain(cluster.services.iter().copied())
        .collect();
    all.iter().collect()
}

/// First address of [`RANGE`] that is not taken.
pub fn first_free(is_taken: impl Fn(IpAddr) -> bool) -> Option<IpNet> {
    RANGE.hosts().map(IpAddr::from).find(|address| !is_taken(*address)).map(IpNet::from)
}

#[cfg(test)]
mod tests {
    use fairlead_api::resources::DnsOrIp;
    use fairlead_members::configuration::Objects;

    use super::*;
    use crate::arguments::peers::MachineArguments;

    fn cluster(claims: &[&str]) -> Cluster {
        let peer = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "other" },
            "spec": { "publicKey": "", "allowedIPs": claims },
        });
        let objects = Objects { external: vec![serde_json::from_value(peer).unwrap()], ..Objects::default() };
        let pools = vec!["10.64.0.0/16".parse().unwrap()];
        Cluster { objects, pools, services: vec!["10.96.0.0/12".parse().unwrap()], dns: Vec::new() }
    }

    fn arguments(addresses: &[&str]) -> PeerAdd {
        PeerAdd {
            name: "laptop".to_owned(),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            networks: Vec::new(),
            entry_nodes: vec!["gate".to_owned()],
            endpoint: None,
            keepalive: 25,
            no_preshared_key: false,
            preshared_key_secret: false,
            public_key: None,
            machine: MachineArguments::default(),
        }
    }

    #[test]
    fn a_peer_gets_the_first_free_address_and_a_preshared_key() {
        let spec =
            spec(&arguments(&[]), PublicKey([1; 32]), &cluster(&["10.10.10.1/32", "10.10.10.2/32"])).unwrap();
        assert_eq!(spec.allowed_ips, ["10.10.10.3/32"]);
        assert!(spec.parse_preshared_key().unwrap().is_some());
        assert_eq!((spec.entry_nodes, spec.persistent_keepalive), (Some(vec!["gate".to_owned()]), Some(25)));
        let full = spec_error(&[], &["10.10.10.0/24"]);
        assert!(full.contains("no address of 10.10.10.0/24 is free"), "{full}");
    }

    fn spec_error(addresses: &[&str], claims: &[&str]) -> String {
        spec(&arguments(addresses), PublicKey([1; 32]), &cluster(claims)).unwrap_err().to_string()
    }

    #[test]
    fn what_belongs_to_others_is_refused_before_anything_is_made() {
        for address in ["10.64.3.1/32", "10.96.0.10/32", "10.9.0.1/32"] {
            assert!(spec_error(&[address], &["10.9.0.0/24"]).contains(address));
        }
        let unknown = cluster(&[]).check_nodes(&["gate".to_owned()]).unwrap_err();
        assert!(unknown.to_string().contains("node gate"), "{unknown}");
    }

    #[test]
    fn an_endpoint_is_an_address_or_a_name() {
        let host = |text: &str| {
            let PeerEndpoint { dns_or_ip: DnsOrIp { dns, ip }, port } = endpoint(text).unwrap();
            (dns, ip, port)
        };
        assert_eq!(host("gate.example:7"), (Some("gate.example".to_owned()), None, 7));
        assert_eq!(host("[2001:db8::1]:7"), (None, Some("2001:db8::1".to_owned()), 7));
        endpoint("nonsense").unwrap_err();
    }

    #[test]
    fn keys_are_clamped_and_differ() {
        let (one, two) = (new_private_key(), new_private_key());
        assert_ne!(one, two);
        assert_eq!((one.0[0] & 7, one.0[31] & 0xc0), (0, 0x40));
    }
}
