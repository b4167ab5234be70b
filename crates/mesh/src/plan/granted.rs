//! Addresses of this host that a grant brings into the mesh, beside those that its Node object has: a second network card, or a virtual
//! address for as long as it is here. Pure.
//!
//! Receivers judge such a claim by the same grant, so a node that claims what it has not been granted is not believed.

use std::net::IpAddr;
use std::sync::Arc;

use fairlead_topology::Member;
use ipnet::IpNet;

use crate::model::inputs::Inputs;

/// Shortest prefix of a grant that says which addresses a node may have: `0.0.0.0/0` and its parts are about other networks' hosts.
const MIN_LENGTH: u8 = 8;

/// Keeps the inputs with these claims, so that the same are the same allocation.
#[derive(Debug, Default)]
pub(crate) struct GrantedAddresses {
    last: Option<Last>,
}

#[derive(Debug)]
struct Last {
    inputs: Arc<Inputs>,
    granted: Vec<IpAddr>,
    extended: Arc<Inputs>,
}

impl GrantedAddresses {
    /// The inputs with claims on those of this host's addresses that are granted to this node.
    pub(crate) fn extend(&mut self, inputs: &Arc<Inputs>, host: &[IpAddr]) -> Arc<Inputs> {
        let granted = granted(inputs, host);
        if granted.is_empty() {
            self.last = None;
            return Arc::clone(inputs);
        }
        if let Some(last) = &self.last
            && (&last.granted, &last.inputs) == (&granted, inputs)
        {
            return Arc::clone(&last.extended);
        }
        let extended = Arc::new(with_claims(inputs, &granted));
        self.last = Some(Last { inputs: Arc::clone(inputs), granted, extended: Arc::clone(&extended) });
        extended
    }
}

/// Addresses of the Node object are not among them: whether the mesh carries those, it says itself. What the Node excludes is not, either.
fn granted(inputs: &Inputs, host: &[IpAddr]) -> Vec<IpAddr> {
    let Some(grants) = inputs.settings.routing.grants.get(&inputs.node) else { return Vec::new() };
    let own = inputs.members.iter().find(|member| member.name == inputs.node);
    let of_node = own.and_then(|own| own.addresses.node.as_deref()).unwrap_or_default();
    let on_mesh = own.map(|own| own.addresses.mesh.as_slice()).unwrap_or_default();
    let is_granted = |address: &IpAddr| {
        grants.iter().any(|grant| grant.prefix_len() >= MIN_LENGTH && grant.contains(address))
    };
    let is_known = |address: &IpAddr| {
        inputs.own.claims.contains(address)
            || inputs.own.addresses.contains(address)
            || of_node.contains(address)
            || on_mesh.contains(address)
    };
    let is_excluded =
        |address: &IpAddr| inputs.own.filters.excluded.iter().any(|prefix| prefix.contains(address));
    let is_claimed = |address: &&IpAddr| is_granted(address) && !is_known(address) && !is_excluded(address);
    let mut granted: Vec<IpAddr> = host.iter().filter(is_claimed).copied().collect();
    granted.sort_unstable();
    granted
}

fn with_claims(inputs: &Inputs, granted: &[IpAddr]) -> Inputs {
    let mut extended = inputs.clone();
    extended.own.claims.extend(granted);
    for own in extended.members.iter_mut().filter(|member| member.name == inputs.node) {
        let claims = own.claims.iter().copied().chain(granted.iter().copied().map(IpNet::from)).collect();
        *own = Arc::new(Member { claims, ..Member::clone(own) });
    }
    extended
}

#[cfg(test)]
mod tests {
    use fairlead_topology::MemberAddresses;

    use super::*;
    use crate::plan::desired::tests::{inputs, member};

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn granting(cidrs: &[&str]) -> Inputs {
        let mut inputs = inputs([member(1), member(2)]);
        let cidrs = cidrs.iter().map(|text| text.parse().unwrap()).collect();
        inputs.settings.routing.grants = [("node-0001".to_owned(), cidrs)].into();
        inputs
    }

