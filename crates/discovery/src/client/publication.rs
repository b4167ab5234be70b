//! Publication of a node within the limits of the protocol, without I/O.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use fairlead_address::AddressFilter;
use fairlead_wire::discovery::{Affiliate, ClusterSecret, DATA_OVERHEAD, MAX_DATA, MAX_ENDPOINTS};
use ipnet::IpNet;

/// Longest plaintext.
const MAX_PLAINTEXT: usize = MAX_DATA - DATA_OVERHEAD;

/// Description of this node, to be published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Local {
    /// Names, addresses and its part of the mesh; `node_id` is its identifier.
    pub affiliate: Affiliate,
    /// Endpoints of its WireGuard at its own addresses, the preferred ones first.
    pub endpoints: Vec<SocketAddr>,
    /// Endpoints that its operator names.
    pub extra_endpoints: Vec<SocketAddr>,
    /// Port of its WireGuard, which may be reached at the address that the server sees.
    pub port: Option<u16>,
    /// Filter of the address at which the server sees the node: only if it allows that, it is published.
    pub filter: AddressFilter,
}

/// Part that was left out because the protocol has no room for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Omission {
    /// Addresses of the node, the last ones.
    #[error("{0} addresses of the node are not published: the affiliate would be too long")]
    Addresses(usize),
    /// Endpoints of the node's own, the last ones.
    #[error("{0} endpoints are not published: the protocol permits {MAX_ENDPOINTS}")]
    Endpoints(usize),
    /// Prefixes were replaced by fewer that cover the same.
    #[error("{from} advertised networks are published as {to} that cover the same addresses")]
    Aggregated {
        /// Number of prefixes before they were aggregated.
        from: usize,
        /// Number of prefixes that are published.
        to: usize,
    },
    /// Prefixes, the longest ones.
    #[error("{0} advertised networks are not published: the affiliate would be too long")]
    Prefixes(usize),
}

/// Names alone, or prefixes that must not be left out, are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot publish this node: its names and excluded networks take {0} bytes, and the protocol permits {MAX_PLAINTEXT}"
)]
pub struct TooLong(pub usize);

/// Message to the server, encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// The encrypted affiliate.
    pub data: Vec<u8>,
    /// Encrypted endpoints.
    pub endpoints: Vec<Vec<u8>>,
    /// Parts that are left out.
    pub omissions: Vec<Omission>,
}

impl Publication {
    /// Encrypts what a node says of itself. `client_ip` is where the server sees it; the nonce is random.
    ///
    /// # Errors
    /// See [`TooLong`].
    pub fn new(
        local: &Local,
        client_ip: Option<IpAddr>,
        secret: &ClusterSecret,
        nonce: [u8; 12],
    ) -> Result<Self, TooLong> {
        let mut omissions = Vec::new();
        let endpoints = endpoints(local, client_ip, &mut omissions);
        let plaintext = fit(local.affiliate.clone(), &mut omissions)?;
        let data = secret.seal_data(nonce, &plaintext).map_err(|_| TooLong(plaintext.len()))?;
        let endpoints = endpoints.into_iter().map(|endpoint| secret.seal_endpoint(endpoint)).collect();
        Ok(Self { data, endpoints, omissions })
    }
}

/// The node's own, then those of its operator, then where the server sees it. If there are too many, the last of its own are left out:
/// it has many alike, and the others may be the only ones that are reached.
fn endpoints(local: &Local, client_ip: Option<IpAddr>, omissions: &mut Vec<Omission>) -> Vec<SocketAddr> {
    let seen = client_ip
        .filter(|ip| local.filter.allows(*ip))
        .zip(local.port)
        .map(|(ip, port)| SocketAddr::new(ip, port));
    let canonical = |endpoint: &SocketAddr| SocketAddr::new(endpoint.ip().to_canonical(), endpoint.port());
    let is_usable = |endpoint: &SocketAddr| endpoint.port() != 0;
    let own = local.endpoints.iter().map(canonical).filter(is_usable);
    let others: Vec<_> =
        local.extra_endpoints.iter().chain(seen.as_ref()).map(canonical).filter(is_usable).collect();
    let kept: BTreeSet<SocketAddr> = others.iter().copied().collect();
    let mut known = BTreeSet::new();
    let mut endpoints: Vec<_> = own.chain(others).filter(|endpoint| known.insert(*endpoint)).collect();
    let beyond = endpoints.len().saturating_sub(MAX_ENDPOINTS);
    omissions.extend((beyond > 0).then_some(Omission::Endpoints(beyond)));
    let mut room = MAX_ENDPOINTS.saturating_sub(kept.len());
    endpoints.retain(|endpoint| {
        let is_kept = kept.contains(endpoint) || room > 0;
        room = room.saturating_sub(usize::from(!kept.contains(endpoint)));
        is_kept
    });
    endpoints.truncate(MAX_ENDPOINTS);
    endpoints
}

