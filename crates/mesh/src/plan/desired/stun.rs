//! STUN servers that this node asks.

use std::net::SocketAddr;

use super::host::Host;
use super::nat64;
use crate::model::inputs::Inputs;

/// The STUN servers to ask, each once; through the NAT64 those that this node has no route to.
pub fn stun_servers(inputs: &Inputs, host: &Host) -> Vec<SocketAddr> {
    let (nat64, _) = nat64::usable(inputs, &host.addresses, &host.ipv4_routes);
    let mut servers = Vec::new();
    for server in inputs.stun_servers() {
        let translated = nat64.endpoints(server).into_iter().next();
        let server = translated.unwrap_or(server);
        if !servers.contains(&server) {
            servers.push(server);
        }
    }
    servers
}