    /// Addresses that this node claims beside 10.0.0.1 if its host has the addresses `host`.
    fn claimed(inputs: Inputs, host: &[&str]) -> Vec<IpAddr> {
        let host: Vec<IpAddr> = host.iter().map(|text| address(text)).collect();
        let extended = GrantedAddresses::default().extend(&Arc::new(inputs), &host);
        let own = extended.members.iter().find(|member| member.name == "node-0001").unwrap();
        let of_member: Vec<IpAddr> = own.claims.iter().map(IpNet::addr).collect();
        assert_eq!(of_member, extended.own.claims, "the member says the same as what is published");
        extended.own.claims[1..].to_vec()
    }

    #[test]
    fn an_address_counts_that_an_interface_has_and_a_grant_names() {
        let host = ["10.0.0.1", "172.30.0.5", "172.30.1.5", "fd00:30::5", "192.0.2.1"];
        let of = |cidrs: &[&str]| claimed(granting(cidrs), &host);
        assert_eq!(of(&["172.30.0.5/32", "fd00:30::/64"]), ["172.30.0.5", "fd00:30::5"].map(address));
        assert_eq!(of(&["172.30.0.0/16"]), ["172.30.0.5", "172.30.1.5"].map(address));
        assert!(of(&["172.30.0.6/32"]).is_empty(), "no interface has it");
        assert!(of(&[]).is_empty());
        assert!(of(&["10.0.0.1/32"]).is_empty(), "it is claimed already");
    }

    #[test]
    fn a_grant_of_everything_or_to_another_node_brings_no_address() {
        let host = ["10.0.0.1", "172.17.0.1", "192.0.2.100"];
        assert!(claimed(granting(&["0.0.0.0/0", "128.0.0.0/1", "::/0"]), &host).is_empty());
        let mut others = granting(&[]);
        others.settings.routing.grants =
            [("node-0002".to_owned(), vec!["192.0.2.100/32".parse().unwrap()])].into();
        assert!(claimed(others, &host).is_empty());
    }

    #[test]
    fn addresses_that_are_to_stay_out_of_the_mesh_and_those_on_it_are_not_claimed_as_granted() {
        let mut inputs = granting(&["10.0.0.0/8"]);
        inputs.own.claims.clear();
        for own in inputs.members.iter_mut().filter(|member| member.name == "node-0001") {
            let (node, mesh) = (Some(vec![address("10.0.0.1")]), vec![address("10.99.0.1")]);
            let addresses = MemberAddresses { mesh, node, ..MemberAddresses::default() };
            *own = Arc::new(Member { claims: vec![], addresses, ..Member::clone(own) });
        }
        let inputs = Arc::new(inputs);
        let host = ["10.0.0.1", "10.99.0.1"].map(address);
        assert!(Arc::ptr_eq(&GrantedAddresses::default().extend(&inputs, &host), &inputs));
    }

    #[test]
    fn what_a_node_excludes_is_not_claimed_though_it_is_granted() {
        let mut inputs = granting(&["172.30.0.0/16"]);
        inputs.own.filters.excluded = vec!["172.30.1.0/24".parse().unwrap()];
        assert_eq!(claimed(inputs, &["172.30.0.5", "172.30.1.5"]), [address("172.30.0.5")]);
    }

    #[test]
    fn the_same_is_the_same_allocation_and_an_address_that_goes_is_not_claimed_any_more() {
        let (mut addresses, inputs) = (GrantedAddresses::default(), Arc::new(granting(&["172.30.0.0/16"])));
        let first = addresses.extend(&inputs, &["10.0.0.1", "172.30.0.5"].map(address));
        let again = addresses.extend(&inputs, &["172.30.0.5", "10.0.0.1"].map(address));
        assert!(Arc::ptr_eq(&first, &again));
        assert!(Arc::ptr_eq(&addresses.extend(&inputs, &["10.0.0.1"].map(address)), &inputs));
        let moved = addresses.extend(&inputs, &["172.30.0.6"].map(address));
        assert_eq!(moved.own.claims, ["10.0.0.1", "172.30.0.6"].map(address));
    }
}