fn fit(mut affiliate: Affiliate, omissions: &mut Vec<Omission>) -> Result<Vec<u8>, TooLong> {
    if fits(&affiliate) {
        return Ok(affiliate.encode());
    }
    if let Some(kubespan) = &mut affiliate.kubespan {
        let prefixes = &mut kubespan.additional_addresses;
        let from = prefixes.len();
        *prefixes = IpNet::aggregate(prefixes);
        let to = prefixes.len();
        omissions.extend((to < from).then_some(Omission::Aggregated { from, to }));
        // The shortest cover most.
        prefixes.sort_by_key(IpNet::prefix_len);
        kubespan.exclude_advertised_addresses = IpNet::aggregate(&kubespan.exclude_advertised_addresses);
    }
    let prefixes =
        shorten(&mut affiliate, |affiliate| Some(&mut affiliate.kubespan.as_mut()?.additional_addresses));
    omissions.extend((prefixes > 0).then_some(Omission::Prefixes(prefixes)));
    let addresses = shorten(&mut affiliate, |affiliate| Some(&mut affiliate.addresses));
    omissions.extend((addresses > 0).then_some(Omission::Addresses(addresses)));
    if fits(&affiliate) { Ok(affiliate.encode()) } else { Err(TooLong(affiliate.encode().len())) }
}

fn fits(affiliate: &Affiliate) -> bool {
    affiliate.encode().len() <= MAX_PLAINTEXT
}

/// Removes as few of the last items of a list as makes the affiliate fit, or all. How many it removed.
fn shorten<T: Clone>(
    affiliate: &mut Affiliate,
    list: impl Fn(&mut Affiliate) -> Option<&mut Vec<T>>,
) -> usize {
    let all = list(affiliate).cloned().unwrap_or_default();
    let mut fits_with = |count: usize| {
        if let Some(list) = list(affiliate) {
            list.clear();
            list.extend(all.iter().take(count).cloned());
        }
        fits(affiliate)
    };
    // Whether it fits only changes once as the list grows.
    let mut kept = 0;
    let mut beyond = all.len().saturating_add(1);
    while beyond.saturating_sub(kept) > 1 {
        let middle = kept.midpoint(beyond);
        if fits_with(middle) {
            kept = middle;
        } else {
            beyond = middle;
        }
    }
    fits_with(kept);
    all.len().saturating_sub(kept)
}

#[cfg(test)]
mod tests {
    use fairlead_wire::discovery::KubeSpan;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn secret() -> ClusterSecret {
        ClusterSecret::new([7; 32])
    }

    fn local(prefixes: Vec<IpNet>, excluded: Vec<IpNet>) -> Local {
        let kubespan = KubeSpan {
            additional_addresses: prefixes,
            exclude_advertised_addresses: excluded,
            ..Default::default()
        };
        let affiliate = Affiliate {
            node_id: "n".to_owned(),
            addresses: vec!["192.0.2.1".parse().unwrap()],
            kubespan: Some(kubespan),
            ..Default::default()
        };
        Local { affiliate, ..Default::default() }
    }

    fn published(local: &Local, client_ip: Option<IpAddr>) -> (Affiliate, Vec<SocketAddr>, Vec<Omission>) {
        let publication = Publication::new(local, client_ip, &secret(), [1; 12]).unwrap();
        assert!(publication.data.len() <= MAX_DATA);
        let plaintext = secret().open_data(&publication.data).unwrap();
        let endpoints = publication.endpoints.iter().map(|sealed| secret().open_endpoint(sealed).unwrap());
        (Affiliate::parse(&plaintext).unwrap().0, endpoints.collect(), publication.omissions)
    }

    fn prefixes(count: u32, step: u32) -> Vec<IpNet> {
        let net =
            |n: u32| IpNet::new(IpAddr::from((0x0a00_0000 + n * step * 256).to_be_bytes()), 24).unwrap();
        (0..count).map(net).collect()
    }

    #[test]
    fn a_short_affiliate_is_published_as_it_is() {
        let local = local(prefixes(10, 1), Vec::new());
        let (affiliate, _, omissions) = published(&local, None);
        assert_eq!((affiliate, omissions), (local.affiliate, Vec::new()));
    }

