//! The packet loop: the one place that moves bytes between the TUN, the sockets and the engine.
//!
//! One thread that owns everything, so nothing is locked per packet; other threads send it commands ([`Handle`]), and encrypt and decrypt
//! batches that it lends them ([`Workers`]).

use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use fairlead_keys::{DeviceChange, DeviceState};
use fairlead_wireguard::SystemRandom;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::clock::Clock;
use crate::engine::Engine;
use crate::handover::Takeover;
use crate::offload::{self, Merger};
use crate::outbox::Outbox;
use crate::path_socket::PathPort;
use crate::received::ReceivedBatches;
use crate::tun::{Offloads, Tun};
use crate::udp::{Receiver, Sockets};
use crate::workers::Workers;
use crate::{Error, Settings};

mod handle;
mod handover;
mod packets;

use handle::{Command, Inbox};
use handover::Handover;

pub(crate) use handle::Handle;

/// No IP packet and no datagram is longer.
const MAX_PACKET_LENGTH: usize = 65_535;

/// Starts the loop on a thread that inherits the network namespace of the caller.
pub(crate) fn spawn(
    settings: &Settings,
    (tun, takeover): (Tun, Option<Takeover>),
    mtu: u16,
) -> Result<(Handle, Arc<PathPort>, JoinHandle<()>), Error> {
    let name = &*settings.name;
    let (handle, inbox) = Handle::new(name)?;
    let workers = Workers::new(name.into(), settings.threads);
    let mut pump = Pump::new(workers, Some(tun), mtu, inbox);
    if let Some(mut takeover) = takeover {
        pump.path_port.adopt_sockets(takeover.take_kept());
        pump.engine.set_peer_snapshots(takeover.peers());
        pump.handover = Handover::Takeover(takeover);
    }
    let path_port = Arc::clone(&pump.path_port);
    let thread = thread::Builder::new()
        .name(format!("wg-{name}"))
        .stack_size(512 << 10)
        .spawn(move || pump.run())
        .map_err(Error::Spawn)?;
    Ok((handle, path_port, thread))
}

struct Pump {
    name: Arc<str>,
    /// `None` once deleted.
    tun: Option<Tun>,
    /// `None` until a port is configured.
    sockets: Option<Arc<Sockets>>,
    mark: u32,
    clock: Clock,
    engine: Engine,
    path_port: Arc<PathPort>,
    handover: Handover,
    inbox: Inbox,
    out: Outbox,
    received: ReceivedBatches,
    workers: Workers,
    merger: Merger,
    /// Ranges of the packets that were decrypted last.
    packets: Vec<Range<usize>>,
}

/// Descriptors that the last `poll` found ready.
struct Ready {
    tunnel: bool,
    /// The sockets of the port, IPv4 first.
    sockets: [bool; 2],
    /// Sockets beside the port.
    extra: bool,
    handover: bool,
}

/// Whether the loop continues.
enum Flow {
    Continue,
    End,
}

impl Pump {
    fn new(workers: Workers, tun: Option<Tun>, mtu: u16, inbox: Inbox) -> Self {
        let offloads = tun.as_ref().map(Tun::offloads).unwrap_or_default();
        Self {
            name: workers.device(),
            out: Outbox::new(&workers),
            workers,
            tun,
            sockets: None,
            mark: 0,
            clock: Clock::new(),
            engine: Engine::new(mtu, Box::new(SystemRandom)),
            path_port: Arc::new(PathPort::new()),
            handover: Handover::None,
            inbox,
            received: ReceivedBatches::default(),
            merger: Merger::new(offloads == Offloads::HeaderAndUdp),
            packets: Vec::new(),
        }
    }

