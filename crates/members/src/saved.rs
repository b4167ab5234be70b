//! Members in a file of the state directory: with it a node comes up again while no source answers.

pub mod cluster;
mod departed;
pub mod discovery;
pub mod in_tunnels;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use fairlead_keys::{PresharedKey, PublicKey};
use fairlead_topology::{
    ByDiscovery, Endpoints, External, InternalAddress, Keepalive, Member, MemberAddresses, Since, Site,
    Sources,
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use self::departed::SavedDepartures;

/// A [`Member`].
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedMember {
    name: String,
    public_key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next_key: Option<String>,
    claims: Vec<IpNet>,
    blocks: Vec<IpNet>,
    #[serde(default)]
    pod_networks: Vec<IpNet>,
    #[serde(flatten)]
    addresses: SavedAddresses,
    #[serde(flatten)]
    endpoints: SavedEndpoints,
    #[serde(flatten)]
    keepalive: SavedKeepalive,
    #[serde(default)]
    site: Option<SavedSite>,
    since: Option<(i64, String)>,
    #[serde(default)]
    entry_terms: BTreeMap<String, (String, u64)>,
    /// Facts of a member that is no node; `None` for nodes.
    #[serde(default)]
    external: Option<SavedExternal>,
    #[serde(default)]
    needs_preshared_key: bool,
}

/// [`MemberAddresses`], among the fields of the member.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedAddresses {
    addresses: Option<Vec<IpAddr>>,
    #[serde(default)]
    mesh_addresses: Vec<IpAddr>,
    /// Programs that left it out let the claims count.
    #[serde(default)]
    is_unconfirmed: bool,
    #[serde(default)]
    is_control_plane: bool,
}

/// [`Endpoints`], among the fields of the member.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedEndpoints {
    manual: Option<String>,
    preferred: Option<SocketAddr>,
    host: Vec<SocketAddr>,
    reflexive: Vec<SocketAddr>,
    #[serde(default)]
    discovered: Vec<SocketAddr>,
    sightings: BTreeMap<String, (String, SocketAddr)>,
    is_nat_symmetric: bool,
    #[serde(default)]
    is_nat_port_restricted: bool,
    #[serde(default)]
    birthday_attack: Option<bool>,
}

/// Keepalives of a member, among its fields.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedKeepalive {
    persistent_keepalive: Option<u16>,
    #[serde(default)]
    always_sends_keepalives: bool,
}

/// A [`Site`].
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedSite {
    location: String,
    internal: Vec<(IpAddr, Option<u8>)>,
    #[serde(default)]
    is_leader: bool,
    #[serde(default)]
    is_public: bool,
    #[serde(default)]
    networks: Vec<IpNet>,
}

/// Facts of a member that is no node. The preshared key is here as the private key is beside it: only the owner may
/// read either file.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedExternal {
    preshared_key: Option<String>,
    #[serde(default)]
    entry_nodes: Vec<String>,
}

impl From<&Member> for SavedMember {
    fn from(member: &Member) -> Self {
        let Member {
            name,
            public_key,
            next_key,
            claims,
            blocks,
            pod_networks,
            addresses,
            endpoints,
            keepalive: Keepalive { interval, always_sends },
            site,
            since,
            entry_terms,
            external,
            // Sources have to tell of it again.
            sources: _,
            discovery: ByDiscovery { is_only_source: _, needs_preshared_key },
        } = member.clone();
        Self {
            name,
            public_key: public_key.map(|key| key.to_string()),
            next_key: next_key.map(|key| key.to_string()),
            claims,
            blocks,
            pod_networks,
            addresses: SavedAddresses {
                addresses: addresses.node,
                mesh_addresses: addresses.mesh,
                is_unconfirmed: addresses.is_unconfirmed,
                is_control_plane: addresses.is_control_plane,
            },
            endpoints: endpoints.into(),
            keepalive: SavedKeepalive {
                persistent_keepalive: interval,
                always_sends_keepalives: always_sends,
            },
            site: site.map(SavedSite::from),
            since: since.map(|since| (since.created, since.uid)),
            entry_terms: entry_terms
                .into_iter()
                .map(|(peer, (key, term))| (peer, (key.to_string(), term)))
                .collect(),
            external: external.map(|External { preshared_key, entry_nodes }| SavedExternal {
                preshared_key: preshared_key.map(|key| key.to_base64()),
                entry_nodes,
            }),
            needs_preshared_key,
        }
    }
}

