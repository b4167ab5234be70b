//! The device's public interface.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fairlead_keys::{DeviceChange, DeviceState, PublicKey};
use ipnet::IpNet;

use crate::handover::Takeover;
use crate::path_socket::{PathPort, PathSocket, PathSocketStats};
use crate::pump::{self, Handle};
use crate::tun::Tun;
use crate::uapi::Server;
use crate::{Error, Settings};

/// Time between checks of [`PendingHandover::wait`] whether the hand-over is complete.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A running WireGuard device.
///
/// It lives in the network namespace of the thread that started it. Its methods may be called from any thread; they
/// wait for the packet loop, which answers in well under a millisecond. Dropping it ends its threads and leaves the
/// interface with its addresses and routes, for the next process to adopt.
pub struct Device {
    handle: Handle,
    path_port: Arc<PathPort>,
    pump: Option<JoinHandle<()>>,
    /// The control socket for `wg(8)`; `None` without one.
    control: Option<Server>,
}

impl Device {
    /// Makes another TUN interface and removes it again, to see whether one can be made.
    ///
    /// # Errors
    ///
    /// When the kernel has no TUN, or this process may not make one.
    pub fn check() -> Result<(), Error> {
        Tun::check()
    }

    /// Creates or adopts the TUN interface and starts the packet loop. UDP opens with the first configured port.
    ///
    /// # Errors
    ///
    /// When the settings cannot be used, the kernel has no TUN or refuses this one, or no thread can be started.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        let mtu = settings.check()?;
        let (handle, path_port, pump) = pump::spawn(&settings, open(&settings, mtu)?, mtu)?;
        let control = settings.control_directory.as_deref().and_then(|directory| {
            Server::start(directory, handle.clone())
                .inspect_err(|error| {
                    tracing::warn!(
                        interface = settings.name,
                        %error,
                        "no control socket: `wg show` will not see this device"
                    );
                })
                .ok()
        });
        Ok(Self { handle, path_port, pump: Some(pump), control })
    }

    /// The name of the interface.
    pub fn interface(&self) -> &str {
        self.handle.name()
    }

    /// The device's configuration, sessions and counters.
    ///
    /// # Errors
    ///
    /// [`Error::Stopped`] when the packet loop has ended, for example because the interface was removed.
    pub fn state(&self) -> Result<DeviceState, Error> {
        self.handle.state()
    }

    /// Changes the device while it runs, all or nothing. Peers that stay keep their sessions and counters.
    ///
    /// A new endpoint is tried at once: with a keepalive if there is a session, else with handshakes now and after
    /// 0.3, 1 and 2 seconds.
    ///
    /// # Errors
    ///
    /// When a peer has our own key, peers come before a private key, the port is taken, the mark is refused, or the
    /// packet loop has ended. The device is unchanged then.
    pub fn change(&self, change: &DeviceChange) -> Result<(), Error> {
        self.handle.change(change.clone())
    }

    /// Replaces the prefixes that peers may send from although another peer is sent for them, by peer. A peer that is
    /// removed keeps its own until they are replaced.
    ///
    /// # Errors
    ///
    /// [`Error::Stopped`] when the packet loop has ended.
    pub fn accept(&self, prefixes: &BTreeMap<PublicKey, Vec<IpNet>>) -> Result<(), Error> {
        self.handle.accept(prefixes.clone())
    }

    /// Reason why the last datagram to this peer could not be sent; `None` if it could, or there is no such peer.
    pub fn send_error(&self, peer: &PublicKey) -> Option<String> {
        self.handle.send_error(*peer).unwrap_or_else(|stopped| Some(stopped.to_string()))
    }

    /// Opens the socket for non-WireGuard datagrams on the device's port; `None` while one is open. Without one these
    /// datagrams are counted and dropped.
    ///
    /// # Errors
    ///
    /// The process has no descriptor left.
    pub fn open_path_socket(&self) -> io::Result<Option<PathSocket>> {
        self.path_port.open()
    }

    /// The counters of non-WireGuard datagrams.
    pub fn path_socket_stats(&self) -> PathSocketStats {
        self.path_port.stats()
    }

    /// Listens for a process that starts a device with this path as [`Settings::handover_socket`], to hand this one over.
    /// Until then the device keeps working; its control socket is closed.
    ///
    /// # Errors
    ///
    /// When nothing can listen at `path`, or the packet loop has ended.
    pub fn hand_over(mut self, path: PathBuf) -> Result<PendingHandover, Error> {
        self.control = None;
        self.handle.serve_handover(path)?;
        Ok(PendingHandover(self))
    }

    /// Stops the device and removes its interface.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the packet loop has ended.
    pub fn delete(self) -> Result<(), Error> {
        self.handle.delete()
    }
}

/// The interface: taken over from the old process if one listens, else adopted or created.
fn open(settings: &Settings, mtu: u16) -> Result<(Tun, Option<Takeover>), Error> {
    let connected = settings.handover_socket.as_deref().map_or(Ok(None), Takeover::connect);
    let takeover = connected.unwrap_or_else(|error| {
        tracing::warn!(interface = settings.name, %error, "cannot take the device over from the old process: tunnels pause until new handshakes");
        None
    });
    match takeover {
        Some((tun, takeover)) => Ok((Tun::adopt(&settings.name, tun, mtu)?, Some(takeover))),
        None => Ok((Tun::open(&settings.name, mtu)?, None)),
    }
}

/// A device that is being handed over.
pub struct PendingHandover(Device);

impl PendingHandover {
    /// Waits until the new process has taken over everything, at most for `timeout`; returns whether it has. The device
    /// ends either way.
    pub fn wait(self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let is_complete = || self.0.pump.as_ref().is_none_or(JoinHandle::is_finished);
        while !is_complete() && deadline.is_some_and(|deadline| Instant::now() < deadline) {
            thread::sleep(POLL_INTERVAL);
        }
        is_complete()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // First the control socket's server, which sends requests to the loop.
        self.control = None;
        self.handle.stop();
        if let Some(pump) = self.pump.take()
            && pump.join().is_err()
        {
            tracing::error!(interface = self.interface(), "the packet loop of WireGuard panicked");
        }
    }
}
