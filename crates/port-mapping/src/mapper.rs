//! Keeps one mapping.

use std::time::{Duration, Instant};

use fairlead_limits::Backoff;
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

use crate::codec::upnp::Service;
use crate::request::{Failure, Mapping, Request};
use crate::udp::{self, Epoch};
use crate::{socket, upnp};

/// Requested lifetime of a mapping, in seconds (RFC 6886, section 3.3).
const LIFETIME: u32 = 7200;
/// Longest attempt, with all protocols.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Pause after the first attempt in vain, which doubles: a router may start more slowly than the host, but most never answer.
const MIN_RETRY_INTERVAL: Duration = Duration::from_secs(30);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(600);
/// Pause after an attempt in vain while an earlier mapping is still valid.
const RENEWAL_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Interval of checks whether the gateway has lost its state.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// UPnP does not tell; there the mapping is added again this often.
const UPNP_INTERVAL: Duration = Duration::from_secs(300);
/// Pause after an announcement, so that a flood of them makes no flood of checks.
const ANNOUNCEMENT_PAUSE: Duration = Duration::from_secs(1);
/// Longest attempt to delete a mapping.
const RELEASE: Duration = Duration::from_secs(2);

/// Keeps one mapping. Dropping it leaves the mapping to the next program, which renews it; see [`Self::release`].
#[derive(Default)]
pub struct PortMapper {
    held: Option<Held>,
}

/// A mapping, and how it is renewed.
struct Held {
    request: Request,
    mapping: Mapping,
    grant: Grant,
    at: Instant,
}

#[derive(Clone)]
enum Grant {
    NatPmp(Epoch),
    Pcp(Epoch),
    Upnp(Service),
}

impl Held {
    fn is_valid(&self) -> bool {
        self.at.elapsed() < self.mapping.lifetime
    }

    /// Time until the mapping is renewed.
    fn renewal_in(&self) -> Duration {
        let half = self.mapping.lifetime / 2;
        let after = if matches!(self.grant, Grant::Upnp(_)) { half.min(UPNP_INTERVAL) } else { half };
        after.saturating_sub(self.at.elapsed())
    }
}

impl PortMapper {
    /// Asks for a mapping and keeps it; `report` is told each outcome. Never returns, and may be dropped at any time: called
    /// again with another request, it releases the earlier mapping if its gateway is the same.
    pub async fn run(&mut self, request: &Request, mut report: impl FnMut(Result<Mapping, Failure>)) {
        let is_other = |held: &mut Held| held.request != *request;
        if let Some(held) = self.held.take_if(is_other)
            && (held.request.gateway, &held.request.link) == (request.gateway, &request.link)
        {
            release(&held).await;
        }
        let announcements = socket::announcements(request);
        if let Err(error) = &announcements {
            tracing::debug!(%error, "cannot listen to announcements of gateways");
        }
        let mut retry = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        loop {
            let outcome = self.attempt(request).await;
            let pause = match (outcome, &self.held) {
                (Ok(held), _) => {
                    report(Ok(held.mapping));
                    self.held = Some(held);
                    retry.reset();
                    self.watch(announcements.as_ref().ok()).await;
                    continue;
                }
                (Err(failure), Some(held)) if held.is_valid() && failure == Failure::NoAnswer => {
                    RENEWAL_RETRY_INTERVAL.min(held.mapping.lifetime.saturating_sub(held.at.elapsed()))
                }
                (Err(failure), _) => {
                    self.held = None;
                    report(Err(failure));
                    retry.next_whole()
                }
            };
            tokio::select! {
                () = sleep(pause) => {}
                () = announced(announcements.as_ref().ok(), request) => {}
            }
        }
    }

    /// Deletes the mapping. The gateway may be away: then it expires.
    pub async fn release(&mut self) {
        if let Some(held) = self.held.take() {
            release(&held).await;
        }
    }

    async fn attempt(&self, request: &Request) -> Result<Held, Failure> {
        let attempt = async {
            if let Some(held) = self.held.as_ref().filter(|held| held.is_valid())
                && let Ok(renewed) = renew(held).await
            {
                return Ok(renewed);
            }
            establish(request, self.held.as_ref()).await
        };
        timeout(ATTEMPT, attempt).await.unwrap_or(Err(Failure::NoAnswer))
    }

