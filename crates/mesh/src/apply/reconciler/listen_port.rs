//! The UDP port on which the device listens.
//!
//! Another port is set by itself, before all else that is to change: a port that another program has must cost this node nothing but
//! that port. The device then keeps the one it has.

use std::time::{Duration, Instant};

use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_dataplane::wireguard::WireGuardDevice;
use fairlead_keys::{DeviceChange, DeviceState};
use tokio::sync::watch;

use crate::model::problem::{MeshFailure, MeshProblem};

/// Interval at which a refused port is tried again. The program that has it may end at any time.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Time for which a device that has no port yet waits for the node's own: a predecessor that is ending releases it a moment later.
const PATIENCE: Duration = Duration::from_secs(2);

/// UDP port that this node is told to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WantedPort {
    pub(super) port: u16,
    /// The Node names it, not the mesh.
    pub(super) is_of_node: bool,
    /// Port of the mesh resource, for nodes that name none.
    pub(super) of_mesh: u16,
}

/// State of the UDP port: the one in use, and the one that the device cannot have.
#[derive(Debug, Default)]
pub(super) struct ListenPort {
    refused: Option<Refused>,
    /// Port in use, for [`Self::subscribe`].
    in_use: watch::Sender<Option<u16>>,
}

#[derive(Debug)]
struct Refused {
    port: u16,
    /// The Node names it, not the mesh.
    is_of_node: bool,
    error: String,
    first: Instant,
    last: Instant,
}

impl ListenPort {
    /// Brings `device`, which `state` shows, to the port that this node is to listen on. Returns the one that it is to have now: as
    /// long as that cannot be had, the one it has; a new device that of the mesh.
    ///
    /// # Errors
    /// A new device cannot have the node's own port at this moment.
    pub(super) fn bring_up(
        &mut self,
        wanted: WantedPort,
        device: &dyn WireGuardDevice,
        state: &mut DeviceState,
        now: Instant,
    ) -> Result<u16, MeshFailure> {
        let WantedPort { port: wanted, is_of_node, of_mesh } = wanted;
        // The kernel gives a device that was never configured a random one.
        let present =
            Some(state.listen_port).filter(|port| *port != 0 && state.fwmark == MARK_FROM_WIREGUARD);
        let otherwise = present.unwrap_or(of_mesh);
        if otherwise == wanted {
            // Of a new device the port is a part of the first change.
            self.refused = None;
            return Ok(wanted);
        }
        let known = self.refused.take().filter(|refused| refused.port == wanted);
        let rests =
            |it: &Refused| present.is_some() && now.saturating_duration_since(it.last) < RETRY_INTERVAL;
        if let Some(refused) = known.as_ref().filter(|refused| rests(refused)) {
            let kept = otherwise;
            tracing::debug!(port = refused.port, kept, "the port was refused a moment ago");
            self.refused = known;
            return Ok(kept);
        }
        let change = DeviceChange { listen_port: Some(wanted), ..DeviceChange::default() };
        let Err(error) = device.change(&change) else {
            tracing::info!(port = wanted, before = present, "WireGuard listens on another port");
            state.listen_port = wanted;
            return Ok(wanted);
        };
        let is_news = known.is_none();
        let first = known.map_or(now, |refused| refused.first);
        let refused = Refused { port: wanted, is_of_node, error: error.to_string(), first, last: now };
        self.refused = Some(refused);
        if present.is_none() && now.saturating_duration_since(first) < PATIENCE {
            return Err(error.into());
        }
        if is_news {
            tracing::warn!(port = wanted, kept = otherwise, %error, "WireGuard cannot listen on the port of this node");
        }
        Ok(otherwise)
    }

    /// Takes note of the port that the device has; `None` without a mesh.
    pub(super) fn set(&self, port: Option<u16>) {
        self.in_use.send_if_modified(|known| std::mem::replace(known, port) != port);
    }

    /// The port that the device has; `None` before it has one.
    pub(super) fn subscribe(&self) -> watch::Receiver<Option<u16>> {
        self.in_use.subscribe()
    }

    /// Problem for status if the device listens on `kept` instead of the port that it should have.
    pub(super) fn problem(&self, kept: u16) -> Option<MeshProblem> {
        let Refused { port, is_of_node, ref error, .. } = *self.refused.as_ref()?;
        Some(MeshProblem::ListenPortUnavailable { port, kept, is_of_node, error: error.clone() })
    }
}