    #[test]
    fn prefixes_are_aggregated_before_any_is_left_out() {
        let (affiliate, _, omissions) = published(&local(prefixes(256, 1), Vec::new()), None);
        assert_eq!(affiliate.kubespan.unwrap().additional_addresses, ["10.0.0.0/16".parse().unwrap()]);
        assert_eq!(omissions, [Omission::Aggregated { from: 256, to: 1 }]);
        let mut many = prefixes(1000, 2);
        many.push("172.16.0.0/12".parse().unwrap());
        let (affiliate, _, omissions) = published(&local(many, Vec::new()), None);
        let kept = affiliate.kubespan.unwrap().additional_addresses;
        assert_eq!(kept[0], "172.16.0.0/12".parse().unwrap(), "the shortest stay");
        assert_eq!(omissions, [Omission::Prefixes(1001 - kept.len())]);
        assert!(kept.len() > 150, "{}", kept.len());
    }

    #[test]
    fn excluded_networks_are_never_left_out() {
        let long = local(Vec::new(), prefixes(1000, 2));
        let error = Publication::new(&long, None, &secret(), [1; 12]).unwrap_err();
        assert!(error.to_string().contains("excluded networks"), "{error}");
    }

    #[test]
    fn endpoints_are_the_nodes_own_first_and_at_most_64() {
        let endpoint = |n: u16| SocketAddr::from(([192, 0, 2, 1], n));
        let mut few = local(Vec::new(), Vec::new());
        few.endpoints = vec!["[::ffff:192.0.2.1]:1".parse().unwrap(), endpoint(1), endpoint(0)];
        few.extra_endpoints = vec![endpoint(2), endpoint(1)];
        few.port = Some(51820);
        let (_, endpoints, omissions) = published(&few, "198.51.100.7".parse().ok());
        let seen = "198.51.100.7:51820".parse().unwrap();
        assert_eq!((endpoints, omissions), (vec![endpoint(1), endpoint(2), seen], vec![]));
        few.filter =
            AddressFilter::new(["0.0.0.0/0", "!198.51.100.0/24"].map(|entry| entry.parse().unwrap()));
        assert_eq!(published(&few, "198.51.100.7".parse().ok()).1, [endpoint(1), endpoint(2)]);
        assert_eq!(published(&few, "203.0.113.7".parse().ok()).1.len(), 3);
        few.filter = AddressFilter::default();
        few.port = None;
        assert_eq!(published(&few, "198.51.100.7".parse().ok()).1.len(), 2);
        few.endpoints = (1..=70).map(endpoint).collect();
        let (_, endpoints, omissions) = published(&few, None);
        assert_eq!((endpoints.len(), omissions), (64, vec![Omission::Endpoints(6)]));
    }

    #[test]
    fn endpoints_of_the_operator_and_of_the_server_stay_when_there_are_too_many() {
        let endpoint = |n: u16| SocketAddr::from(([192, 0, 2, 1], n));
        let mut many = local(Vec::new(), Vec::new());
        many.endpoints = (1..=70).map(endpoint).collect();
        // One that is its own, too.
        many.extra_endpoints = vec![endpoint(101), endpoint(70), endpoint(102)];
        many.port = Some(51820);
        let (_, endpoints, omissions) = published(&many, "198.51.100.7".parse().ok());
        let kept = ["192.0.2.1:70", "192.0.2.1:101", "192.0.2.1:102", "198.51.100.7:51820"];
        let expected: Vec<_> = (1..=60).map(endpoint).chain(kept.map(|text| text.parse().unwrap())).collect();
        assert_eq!((endpoints, omissions), (expected, vec![Omission::Endpoints(9)]));
        many.extra_endpoints = (101..=200).map(endpoint).collect();
        let (_, endpoints, _) = published(&many, "198.51.100.7".parse().ok());
        assert_eq!((endpoints.len(), endpoints[0]), (64, endpoint(101)), "more than the protocol permits");
    }

    proptest! {
        #[test]
        fn what_is_published_covers_nothing_more(bits in vec((any::<u32>(), 8..=32_u8), 0..600)) {
            let net = |(ip, bits): (u32, u8)| IpNet::new(IpAddr::from(ip.to_be_bytes()), bits).unwrap().trunc();
            let all: Vec<IpNet> = bits.into_iter().map(net).collect();
            let covered = IpNet::aggregate(&all);
            let (affiliate, ..) = published(&local(all, Vec::new()), None);
            for prefix in affiliate.kubespan.unwrap().additional_addresses {
                prop_assert!(covered.iter().any(|net| net.contains(&prefix)), "{}", prefix);
            }
        }
    }
}
