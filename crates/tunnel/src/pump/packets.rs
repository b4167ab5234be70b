//! Packets between the TUN, the sockets and the engine: one system call reads, or sends, as many as the kernel joins.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use fairlead_wireguard::Now;
use fairlead_wireguard::kind_of;
use nix::errno::Errno;
use nix::libc;

use super::{Handover, Pump};
use crate::extra_sockets::ReadySocket;
use crate::offload::{self, Frame, Merger, VnetHeader};
use crate::outbox::Batch;
use crate::tun::Tun;
use crate::udp::{self, Path, Received, Receiver, Sockets};

/// Reads of one descriptor before the others are read.
pub(super) const MAX_READS: usize = 64;
/// Bytes to be sent that end the reading of the TUN: what was read is sent first.
const MAX_UNSENT: usize = 1 << 20;
/// The header of a packet for which nothing is left to do.
const PLAIN: [u8; offload::HEADER_LENGTH] = [0; offload::HEADER_LENGTH];

impl Pump {
    /// Reads those of the sockets that are `ready`, IPv4 first.
    pub(super) fn read_network(&mut self, ready: [bool; 2], receiver: &mut Receiver, now: Now) {
        let Some(sockets) = self.sockets.clone() else { return };
        for (socket, _) in sockets.descriptors().zip(ready).filter(|(_, is_ready)| *is_ready) {
            self.read_socket((socket, None), receiver, now, |_| true);
        }
    }

    /// Reads the sockets beside the port. One that is kept receives from its endpoint only.
    pub(super) fn read_extra(&mut self, receiver: &mut Receiver, now: Now) {
        for ReadySocket { socket, number, remote } in self.path_port.ready() {
            self.read_socket((socket.as_fd(), number), receiver, now, |path| {
                number.is_some() || remote == Some(path.remote)
            });
        }
    }

