//! The device as its user holds it.

use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fairlead_api::wireguard::{DeviceChange, DeviceState, PublicKey};

use crate::handover::Inheritance;
use crate::pump::{self, Handle};
use crate::tun::Tun;
use crate::uapi::Server;
use crate::{Error, Settings};

/// How often it is looked whether a successor has taken over.
const LOOK: Duration = Duration::from_millis(20);

/// A running WireGuard device.
///
/// It lives in the network namespace of the thread that started it. Its methods may be called from any thread; they
/// wait for the packet loop, which answers in well under a millisecond. Dropping it ends its threads and leaves the
/// interface with its addresses and routes, for a successor to adopt.
pub struct Device {
    handle: Handle,
    pump: Option<JoinHandle<()>>,
    /// Shown to `wg(8)`; `None` without one.
    control: Option<Server>,
}

impl Device {
    /// Creates or adopts the TUN interface and starts the packet loop. UDP opens with the first configured port.
    ///
    /// # Errors
    ///
    /// When the settings cannot be used, the kernel has no TUN or refuses this one, or no thread can be started.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        let mtu = settings.check()?;
        let (handle, pump) = pump::spawn(&settings.name, open(&settings, mtu)?, mtu)?;
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
        Ok(Self { handle, pump: Some(pump), control })
    }

    /// The name of the interface.
    pub fn interface(&self) -> &str {
        self.handle.name()
    }

    /// What the device is now.
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

    /// Why the last datagram to this peer could not be sent; `None` if it could, or there is no such peer.
    pub fn send_error(&self, peer: &PublicKey) -> Option<String> {
        self.handle.send_error(*peer).unwrap_or_else(|stopped| Some(stopped.to_string()))
    }

    /// Gets ready to hand the device to a successor that is started with this path in [`Settings::predecessor`]. The
    /// device works on; a control socket is given up.
    ///
    /// # Errors
    ///
    /// When nothing can listen at `path`, or the packet loop has ended.
    pub fn retire(mut self, path: PathBuf) -> Result<Retiring, Error> {
        self.control = None;
        self.handle.retire(path)?;
        Ok(Retiring(self))
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

/// The interface with what a predecessor has left, or on its own.
fn open(settings: &Settings, mtu: u16) -> Result<(Tun, Option<Inheritance>), Error> {
    let asked = settings.predecessor.as_deref().map_or(Ok(None), Inheritance::ask);
    let inherited = asked.unwrap_or_else(|error| {
        tracing::warn!(interface = settings.name, %error, "cannot take over from a predecessor without a break");
        None
    });
    match inherited {
        Some((tun, inheritance)) => Ok((Tun::inherit(&settings.name, tun, mtu)?, Some(inheritance))),
        None => Ok((Tun::open(&settings.name, mtu)?, None)),
    }
}

/// A device that waits for its successor.
pub struct Retiring(Device);

impl Retiring {
    /// Waits until a successor has everything, or for `patience`; says whether one has. The device ends either way.
    pub fn wait(self, patience: Duration) -> bool {
        let deadline = Instant::now().checked_add(patience);
        let is_over = || self.0.pump.as_ref().is_none_or(JoinHandle::is_finished);
        while !is_over() && deadline.is_some_and(|deadline| Instant::now() < deadline) {
            thread::sleep(LOOK);
        }
        is_over()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // First the server, which asks the loop.
        self.control = None;
        self.handle.stop();
        if let Some(pump) = self.pump.take()
            && pump.join().is_err()
        {
            tracing::error!(interface = self.interface(), "the packet loop of WireGuard panicked");
        }
    }
}