    fn run(mut self) {
        let mut packet = vec![0; MAX_PACKET_LENGTH.saturating_add(offload::HEADER_LENGTH)];
        let mut receiver = Receiver::new(MAX_PACKET_LENGTH);
        loop {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!(interface = %self.name, %error, "the packet loop of WireGuard ends");
                    return;
                }
            };
            if matches!(self.handle_commands(), Flow::End) {
                return;
            }
            if let Some(also) = self.path_port.take_both_ways() {
                self.engine.set_both_ways(&also);
            }
            let now = self.clock.now();
            if ready.handover && matches!(self.poll_handover(now), Flow::End) {
                return;
            }
            self.read_network(ready.sockets, &mut receiver, now);
            if ready.extra {
                self.read_extra(&mut receiver, now);
            }
            if ready.tunnel
                && let Err(error) = self.read_tunnel(&mut packet, now)
            {
                tracing::error!(interface = %self.name, %error, "cannot read the TUN; the packet loop of WireGuard ends");
                return;
            }
            self.engine.tick(now, &mut self.out);
            self.path_port.push_unanswered(self.engine.take_unanswered());
            self.path_port.count_copies(self.engine.take_copies());
            self.flush();
            self.advance_takeover(now);
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&self) -> io::Result<Ready> {
        let tun = self.tun.as_ref().ok_or_else(|| io::Error::other("the interface was deleted"))?;
        let first_waits_for_v6 = self.out.front().map(|batch| batch.to.path.remote.is_ipv6());
        let readable_if = |condition| if condition { PollFlags::POLLIN } else { PollFlags::empty() };
        let read_tunnel = readable_if(self.out.is_empty() && self.handover.reads_tunnel());
        let read_network = readable_if(self.handover.reads_network());
        let mut descriptors = vec![
            PollFd::new(self.inbox.woken.as_fd(), PollFlags::POLLIN),
            PollFd::new(tun.as_fd(), read_tunnel),
        ];
        let sockets = self.sockets.iter().flat_map(|sockets| sockets.descriptors()).zip([false, true]);
        descriptors.extend(sockets.map(|(socket, is_v6)| {
            let write =
                if first_waits_for_v6 == Some(is_v6) { PollFlags::POLLOUT } else { PollFlags::empty() };
            PollFd::new(socket, read_network | write)
        }));
        let extra = descriptors.len();
        descriptors.extend(self.path_port.extra_descriptor().map(|extra| PollFd::new(extra, read_network)));
        let other_process = descriptors.len();
        let forward = if self.handover.waits() { PollFlags::POLLOUT } else { PollFlags::empty() };
        let connection = self.handover.descriptor();
        descriptors.extend(connection.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN | forward)));
        match poll(&mut descriptors, self.until_next_tick()) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let found =
            |index: usize| descriptors.get(index).and_then(PollFd::revents).unwrap_or(PollFlags::empty());
        if found(1).intersects(PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL) {
            return Err(io::Error::other("the TUN interface was removed"));
        }
        let readable = PollFlags::POLLIN | PollFlags::POLLERR;
        let reads = |index: usize| self.handover.reads_network() && found(index).intersects(readable);
        Ok(Ready {
            tunnel: found(1).contains(PollFlags::POLLIN),
            sockets: [2, 3].map(|index| index < extra && reads(index)),
            extra: extra < other_process && reads(extra),
            handover: self.handover.descriptor().is_some()
                && found(other_process).intersects(readable | PollFlags::POLLHUP),
        })
    }

    fn until_next_tick(&self) -> PollTimeout {
        let timers =
            self.engine.poll_timeout().map(|due| due.saturating_duration_since(self.clock.now().instant));
        let left = [timers, self.handover.poll_interval()].into_iter().flatten().min();
        // Rounded up, or the loop would spin through the last millisecond.
        left.map_or(PollTimeout::NONE, |left| {
            PollTimeout::try_from(left.as_millis().saturating_add(1)).unwrap_or(PollTimeout::MAX)
        })
    }

    fn handle_commands(&mut self) -> Flow {
        let mut bytes = [0; 64];
        while self.inbox.woken.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
        while let Ok(command) = self.inbox.commands.try_recv() {
            // The caller may have gone: an answer that cannot be delivered is no error.
            match command {
                Command::Accept(prefixes, answer) => {
                    self.engine.accept(&prefixes);
                    let _ = answer.send(());
                }
                Command::Change(change, answer) => drop(answer.send(self.change(&change))),
                Command::Delete(answer) => {
                    drop(answer.send(self.tun.take().map_or(Ok(()), Tun::delete)));
                    return Flow::End;
                }
                Command::SendError(key, answer) => {
                    drop(answer.send(self.engine.send_error(&key).map(str::to_owned)));
                }
                Command::ServeHandover(path, answer) => drop(answer.send(self.serve_handover(path))),
                Command::State(answer) => drop(answer.send(self.state())),
                Command::Stop => return Flow::End,
            }
        }
        Flow::Continue
    }

    fn state(&self) -> DeviceState {
        DeviceState {
            private_key: self.engine.private_key().cloned(),
            listen_port: self.sockets.as_ref().map_or(0, |sockets| sockets.port()),
            fwmark: self.mark,
            peers: self.engine.peers().collect(),
        }
    }

    /// All or nothing: everything that can fail comes before the first effect.
    fn change(&mut self, change: &DeviceChange) -> Result<(), Error> {
        self.engine.check(change)?;
        let mark = change.fwmark.unwrap_or(self.mark);
        let present = self.sockets.as_ref().map(|sockets| sockets.port());
        match change.listen_port.filter(|port| Some(*port) != present) {
            Some(port) => self.open_port(port, mark)?,
            None if mark != self.mark => {
                self.sockets.iter().try_for_each(|sockets| sockets.set_mark(mark))?;
                self.path_port.set_mark(mark);
            }
            None => {}
        }
        self.mark = mark;
        let now = self.clock.now();
        self.engine.apply(change, now, &mut self.out);
        Ok(())
    }
}
