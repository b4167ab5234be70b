//! PCP and NAT-PMP, which share a port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use tokio::net::UdpSocket;

use crate::codec::{nat_pmp, pcp};
use crate::socket::{self, exchange};
use crate::{Failure, Mapping, Protocol, Request};

/// UDP port of gateways (RFC 6887, section 19.2).
const PORT: u16 = 5351;
/// Tolerated drift of the clocks of both sides (RFC 6887, section 8.5): one part in `DRIFT` of the time passed, and `MARGIN`.
const DRIFT: u32 = 16;
const MARGIN: Duration = Duration::from_secs(2);

/// A gateway's count of seconds since it lost its state, and when it said so.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epoch {
    seconds: u32,
    at: Instant,
}

impl Epoch {
    fn new(seconds: u32) -> Self {
        Self { seconds, at: Instant::now() }
    }

    /// Whether the gateway lost its state between two answers (RFC 6887, section 8.5).
    pub(crate) fn is_lost(self, later: Self) -> bool {
        let Some(theirs) = later.seconds.checked_sub(self.seconds) else {
            // Answers may overtake each other.
            return self.seconds.abs_diff(later.seconds) > 1;
        };
        let ours = later.at.saturating_duration_since(self.at);
        let theirs = Duration::from_secs(theirs.into());
        let is_slow = |one: Duration, other: Duration| {
            one.saturating_add(MARGIN) < other.saturating_sub(other.checked_div(DRIFT).unwrap_or_default())
        };
        is_slow(ours, theirs) || is_slow(theirs, ours)
    }
}