    /// Reads one socket, which is the port itself if it has no number among the sockets beside it. What came another way than `is_wanted` says
    /// is ignored.
    fn read_socket(
        &mut self,
        (socket, number): (BorrowedFd<'_>, Option<u16>),
        receiver: &mut Receiver,
        now: Now,
        is_wanted: impl Fn(&Path) -> bool,
    ) {
        for _ in 0..MAX_READS {
            let received = match receiver.receive(socket) {
                Ok(Some(received)) => received,
                Ok(None) => continue,
                // No datagram waits, or reading has cleared an ICMP error.
                Err(_) => break,
            };
            if !is_wanted(&received.path) {
                continue;
            }
            if let Some(session) = self.engine.session_of_all(&received, now.instant) {
                let parts = (received.path, received.ecn, received.bytes.len(), received.length);
                self.received.keep(receiver, parts, session);
                if self.received.is_full(&self.workers) {
                    self.take_received(now);
                }
            } else {
                if self.engine.has_place_in_order(&received) {
                    self.take_received(now);
                }
                self.receive(received, number, now);
            }
        }
        self.take_received(now);
    }

    /// Decrypts what was received, and writes what is inside.
    fn take_received(&mut self, now: Now) {
        if self.received.is_empty() {
            return;
        }
        self.received.decrypt(&mut self.workers);
        self.received.take(|batch| {
            let peer = batch.session.peer;
            let (mut received, messages) = batch.decrypted();
            let what = (&mut received, messages);
            self.engine.receive_decrypted(peer, what, now, &mut self.out, &mut self.packets);
            write_packets(self.tun.as_ref(), &mut self.merger, &mut self.packets, received.bytes);
        });
    }

    /// Any bytes from any sender. Only what has the form of a WireGuard message reaches the engine.
    fn receive(&mut self, received: Received<'_>, socket: Option<u16>, now: Now) {
        let Received { path, ecn, bytes, length } = received;
        let mut start = 0;
        while start < bytes.len() {
            let rest = bytes.get_mut(start..).unwrap_or_default();
            let run = self.run_for_engine(rest, length);
            let taken = if run > 0 { run } else { self.run_for_others(rest, length) };
            let Some(part) = rest.get_mut(..taken) else { return };
            if run > 0 {
                let mut run = Received { path, ecn, bytes: part, length };
                self.engine.receive(&mut run, now, &mut self.out, &mut self.packets);
                write_packets(self.tun.as_ref(), &mut self.merger, &mut self.packets, run.bytes);
            } else {
                self.divert((part, length), path, socket, now);
            }
            start = start.saturating_add(taken);
        }
    }

    /// The length of the datagrams at the beginning that the engine takes.
    fn run_for_engine(&self, datagrams: &[u8], length: usize) -> usize {
        let is_ours = |datagram: &&[u8]| kind_of(datagram).is_some() && !self.is_of_old_process(datagram);
        datagrams.chunks(length).take_while(is_ours).map(<[u8]>::len).sum()
    }

    /// The length of the datagrams at the beginning that go somewhere else together: those of the old process's sessions, or the first.
    fn run_for_others(&self, datagrams: &[u8], length: usize) -> usize {
        let of_old_process = |datagram: &&[u8]| self.is_of_old_process(datagram);
        let run: usize = datagrams.chunks(length).take_while(of_old_process).map(<[u8]>::len).sum();
        if run > 0 { run } else { datagrams.len().min(length) }
    }

    /// Whether a datagram belongs to a session, or a handshake, of the process that hands over.
    fn is_of_old_process(&self, datagram: &[u8]) -> bool {
        matches!(self.handover, Handover::Takeover(_))
            && kind_of(datagram).is_some()
            && self.engine.belongs_to_other_process(datagram)
    }

    /// Takes datagrams that are not for the engine; all but the last are `length` bytes long.
    fn divert(&mut self, (datagrams, length): (&[u8], usize), path: Path, socket: Option<u16>, now: Now) {
        match &mut self.handover {
            // If the old process has gone, the connection says so at its next read.
            Handover::Takeover(takeover) if kind_of(datagrams).is_some() => {
                drop(takeover.forward(path, length, datagrams, now.instant));
            }
            _ => self.path_port.push(path, socket, datagrams),
        }
    }

    pub(super) fn read_tunnel(&mut self, buffer: &mut [u8], now: Now) -> io::Result<()> {
        let Some(tun) = &self.tun else { return Ok(()) };
        let has_header = tun.offloads().has_header();
        for _ in 0..MAX_READS {
            match tun.read(buffer) {
                Ok(length) => {
                    let read = buffer.get_mut(..length).unwrap_or_default();
                    let split = if has_header {
                        split(read)
                    } else {
                        offload::split(&VnetHeader::read(&PLAIN), read).ok()
                    };
                    match split {
                        Some(packets) => self.engine.send_packets(packets, now, &mut self.out),
                        None => tracing::trace!(interface = %self.name, "unusable packet from the TUN"),
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
            if self.out.bytes() > MAX_UNSENT {
                break;
            }
        }
        Ok(())
    }

    /// Sends what the engine wrote, until a socket has no room.
    pub(super) fn flush(&mut self) {
        self.out.encrypt(&mut self.workers);
        while let Some(batch) = self.out.pop_front() {
            if let Some(again) = self.send(batch) {
                self.out.return_front(again);
                break;
            }
        }
    }

    /// Sends a batch, and its copies; returns what the socket has no room for.
    fn send(&mut self, mut batch: Batch) -> Option<Batch> {
        let mut used = batch.to.path;
        let result = self.transmit(&mut used, &batch);
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            return Some(batch);
        }
        self.engine.sent(&batch, &used, result.as_ref().err());
        if let Some(also) = batch.to.also.take() {
            // The counters of the peer are those of what it receives once.
            batch.to.peer = None;
            batch.to.path = also;
            return self.send(batch);
        }
        self.out.recycle(batch);
        None
    }

    /// Sends a batch to the address in `path`, and records there where it left from.
    fn transmit(&self, path: &mut Path, batch: &Batch) -> io::Result<()> {
        if batch.bytes().is_empty() {
            return Ok(());
        }
        if let Some(kept) = self.path_port.kept(&path.remote) {
            path.local = None;
            let mut datagrams = batch.datagrams();
            let sent =
                datagrams.try_for_each(|datagram| udp::send_with(&kept, path, datagram, None, batch.to.ecn));
            // Without room they are lost, as in any queue of the network.
            return sent.map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => io::Error::from(Errno::ENOBUFS),
                _ => error,
            });
        }
        match &self.sockets {
            Some(sockets) => send_by(sockets, path, batch),
            None => Err(io::Error::new(io::ErrorKind::NotConnected, "no UDP port is configured")),
        }
    }
}

/// Packets of one read of the TUN; `None` if it does not begin with a valid header.
fn split(read: &mut [u8]) -> Option<offload::Split<'_>> {
    let (header, packet) = read.split_first_chunk_mut()?;
    offload::split(&VnetHeader::read(header), packet).ok()
}

