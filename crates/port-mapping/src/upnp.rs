//! UPnP IGD: the search for the gateway, and its actions over HTTP.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use fairlead_address::is_private;
use fairlead_wire::http::{Response, parse_response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::codec::upnp::{
    self, Action, Answer, Location, PortMapping, SEARCH_GROUP, SEARCH_PORT, SEARCH_TARGETS, Service,
    ServiceType,
};
use crate::socket::{self, ANSWER_WITHIN, MAX_DATAGRAM};
use crate::{Failure, Mapping, Protocol, Request};

/// Times of the searches, from the beginning on.
const SEARCHED_AT: [Duration; 2] = [Duration::ZERO, Duration::from_millis(300)];
/// Most datagrams that are read in search of the gateway.
const MAX_ANSWERS: usize = 64;
/// Longest description or answer; those of real gateways have a few KiB.
const MAX_RESPONSE: u64 = 128 * 1024;
/// Longest time for one HTTP exchange.
const RESPONSE_WITHIN: Duration = Duration::from_secs(1);
/// Most external ports that are tried for one mapping, with the wanted one.
const MAX_PORTS: usize = 4;
/// Range of the random ports that are tried after the wanted one.
const OTHER_PORTS: std::ops::Range<u16> = 1024..65_535;
/// Shown by the gateway to its owner.
const DESCRIPTION: &str = "Fairlead";
/// Error codes (WANIPConnection:2, section 2.5).
const CONFLICT: u16 = 718;
const ONLY_PERMANENT: u16 = 725;
const NO_SUCH_ENTRY: u16 = 714;
/// Error codes of a gateway that does not have the action.
const INVALID_ACTION: [u16; 2] = [401, 602];

/// Looks for the gateway's best service.
pub(crate) async fn discover(request: &Request) -> Result<Service, Failure> {
    let IpAddr::V4(gateway) = request.gateway else { return Err(Failure::NoAnswer) };
    let location = search(request, gateway).await?;
    let description = fetch(request, &location, &upnp::description_request(&location)).await;
    let (_, description) =
        description.map_err(|error| refused(&format!("cannot read its description: {error}")))?;
    upnp::best_service(&description, &location).ok_or_else(|| refused("it has no service that maps ports"))
}

async fn search(request: &Request, gateway: Ipv4Addr) -> Result<Location, Failure> {
    let socket = socket::search(request).map_err(|_| Failure::NoAnswer)?;
    let began = Instant::now();
    let send = async {
        for after in SEARCHED_AT {
            sleep_until(began + after).await;
            for ip in [gateway, SEARCH_GROUP] {
                let to = SocketAddr::from((ip, SEARCH_PORT));
                for target in SEARCH_TARGETS {
                    drop(socket.send_to(upnp::search_request(target, to).as_bytes(), to).await);
                }
            }
        }
        std::future::pending::<()>().await;
    };
    let mut is_elsewhere = false;
    let receive = async {
        let mut buffer = [0; MAX_DATAGRAM];
        for _ in 0..MAX_ANSWERS {
            let Ok((length, from)) = socket.recv_from(&mut buffer).await else { break };
            // Other devices of the network answer too.
            let datagram = buffer.get(..length).filter(|_| from.ip() == request.gateway);
            match datagram.and_then(upnp::parse_search_response) {
                Some(location) if location.address.ip() == request.gateway => return Some(location),
                Some(_) => is_elsewhere = true,
                None => {}
            }
        }
        None
    };
    let found = tokio::select! {
        () = send => return Err(Failure::NoAnswer),
        found = timeout_at(began + ANSWER_WITHIN, receive) => found,
    };
    match found.ok().flatten() {
        Some(location) => Ok(location),
        None if is_elsewhere => Err(refused("its description is at another host, which is not asked")),
        None => Err(Failure::NoAnswer),
    }
}

/// Asks for a mapping, at `wanted` outside if that is free. A port of another host is never taken.
pub(crate) async fn map(
    request: &Request,
    service: &Service,
    wanted: u16,
    lifetime: u32,
) -> Result<Mapping, Failure> {
    let (answer, client) = act(request, service, &Action::GetExternalIpAddress).await?;
    let address = answer.external_address.filter(|address| !address.is_unspecified());
    let address = address.ok_or(Failure::NoOuterAddress { protocol: Protocol::Upnp })?;
    // A node that knows that it is of no use leaves nothing at the gateway.
    Mapping::new(Protocol::Upnp, SocketAddr::new(address, wanted), lifetime)?;
    let client = SocketAddr::new(client, request.port);
    let mut refusal = refused(upnp::refusal(CONFLICT));
    let others = (1..MAX_PORTS).map(|_| rand::random_range(OTHER_PORTS));
    for external_port in std::iter::once(wanted).chain(others) {
        let mapping = PortMapping { external_port, client, description: DESCRIPTION, lease: lifetime };
        match add(request, service, mapping).await? {
            Ok(port) => return Mapping::new(Protocol::Upnp, SocketAddr::new(address, port), lifetime),
            Err(code) => refusal = refusal_of(code, address),
        }
    }
    Err(refusal)
}

/// The failure of a request with this error code, to a gateway with this address outside.
fn refusal_of(code: u16, external: IpAddr) -> Failure {
    let is_of_the_port = upnp::refusal(code) == upnp::refusal(CONFLICT);
    if is_private(external) && !is_of_the_port {
        return Failure::PrivateOuterAddress { protocol: Protocol::Upnp, address: external };
    }
    refused(upnp::refusal(code))
}

/// Deletes the mapping of an external port.
pub(crate) async fn delete(request: &Request, service: &Service, external_port: u16) {
    drop(act(request, service, &Action::DeletePortMapping(external_port)).await);
}

/// Adds a mapping; the port, or the code with which this port is refused.
async fn add(
    request: &Request,
    service: &Service,
    mapping: PortMapping<'_>,
) -> Result<Result<u16, u16>, Failure> {
    if service.service_type == ServiceType::WanIp2 {
        let (answer, _) = act(request, service, &Action::AddAnyPortMapping(mapping)).await?;
        match answer.error {
            None => return Ok(Ok(answer.reserved_port.unwrap_or(mapping.external_port))),
            Some(code) if INVALID_ACTION.contains(&code) => {}
            Some(code) => return Ok(Err(code)),
        }
    }
    // Gateways of version 1 may let one host take the port of another.
    let entry = Action::GetSpecificPortMappingEntry(mapping.external_port);
    let (entry, _) = act(request, service, &entry).await?;
    let owner = entry.internal_client.zip(entry.internal_port);
    let is_taken = owner.is_some_and(|owner| owner != (mapping.client.ip(), mapping.client.port()));
    if is_taken || (entry.error.is_none() && owner.is_none()) {
        return Ok(Err(CONFLICT));
    }
    if let Some(code) = entry.error.filter(|code| *code != NO_SUCH_ENTRY) {
        tracing::debug!(code, "the gateway does not say whose a port is");
    }
    let (mut answer, _) = act(request, service, &Action::AddPortMapping(mapping)).await?;
    if answer.error == Some(ONLY_PERMANENT) {
        // It is deleted when the node leaves the mesh.
        let permanent = PortMapping { lease: 0, ..mapping };
        (answer, _) = act(request, service, &Action::AddPortMapping(permanent)).await?;
    }
    Ok(answer.error.map_or(Ok(mapping.external_port), Err))
}

/// The answer, and this host's address as the gateway sees it.
async fn act(request: &Request, service: &Service, action: &Action<'_>) -> Result<(Answer, IpAddr), Failure> {
    let message = upnp::action_request(service, action);
    let (client, body) = fetch(request, &service.control, &message)
        .await
        .map_err(|error| refused(&format!("its service does not answer: {error}")))?;
    Ok((upnp::parse_answer(&body), client))
}

/// Sends a request of HTTP and returns the body of the response, whatever its status: errors of actions have one.
async fn fetch(request: &Request, location: &Location, message: &str) -> io::Result<(IpAddr, Vec<u8>)> {
    let exchange = async {
        let mut stream = socket::tcp(request, location.address).await?;
        let client = stream.local_addr()?.ip();
        stream.write_all(message.as_bytes()).await?;
        let mut response = Vec::new();
        let mut buffer = vec![0; 8 * 1024];
        let mut limited = (&mut stream).take(MAX_RESPONSE);
        loop {
            let length = limited.read(&mut buffer).await?;
            response.extend_from_slice(buffer.get(..length).unwrap_or_default());
            if let Some(Response { body, .. }) =
                parse_response(&response, length == 0).map_err(io::Error::other)?
            {
                return Ok((client, body));
            }
        }
    };
    timeout(RESPONSE_WITHIN, exchange).await?
}

fn refused(reason: &str) -> Failure {
    Failure::refused(Protocol::Upnp, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_by_a_gateway_with_a_private_address_names_the_address() {
        let (public, private) = ("11.0.0.1".parse().unwrap(), "100.64.3.4".parse().unwrap());
        let named = Failure::PrivateOuterAddress { protocol: Protocol::Upnp, address: private };
        for code in [501, 606, 728] {
            assert_eq!(refusal_of(code, private), named);
            assert_eq!(refusal_of(code, public), refused(upnp::refusal(code)));
        }
        assert_eq!(
            refusal_of(CONFLICT, private),
            refused(upnp::refusal(CONFLICT)),
            "only this port is taken"
        );
    }
}
