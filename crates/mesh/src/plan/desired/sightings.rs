//! Sightings: endpoints at which members see each other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_keys::PublicKey;
use fairlead_topology::Member;

use crate::model::inputs::Inputs;

/// Endpoints at which members see each other, by the name of the member that is seen.
pub(super) struct Sightings<'a>(BTreeMap<&'a str, Vec<(&'a Member, PublicKey, SocketAddr)>>);

impl<'a> Sightings<'a> {
    pub(super) fn new(members: &'a [Arc<Member>]) -> Self {
        let mut by_name: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for observer in members {
            let observer = &**observer;
            for (name, (key, endpoint)) in &observer.endpoints.sightings {
                if *name != observer.name {
                    by_name.entry(name).or_default().push((observer, *key, *endpoint));
                }
            }
        }
        Self(by_name)
    }

    /// Endpoints at which other members see `name` with this identity.
    pub(super) fn of(&self, name: &str, key: &PublicKey) -> impl Iterator<Item = (&'a Member, SocketAddr)> {
        let seen = self.0.get(name).into_iter().flatten();
        seen.filter(move |(_, seen, _)| seen == key).map(|(observer, _, endpoint)| (*observer, *endpoint))
    }

    /// Endpoints at which other members see this node. Members that have not followed it to its key yet see it, too.
    pub(super) fn of_own(&self, inputs: &Inputs) -> impl Iterator<Item = (&'a Member, SocketAddr)> {
        let keys = [Some(inputs.keys.public), inputs.keys.previous];
        let seen = self.0.get(inputs.node.as_str()).into_iter().flatten();
        let is_own = move |key: &PublicKey| keys.contains(&Some(*key));
        seen.filter(move |(_, seen, _)| is_own(seen)).map(|(observer, _, endpoint)| (*observer, *endpoint))
    }

    /// The distinct endpoints of [`Self::of_own`], in a stable order.
    pub(super) fn own_endpoints(&self, inputs: &Inputs) -> Vec<SocketAddr> {
        let distinct: BTreeSet<SocketAddr> = self.of_own(inputs).map(|(_, endpoint)| endpoint).collect();
        distinct.into_iter().collect()
    }

    /// The distinct endpoints of [`Self::of`], in a stable order.
    pub(super) fn endpoints(&self, name: &str, key: &PublicKey) -> Vec<SocketAddr> {
        let distinct: BTreeSet<SocketAddr> = self.of(name, key).map(|(_, endpoint)| endpoint).collect();
        distinct.into_iter().collect()
    }
}