/// Writes packets, which lie in `buffer`, to the TUN, and empties the list.
pub(super) fn write_packets(
    tun: Option<&Tun>,
    merger: &mut Merger,
    packets: &mut Vec<Range<usize>>,
    buffer: &mut [u8],
) {
    // The interface may be down, or its queue full: a network may lose packets.
    let write = |frame: &Frame<'_>, buffer: &[u8]| {
        if let Some(Err(error)) = tun.map(|tun| tun.write(frame, buffer)) {
            tracing::trace!(%error, "packets lost at the TUN");
        }
    };
    if tun.is_some_and(|tun| !tun.offloads().has_header()) {
        for packet in packets.drain(..) {
            write(&Frame { header: PLAIN, parts: &[packet] }, buffer);
        }
        return;
    }
    for packet in packets.drain(..) {
        merger.push(buffer, packet);
    }
    merger.finish(buffer);
    merger.frames().for_each(|frame| write(&frame, buffer));
    merger.clear();
}

/// Sends from our known address; if this host has it no longer, lets the kernel choose another, and records that in `path`.
fn send_by(sockets: &Sockets, path: &mut Path, batch: &Batch) -> io::Result<()> {
    let first = sockets.send_batch(path, batch.bytes(), batch.datagram_length(), batch.to.ecn);
    let lacks_address = |error: &io::Error| {
        matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EADDRNOTAVAIL | libc::ENETUNREACH))
    };
    match &first {
        Err(error) if path.local.is_some() && lacks_address(error) => {
            path.local = None;
            sockets.send_batch(path, batch.bytes(), batch.datagram_length(), batch.to.ecn)
        }
        _ => first,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use fairlead_keys::{DeviceChange, PeerConfig, PrivateKey};

    use super::*;
    use crate::ecn::Ecn;
    use crate::pump::Handle;
    use crate::workers::Workers;

    /// The loop of a device that has a key and one peer, without TUN and sockets.
    fn pump(key: u8, peer: u8) -> Pump {
        let (_, inbox) = Handle::new("test").unwrap();
        let mut pump = Pump::new(Workers::new("test".into(), Some(0)), None, 1420, inbox);
        let config = PeerConfig {
            endpoint: Some(SocketAddr::from(([192, 0, 2, peer], 51_820))),
            ..PeerConfig::default()
        };
        let change = DeviceChange {
            private_key: Some(PrivateKey([key; 32])),
            set_peers: [(PrivateKey([peer; 32]).public_key(), config)].into(),
            ..DeviceChange::default()
        };
        pump.engine.apply(&change, Now::read(), &mut pump.out);
        pump
    }

    fn lengths(pump: &mut Pump) -> Vec<usize> {
        std::iter::from_fn(|| pump.out.pop_front()).map(|batch| batch.bytes().len()).collect()
    }

    fn receive(pump: &mut Pump, datagram: &[u8]) {
        let (mut bytes, path) = (datagram.to_vec(), Path::to("192.0.2.1:51820".parse().unwrap()));
        let length = bytes.len().max(1);
        pump.receive(Received { path, ecn: Ecn::NOT_CAPABLE, bytes: &mut bytes, length }, None, Now::read());
    }

    /// The limiter answers the handshakes of a second with cookies once there were too many.
    #[test]
    fn a_flood_of_other_datagrams_does_not_reach_the_handshake_limiter() {
        let (mut initiator, mut responder) = (pump(1, 2), pump(2, 1));
        let initiation = initiator.out.pop_front().unwrap();
        lengths(&mut responder);
        let flood: [&[u8]; 5] = [&[1, 0, 0, 0], &[1; 148], &[2; 92], &[2, 0, 0, 1], &[0; 148]];
        for _ in 0..1_000 {
            flood.iter().for_each(|junk| receive(&mut responder, junk));
        }
        assert_eq!(responder.path_port.stats().dropped_without_reader, 5_000);
        assert_eq!(lengths(&mut responder), [0; 0]);
        receive(&mut responder, initiation.bytes());
        assert_eq!(lengths(&mut responder), [92], "a response, and no cookie (64)");
    }
}