    /// Returns when the mapping has to be renewed or made anew.
    async fn watch(&mut self, announcements: Option<&UdpSocket>) {
        let Some(held) = &mut self.held else { return };
        loop {
            let renewal = held.renewal_in();
            if renewal.is_zero() {
                return;
            }
            tokio::select! {
                () = sleep(renewal.min(CHECK_INTERVAL)) => {}
                () = announced(announcements, &held.request) => {}
            }
            let request = &held.request;
            match &mut held.grant {
                Grant::NatPmp(epoch) => match udp::external_address(request).await {
                    Ok((address, later))
                        if address == held.mapping.external.ip() && !epoch.is_lost(later) =>
                    {
                        *epoch = later;
                    }
                    Ok(_) => return,
                    // It may be restarting.
                    Err(_) => {}
                },
                Grant::Pcp(epoch) => match udp::pcp_epoch(request).await {
                    Some(later) if epoch.is_lost(later) => return,
                    Some(later) => *epoch = later,
                    None => {}
                },
                Grant::Upnp(_) => {}
            }
        }
    }
}

/// All protocols at once; the mapping is that of the first in the order PCP, NAT-PMP, UPnP.
async fn establish(request: &Request, last: Option<&Held>) -> Result<Held, Failure> {
    let wanted = last.map(|held| held.mapping.external);
    let wanted_port = wanted.map_or(request.port, |external| external.port());
    let held = |(mapping, grant)| Held { request: request.clone(), mapping, grant, at: Instant::now() };
    let mut pcp = std::pin::pin!(udp::pcp(request, wanted, LIFETIME));
    let mut others =
        std::pin::pin!(async { tokio::join!(udp::external_address(request), upnp::discover(request)) });
    let (pcp, known) = tokio::select! {
        biased;
        pcp = &mut pcp => (pcp, None),
        known = &mut others => (pcp.await, Some(known)),
    };
    let pcp = match pcp {
        Ok((mapping, epoch)) => return Ok(held((mapping, Grant::Pcp(epoch)))),
        Err(failure) => failure,
    };
    let (nat_pmp, upnp) = match known {
        Some(known) => known,
        None => others.await,
    };
    let nat_pmp = async {
        let (address, epoch) = nat_pmp?;
        Ok((udp::nat_pmp(request, address, wanted_port, LIFETIME).await?, Grant::NatPmp(epoch)))
    };
    let nat_pmp = match nat_pmp.await {
        Ok(granted) => return Ok(held(granted)),
        Err(failure) => failure,
    };
    let upnp = async {
        let service = upnp?;
        let mapping = upnp::map(request, &service, wanted_port, LIFETIME).await?;
        Ok((mapping, Grant::Upnp(service)))
    };
    let upnp = match upnp.await {
        Ok(granted) => return Ok(held(granted)),
        Err(failure) => failure,
    };
    Err(Failure::told([pcp, nat_pmp, upnp]))
}

/// Renews a mapping by the protocol that granted it, and at the same port if possible.
async fn renew(held: &Held) -> Result<Held, Failure> {
    let Held { request, mapping, grant, .. } = held;
    let port = mapping.external.port();
    let (mapping, grant) = match grant {
        Grant::NatPmp(_) => {
            let (address, epoch) = udp::external_address(request).await?;
            (udp::nat_pmp(request, address, port, LIFETIME).await?, Grant::NatPmp(epoch))
        }
        Grant::Pcp(_) => {
            let (mapping, epoch) = udp::pcp(request, Some(mapping.external), LIFETIME).await?;
            (mapping, Grant::Pcp(epoch))
        }
        Grant::Upnp(service) => {
            (upnp::map(request, service, port, LIFETIME).await?, Grant::Upnp(service.clone()))
        }
    };
    Ok(Held { request: request.clone(), mapping, grant, at: Instant::now() })
}

async fn release(held: &Held) {
    let Held { request, mapping, grant, .. } = held;
    let delete = async {
        match grant {
            // What is left of a mapping has no lifetime, which is refused as of no use.
            Grant::NatPmp(_) => {
                let address = std::net::Ipv4Addr::UNSPECIFIED;
                drop(udp::nat_pmp(request, address, 0, 0).await);
            }
            Grant::Pcp(_) => drop(udp::pcp(request, Some(mapping.external), 0).await),
            Grant::Upnp(service) => upnp::delete(request, service, mapping.external.port()).await,
        }
    };
    drop(timeout(RELEASE, delete).await);
}

/// The gateway says that it has restarted. What it says is not read: anyone on the link can say it.
async fn announced(socket: Option<&UdpSocket>, request: &Request) {
    let Some(socket) = socket else { return std::future::pending().await };
    let mut buffer = [0; 64];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((_, from)) if from.ip() == request.gateway => break,
            Ok(_) => {}
            Err(_) => return std::future::pending().await,
        }
    }
    sleep(ANNOUNCEMENT_PAUSE).await;
}
