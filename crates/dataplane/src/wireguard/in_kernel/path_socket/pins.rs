//! Birthday attempts with the kernel's WireGuard: this program opens the ports, and the table pins the one that the peer reaches to
//! the peer's endpoint. Its socket stays bound, so that no other program gets the port, and receives nothing.
//!
//! The pins are elements of the table. The next process reads them there and binds the ports again; what is flushed is made
//! again from what this one knows.

use std::io;
use std::net::{SocketAddr, SocketAddrV4};
use std::time::Duration;

use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_netlink::nftables::{EndpointMap, TableState};
use fairlead_tunnel::ReservedPorts;

use super::super::path_table;
use super::{PathPort, State};

/// Attempts, and the pause between them, to bind a port that another process has.
const BIND_ATTEMPTS: u32 = 10;
const BIND_PAUSE: Duration = Duration::from_millis(50);

/// Binds the ports that an earlier process has pinned. A pin whose port another program has by now is left out.
pub(super) fn adopt(present: &TableState, reserved: &ReservedPorts) -> EndpointMap {
    let mut pins = path_table::pins(present);
    pins.retain(|remote, port| {
        let bound = bind(*port, (*remote).into(), reserved);
        let outcome = bound.as_ref().map(|()| "adopted").unwrap_or("lost");
        tracing::info!(%remote, port, outcome, "a port was pinned to an endpoint by an earlier process");
        bound.is_ok()
    });
    pins
}

/// The process that ends may hold the port for a moment longer than the lock for which this one has waited.
fn bind(port: u16, remote: SocketAddr, reserved: &ReservedPorts) -> io::Result<()> {
    let mut attempt = 1;
    loop {
        match reserved.reserve(port, remote, MARK_FROM_WIREGUARD) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempt < BIND_ATTEMPTS => {
                std::thread::sleep(BIND_PAUSE);
                attempt = attempt.saturating_add(1);
            }
            outcome => return outcome,
        }
    }
}

impl PathPort {
    /// Opens the ports of an attempt.
    pub(super) fn open_attempt(&self, count: u16) -> io::Result<()> {
        let state = self.lock();
        if let Some(refusal) = &state.refusal {
            return Err(io::Error::new(io::ErrorKind::Unsupported, refusal.clone()));
        }
        if state.wireguard == 0 {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.reserved.open(count, MARK_FROM_WIREGUARD)
    }

    /// Pins a port of the attempt to an endpoint, in place of any other one.
    pub(super) fn pin(&self, number: u16, remote: SocketAddr) -> io::Result<()> {
        let endpoint = v4(remote).ok_or(io::ErrorKind::Unsupported)?;
        let port = self.reserved.keep(number, endpoint.into())?;
        let mut state = self.lock();
        state.pins.insert(endpoint, port);
        if let Err(error) = self.apply_pins(&mut state) {
            state.pins.remove(&endpoint);
            self.reserved.leave(endpoint.into());
            return Err(io::Error::other(error.to_string()));
        }
        self.reserved.silence(endpoint.into());
        Ok(())
    }

    /// Lets datagrams to this endpoint leave from WireGuard's port again.
    pub(super) fn unpin(&self, remote: SocketAddr) {
        let Some(endpoint) = v4(remote) else { return };
        let mut state = self.lock();
        if state.pins.remove(&endpoint).is_some()
            && let Err(error) = self.apply_pins(&mut state)
        {
            tracing::warn!(%remote, %error, "cannot remove a pinned port from nftables yet");
        }
        self.reserved.leave(endpoint.into());
    }

    fn apply_pins(&self, state: &mut State) -> fairlead_netlink::Result<()> {
        let ports = self.ports(state);
        state.generation = None;
        if ports.wireguard == 0 { Ok(()) } else { state.apply(ports).map(drop) }
    }
}

fn v4(remote: SocketAddr) -> Option<SocketAddrV4> {
    match SocketAddr::new(remote.ip().to_canonical(), remote.port()) {
        SocketAddr::V4(remote) => Some(remote),
        SocketAddr::V6(_) => None,
    }
}
