//! Packets between the TUN, the sockets and the engine: one per system call. A loop that moves batches replaces this
//! module.

use std::io;
use std::os::fd::AsFd;

use super::{Handover, Pump};
use crate::demux;
use crate::engine::{Datagram, Output};
use crate::extra_sockets::ReadySocket;
use crate::peer::Now;
use crate::udp::{self, Path, Receiver, Sockets};

/// Packets taken from one descriptor before the others are read.
pub(super) const MAX_BATCH: usize = 64;
/// Datagrams that wait for room in a socket; no packet is taken from the TUN while any does.
const MAX_WAITING: usize = 256;

impl Pump {
    pub(super) fn read_network(&mut self, receiver: &mut Receiver, now: Now) {
        let Some(sockets) = self.sockets.clone() else { return };
        for socket in sockets.descriptors() {
            for _ in 0..MAX_BATCH {
                match receiver.receive(socket) {
                    Ok(Some((path, datagram))) => self.receive(path, None, datagram, now),
                    Ok(None) => {}
                    // No datagram waits, or reading has cleared an ICMP error.
                    Err(_) => break,
                }
            }
        }
    }

    /// Reads the sockets beside the port. One that is kept receives from its endpoint only.
    pub(super) fn read_extra(&mut self, receiver: &mut Receiver, now: Now) {
        for ReadySocket { socket, number, remote } in self.path_port.ready() {
            for _ in 0..MAX_BATCH {
                match receiver.receive(socket.as_fd()) {
                    Ok(Some((path, datagram))) if number.is_some() || remote == Some(path.remote) => {
                        self.receive(path, number, datagram, now);
                    }
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        }
    }

    /// Any bytes from any sender. Only what has the form of a WireGuard message reaches the handshake limiter.
    fn receive(&mut self, path: Path, socket: Option<u16>, datagram: &[u8], now: Now) {
        if !demux::is_wireguard(datagram) {
            self.path_port.push(path, socket, datagram);
            return;
        }
        match &self.handover {
            // If the old process has gone, the connection says so at its next read.
            Handover::Takeover(takeover) if self.engine.belongs_to_other_process(datagram) => {
                drop(takeover.forward(path, datagram));
            }
            _ => self.engine.receive_datagram(datagram, path, now, &mut self.outputs),
        }
    }

    pub(super) fn read_tunnel(&mut self, buffer: &mut [u8], now: Now) -> io::Result<()> {
        let Some(tun) = &self.tun else { return Ok(()) };
        for _ in 0..MAX_BATCH {
            match tun.read(buffer) {
                Ok(length) => {
                    let packet = buffer.get(..length).unwrap_or_default();
                    self.engine.send_packet(packet, now, &mut self.outputs);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Sends and writes the engine's output, older datagrams first.
    pub(super) fn flush(&mut self) {
        while let Some(datagram) = self.waiting.pop_front() {
            if let Some(again) = self.send(datagram) {
                self.waiting.push_front(again);
                break;
            }
        }
        let mut outputs = std::mem::take(&mut self.outputs);
        for output in outputs.drain(..) {
            match output {
                Output::Inner(packet) => self.write(&packet),
                Output::Datagram(datagram) if self.waiting.is_empty() => {
                    let again = self.send(datagram);
                    self.waiting.extend(again);
                }
                Output::Datagram(datagram) if self.waiting.len() < MAX_WAITING => {
                    self.waiting.push_back(datagram)
                }
                Output::Datagram(_) => {}
            }
        }
        // Keeps the allocation, unless one flood made it huge.
        outputs.shrink_to(MAX_WAITING);
        self.outputs = outputs;
    }

    fn write(&self, packet: &[u8]) {
        // The interface may be down, or its queue full: a network may lose packets.
        if let Some(Err(error)) = self.tun.as_ref().map(|tun| tun.write(packet)) {
            tracing::trace!(interface = %self.name, %error, "packet lost at the TUN");
        }
    }

    /// Sends a datagram; returns it if the socket has no room.
    fn send(&mut self, datagram: Datagram) -> Option<Datagram> {
        if let Some(kept) = self.path_port.kept(&datagram.path.remote) {
            // Without room it is lost, as in any queue of the network.
            let used = Path { local: None, ..datagram.path };
            let result = udp::send_from(&kept, &used, &datagram.bytes);
            self.engine.sent(&datagram, &used, result.err().as_ref());
            return None;
        }
        let mut used = datagram.path;
        let result = match &self.sockets {
            Some(sockets) => send_by(sockets, &mut used, &datagram.bytes),
            None => Err(io::Error::new(io::ErrorKind::NotConnected, "no UDP port is configured")),
        };
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            return Some(datagram);
        }
        self.engine.sent(&datagram, &used, result.as_ref().err());
        None
    }
}

/// Sends from our known address; if that fails, lets the kernel choose another, and records that in `path`.
fn send_by(sockets: &Sockets, path: &mut Path, bytes: &[u8]) -> io::Result<()> {
    let first = sockets.send(path, bytes);
    match &first {
        Err(error) if path.local.is_some() && error.kind() != io::ErrorKind::WouldBlock => {
            path.local = None;
            sockets.send(path, bytes)
        }
        _ => first,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use fairlead_api::wireguard::{DeviceChange, PeerConfig, PrivateKey};

    use super::*;
    use crate::pump::Handle;

    /// The loop of a device that has a key and one peer, without TUN and sockets.
    fn pump(key: u8, peer: u8) -> Pump {
        let (_, inbox) = Handle::new("test").unwrap();
        let mut pump = Pump::new("test".into(), None, 1420, inbox);
        let config = PeerConfig {
            endpoint: Some(SocketAddr::from(([192, 0, 2, peer], 51_820))),
            ..PeerConfig::default()
        };
        let change = DeviceChange {
            private_key: Some(PrivateKey([key; 32])),
            set_peers: [(crate::public_key(&PrivateKey([peer; 32])), config)].into(),
            ..DeviceChange::default()
        };
        pump.engine.apply(&change, Now::read(), &mut pump.outputs);
        pump
    }

    fn lengths(pump: &mut Pump) -> Vec<usize> {
        let length = |output| match output {
            Output::Datagram(datagram) => datagram.bytes.len(),
            Output::Inner(packet) => packet.len(),
        };
        pump.outputs.drain(..).map(length).collect()
    }

    /// The limiter answers the handshakes of a second with cookies once there were too many.
    #[test]
    fn a_flood_of_other_datagrams_does_not_reach_the_handshake_limiter() {
        let (mut initiator, mut responder) = (pump(1, 2), pump(2, 1));
        let Some(Output::Datagram(initiation)) = initiator.outputs.pop() else { panic!("no initiation") };
        lengths(&mut responder);
        let (path, now) = (Path::to("192.0.2.1:51820".parse().unwrap()), Now::read());
        let flood: [&[u8]; 6] = [&[1, 0, 0, 0], &[1; 148], &[2; 92], &[2, 0, 0, 1], &[0; 148], &[]];
        for _ in 0..1_000 {
            flood.iter().for_each(|junk| responder.receive(path, None, junk, now));
        }
        assert_eq!(responder.path_port.stats().dropped_without_reader, 6_000);
        assert_eq!(lengths(&mut responder), [0; 0]);
        responder.receive(path, None, &initiation.bytes, now);
        assert_eq!(lengths(&mut responder), [92], "a response, and no cookie (64)");
    }
}