impl TryFrom<SavedMember> for Member {
    type Error = anyhow::Error;

    fn try_from(saved: SavedMember) -> Result<Self> {
        let term =
            |(peer, (key, term)): (String, (String, u64))| Ok((peer, (key.parse::<PublicKey>()?, term)));
        Ok(Self {
            name: saved.name,
            public_key: saved.public_key.map(|key| key.parse()).transpose()?,
            next_key: saved.next_key.map(|key| key.parse()).transpose()?,
            claims: saved.claims,
            blocks: saved.blocks,
            pod_networks: saved.pod_networks,
            addresses: MemberAddresses {
                mesh: saved.addresses.mesh_addresses,
                node: saved.addresses.addresses,
                is_unconfirmed: saved.addresses.is_unconfirmed,
                is_control_plane: saved.addresses.is_control_plane,
            },
            endpoints: saved.endpoints.try_into()?,
            keepalive: Keepalive {
                interval: saved.keepalive.persistent_keepalive,
                always_sends: saved.keepalive.always_sends_keepalives,
            },
            site: saved.site.map(Site::from),
            since: saved.since.map(|(created, uid)| Since { created, uid }),
            entry_terms: saved.entry_terms.into_iter().map(term).collect::<Result<_>>()?,
            external: saved.external.map(External::try_from).transpose()?,
            sources: Sources::default(),
            discovery: ByDiscovery { is_only_source: false, needs_preshared_key: saved.needs_preshared_key },
        })
    }
}

impl From<Endpoints> for SavedEndpoints {
    fn from(endpoints: Endpoints) -> Self {
        let Endpoints {
            manual,
            preferred,
            host,
            reflexive,
            discovered,
            sightings,
            is_nat_symmetric,
            is_nat_port_restricted,
            birthday_attack,
            // A filter of what others may publish, and nothing is published until the API server is back.
            filter: _,
        } = endpoints;
        let text = |(key, endpoint): (PublicKey, SocketAddr)| (key.to_string(), endpoint);
        Self {
            manual: manual.map(|endpoint| endpoint.to_string()),
            preferred,
            host,
            reflexive,
            discovered,
            sightings: sightings.into_iter().map(|(name, seen)| (name, text(seen))).collect(),
            is_nat_symmetric,
            is_nat_port_restricted,
            birthday_attack,
        }
    }
}

impl TryFrom<SavedEndpoints> for Endpoints {
    type Error = anyhow::Error;

    fn try_from(saved: SavedEndpoints) -> Result<Self> {
        let parsed = |(name, (key, endpoint)): (String, (String, SocketAddr))| {
            Ok((name, (key.parse::<PublicKey>()?, endpoint)))
        };
        Ok(Self {
            manual: saved.manual.map(|endpoint| endpoint.parse()).transpose()?,
            preferred: saved.preferred,
            host: saved.host,
            reflexive: saved.reflexive,
            discovered: saved.discovered,
            sightings: saved.sightings.into_iter().map(parsed).collect::<Result<_>>()?,
            is_nat_symmetric: saved.is_nat_symmetric,
            is_nat_port_restricted: saved.is_nat_port_restricted,
            birthday_attack: saved.birthday_attack,
            filter: None,
        })
    }
}

impl From<Site> for SavedSite {
    fn from(site: Site) -> Self {
        let Site { location, internal, is_leader, is_public, networks } = site;
        let internal = internal.into_iter().map(|it| (it.address, it.length)).collect();
        Self { location, internal, is_leader, is_public, networks }
    }
}

impl From<SavedSite> for Site {
    fn from(saved: SavedSite) -> Self {
        let SavedSite { location, internal, is_leader, is_public, networks } = saved;
        let internal = internal.into_iter().map(|(address, length)| InternalAddress { address, length });
        Self { location, internal: internal.collect(), is_leader, is_public, networks }
    }
}

impl TryFrom<SavedExternal> for External {
    type Error = anyhow::Error;

    fn try_from(saved: SavedExternal) -> Result<Self> {
        let preshared_key = saved.preshared_key.map(|key| key.parse::<PresharedKey>()).transpose()?;
        Ok(Self { preshared_key, entry_nodes: saved.entry_nodes })
    }
}