/// Asks by PCP for a mapping, `wanted` outside if it is free.
pub(crate) async fn pcp(
    request: &Request,
    wanted: Option<SocketAddr>,
    lifetime: u32,
) -> Result<(Mapping, Epoch), Failure> {
    let (client, socket) = connected(request).await?;
    let any = match request.gateway {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let suggested = wanted.unwrap_or(SocketAddr::new(any, request.port));
    let Request { nonce, port, .. } = *request;
    let message = pcp::map_request(&pcp::MapRequest { client, nonce, port, suggested, lifetime });
    let answer = exchange(&socket, &message, |datagram| match pcp::parse_response(datagram) {
        // It speaks NAT-PMP, in which it is asked too.
        Err(pcp::InvalidResponse::Version(0)) => ControlFlow::Break(Err(Failure::NoAnswer)),
        Err(_) => ControlFlow::Continue(()),
        Ok(pcp::Response { epoch, outcome }) => match outcome {
            pcp::Outcome::Mapped(mapped) if (mapped.nonce, mapped.port) == (nonce, port) => {
                ControlFlow::Break(Ok((mapped, Epoch::new(epoch))))
            }
            pcp::Outcome::Refused { code, nonce: of, external, .. } if of.is_none_or(|of| of == nonce) => {
                let protocol = Protocol::Pcp;
                let outer = pcp::private_outer_address(code, external, suggested.ip());
                ControlFlow::Break(Err(outer.map_or_else(
                    || Failure::refused(protocol, pcp::refusal(code)),
                    |address| Failure::PrivateOuterAddress { protocol, address },
                )))
            }
            pcp::Outcome::Announced | pcp::Outcome::Mapped(_) | pcp::Outcome::Refused { .. } => {
                ControlFlow::Continue(())
            }
        },
    });
    let (mapped, epoch) = answer.await.ok_or(Failure::NoAnswer)??;
    Ok((Mapping::new(Protocol::Pcp, mapped.external, mapped.lifetime)?, epoch))
}

/// The epoch of a gateway that speaks PCP.
pub(crate) async fn pcp_epoch(request: &Request) -> Option<Epoch> {
    let (client, socket) = connected(request).await.ok()?;
    exchange(&socket, &pcp::announce_request(client), |datagram| match pcp::parse_response(datagram) {
        Ok(response) => ControlFlow::Break(Epoch::new(response.epoch)),
        Err(_) => ControlFlow::Continue(()),
    })
    .await
}

/// The external address of a gateway that speaks NAT-PMP.
pub(crate) async fn external_address(request: &Request) -> Result<(Ipv4Addr, Epoch), Failure> {
    if request.gateway.is_ipv6() {
        return Err(Failure::NoAnswer);
    }
    let (_, socket) = connected(request).await?;
    let message = nat_pmp::external_address_request();
    let answer = exchange(&socket, &message, |datagram| match nat_pmp::parse_response(datagram) {
        Ok(nat_pmp::Response { epoch, outcome: nat_pmp::Outcome::ExternalAddress(address) }) => {
            let answer = (!address.is_unspecified()).then(|| (address, Epoch::new(epoch)));
            ControlFlow::Break(answer.ok_or_else(|| refusal(nat_pmp::NETWORK_FAILURE)))
        }
        Ok(nat_pmp::Response { outcome: nat_pmp::Outcome::Refused { of_mapping: false, code }, .. }) => {
            ControlFlow::Break(Err(refusal(code)))
        }
        // It speaks only PCP.
        Err(nat_pmp::InvalidResponse::Version(_)) => ControlFlow::Break(Err(Failure::NoAnswer)),
        Ok(_) | Err(_) => ControlFlow::Continue(()),
    });
    answer.await.ok_or(Failure::NoAnswer)?
}

/// Asks by NAT-PMP for a mapping, at a port of the external address.
pub(crate) async fn nat_pmp(
    request: &Request,
    address: Ipv4Addr,
    wanted: u16,
    lifetime: u32,
) -> Result<Mapping, Failure> {
    let (_, socket) = connected(request).await?;
    let message = nat_pmp::map_request(request.port, wanted, lifetime);
    let answer = exchange(&socket, &message, |datagram| match nat_pmp::parse_response(datagram) {
        Ok(response) => match response.outcome {
            nat_pmp::Outcome::Mapped { port, external_port, lifetime } if port == request.port => {
                ControlFlow::Break(Ok((external_port, lifetime)))
            }
            nat_pmp::Outcome::Refused { of_mapping: true, code } => ControlFlow::Break(Err(refusal(code))),
            nat_pmp::Outcome::ExternalAddress(_)
            | nat_pmp::Outcome::Mapped { .. }
            | nat_pmp::Outcome::Refused { .. } => ControlFlow::Continue(()),
        },
        Err(_) => ControlFlow::Continue(()),
    });
    let (port, lifetime) = answer.await.ok_or(Failure::NoAnswer)??;
    Mapping::new(Protocol::NatPmp, SocketAddr::from((address, port)), lifetime)
}

fn refusal(code: u16) -> Failure {
    let protocol = Protocol::NatPmp;
    match code {
        nat_pmp::NETWORK_FAILURE => Failure::NoOuterAddress { protocol },
        code => Failure::refused(protocol, nat_pmp::refusal(code)),
    }
}

async fn connected(request: &Request) -> Result<(IpAddr, UdpSocket), Failure> {
    let open = async {
        let socket = socket::udp(request, PORT).await?;
        Ok::<_, std::io::Error>((socket.local_addr()?.ip(), socket))
    };
    open.await.map_err(|error| {
        // The link or its address are gone: the next attempt follows the change of the network.
        tracing::debug!(gateway = %request.gateway, %error, "cannot open a socket to the gateway");
        Failure::NoAnswer
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_that_lost_its_state_is_known_by_its_epoch() {
        let start = Instant::now();
        let at = |seconds, after| Epoch { seconds, at: start + Duration::from_secs(after) };
        let first = at(1000, 0);
        for kept in [at(1000, 0), at(999, 0), at(1060, 60), at(1057, 60), at(1065, 60), at(4600, 3700)] {
            assert!(!first.is_lost(kept), "{kept:?}");
        }
        for lost in [at(998, 0), at(0, 60), at(1000, 60), at(1120, 60), at(u32::MAX, 60)] {
            assert!(first.is_lost(lost), "{lost:?}");
        }
    }
}
