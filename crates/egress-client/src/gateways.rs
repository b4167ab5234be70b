//! Interface between the egress of pods and the registrar.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_egress::EgressName;
use fairlead_egress::client::plan::NextHop;
use tokio::sync::watch;

use super::registrar::{Client, Registrar};

/// Gateways of all Egresses, as the egress of pods asks them.
#[tonic::async_trait]
pub(crate) trait Gateways: Send + Sync {
    /// All clients of each Egress on this node.
    fn set_clients(&self, clients: BTreeMap<EgressName, Vec<Client>>);
    /// Adds one client before [`Self::set_clients`] does.
    fn add_client(&self, egress: &EgressName, client: Client);
    /// Gateways of these Egresses may have clients of this node from before the start, and are told which there are, even if none.
    fn expect_clients(&self, egresses: BTreeSet<EgressName>);
    /// Removes it again.
    fn remove_client(&self, egress: &EgressName, uid: &str);
    /// Resolves as soon as its packets can be sent to a gateway, or all gateways have refused it: then with the reason.
    async fn registered(&self, egress: &EgressName, uid: &str) -> Result<(), String>;
    /// NextHop of a client's packets at present.
    fn next_hop(&self, egress: &EgressName, uid: &str) -> NextHop;
    /// Addresses of all gateways of an Egress.
    fn addresses(&self, _: &EgressName) -> BTreeSet<IpAddr> {
        BTreeSet::new()
    }
    /// Changes whenever [`Self::next_hop`] may return something else.
    fn changes(&self) -> watch::Receiver<u64>;
}

#[tonic::async_trait]
impl Gateways for Registrar {
    fn set_clients(&self, clients: BTreeMap<EgressName, Vec<Client>>) {
        Self::set_clients(self, clients);
    }

    fn add_client(&self, egress: &EgressName, client: Client) {
        Self::add_client(self, egress, client);
    }

    fn expect_clients(&self, egresses: BTreeSet<EgressName>) {
        Self::expect_clients(self, egresses);
    }

    fn remove_client(&self, egress: &EgressName, uid: &str) {
        Self::remove_client(self, egress, uid);
    }

    async fn registered(&self, egress: &EgressName, uid: &str) -> Result<(), String> {
        Self::registered(self, egress, uid).await.map_err(|error| format!("{error} ({})", error.reason()))
    }

    fn next_hop(&self, egress: &EgressName, uid: &str) -> NextHop {
        Self::next_hop(self, egress, uid)
    }

    fn addresses(&self, egress: &EgressName) -> BTreeSet<IpAddr> {
        Self::addresses(self, egress)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        Self::changes(self)
    }
}
