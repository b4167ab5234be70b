//! The packet loop: the one place that moves bytes between the TUN, the sockets and the engine.
//!
//! One thread, one packet per system call. It owns everything, so nothing is locked; whoever wants to know or change
//! something sends a [`Command`]. A faster loop can replace this module: [`Handle`] is all that others see of it.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Commands, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use fairlead_api::wireguard::{DeviceChange, DeviceState, PublicKey};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::Error;
use crate::engine::{Datagram, Engine, Output};
use crate::handover::{Inheritance, Retirement, Welcome, Work};
use crate::peer::Now;
use crate::tun::Tun;
use crate::udp::{Path, Receiver, Sockets};

/// Packets taken from one descriptor before the others get their turn.
const BATCH: usize = 64;
/// Datagrams that wait for room in a socket; no packet is taken from the TUN while any does.
const MOST_WAITING: usize = 256;
/// Requests that wait for the loop.
const MOST_COMMANDS: usize = 16;
/// No IP packet and no datagram is longer.
const LONGEST_PACKET: usize = 65_535;

/// A request to the loop, with where to put the answer.
enum Command {
    State(SyncSender<DeviceState>),
    Change(Box<DeviceChange>, SyncSender<Result<(), Error>>),
    SendError(PublicKey, SyncSender<Option<String>>),
    Delete(SyncSender<Result<(), Error>>),
    Retire(PathBuf, SyncSender<Result<(), Error>>),
    Stop,
}

/// What others know of a running loop.
#[derive(Clone)]
pub(crate) struct Handle {
    name: Arc<str>,
    commands: SyncSender<Command>,
    wake: Arc<UnixStream>,
}

impl Handle {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn state(&self) -> Result<DeviceState, Error> {
        self.ask(Command::State)
    }

    pub(crate) fn change(&self, change: DeviceChange) -> Result<(), Error> {
        self.ask(|answer| Command::Change(Box::new(change), answer))?
    }

    pub(crate) fn send_error(&self, key: PublicKey) -> Result<Option<String>, Error> {
        self.ask(|answer| Command::SendError(key, answer))
    }

    pub(crate) fn delete(&self) -> Result<(), Error> {
        self.ask(Command::Delete)?
    }

    /// Waits for a successor at `path` from now on; the loop ends when that one has everything.
    pub(crate) fn retire(&self, path: PathBuf) -> Result<(), Error> {
        self.ask(|answer| Command::Retire(path, answer))?
    }

    /// Ends the loop; it may have ended already.
    pub(crate) fn stop(&self) {
        let _ = self.tell(Command::Stop);
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, Error> {
        let (sender, answer) = sync_channel(1);
        self.tell(command(sender))?;
        answer.recv().map_err(|_| self.stopped())
    }

    fn tell(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| self.stopped())?;
        // A full pipe already wakes the loop.
        let _ = (&*self.wake).write(&[0]);
        Ok(())
    }

    fn stopped(&self) -> Error {
        Error::Stopped(self.name.to_string())
    }
}

/// Starts the loop on a thread that inherits the network namespace of the caller.
pub(crate) fn spawn(
    name: &str,
    (tun, inheritance): (Tun, Option<Inheritance>),
    mtu: u16,
) -> Result<(Handle, JoinHandle<()>), Error> {
    let (commands, inbox) = sync_channel(MOST_COMMANDS);
    let (wake, woken) = UnixStream::pair().map_err(Error::Spawn)?;
    wake.set_nonblocking(true).map_err(Error::Spawn)?;
    woken.set_nonblocking(true).map_err(Error::Spawn)?;
    let handle = Handle { name: name.into(), commands, wake: Arc::new(wake) };
    let mut engine = Engine::new(mtu);
    if let Some(inheritance) = &inheritance {
        engine.inherit(inheritance.peers());
    }
    let pump = Pump {
        name: Arc::clone(&handle.name),
        tun: Some(tun),
        sockets: None,
        mark: 0,
        engine,
        other: inheritance.map_or(Other::Nobody, Other::Predecessor),
        inbox,
        woken,
        waiting: VecDeque::new(),
        outputs: Vec::new(),
        next_tick: Instant::now(),
    };
    let thread = thread::Builder::new()
        .name(format!("wg-{name}"))
        .stack_size(512 << 10)
        .spawn(move || pump.run())
        .map_err(Error::Spawn)?;
    Ok((handle, thread))
}

struct Pump {
    name: Arc<str>,
    /// `None` once deleted.
    tun: Option<Tun>,
    /// `None` until a port is configured.
    sockets: Option<Sockets>,
    mark: u32,
    engine: Engine,
    other: Other,
    inbox: Commands<Command>,
    woken: UnixStream,
    waiting: VecDeque<Datagram>,
    outputs: Vec<Output>,
    next_tick: Instant,
}

/// Another process that works on the same interface for a while.
enum Other {
    Nobody,
    Predecessor(Inheritance),
    Successor(Retirement),
}

impl Other {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Nobody => None,
            Self::Predecessor(inheritance) => Some(inheritance.descriptor()),
            Self::Successor(retirement) => Some(retirement.descriptor()),
        }
    }

    /// Whether this process reads the TUN.
    fn leaves_tunnel(&self) -> bool {
        match self {
            Self::Nobody => true,
            Self::Predecessor(inheritance) => inheritance.reads_tunnel(),
            Self::Successor(retirement) => retirement.reads_tunnel(),
        }
    }

    /// Whether this process reads its sockets.
    fn leaves_network(&self) -> bool {
        match self {
            Self::Nobody | Self::Predecessor(_) => true,
            Self::Successor(retirement) => retirement.reads_network(),
        }
    }
}

/// What the last `poll` found.
struct Ready {
    tunnel: bool,
    network: bool,
    other: bool,
}

/// Whether the loop goes on.
enum Flow {
    Continue,
    End,
}

impl Pump {
    fn run(mut self) {
        let mut packet = vec![0; LONGEST_PACKET];
        let mut receiver = Receiver::new(LONGEST_PACKET);
        loop {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!(interface = %self.name, %error, "the packet loop of WireGuard ends");
                    return;
                }
            };
            if matches!(self.obey(), Flow::End) {
                return;
            }
            let now = Now::read();
            if ready.other && matches!(self.attend(now), Flow::End) {
                return;
            }
            if ready.network {
                self.take_from_network(&mut receiver, now);
            }
            if ready.tunnel
                && let Err(error) = self.take_from_tunnel(&mut packet, now)
            {
                tracing::error!(interface = %self.name, %error, "cannot read the TUN; the packet loop of WireGuard ends");
                return;
            }
            if now.instant >= self.next_tick {
                self.next_tick = self.engine.tick(now, &mut self.outputs);
            }
            self.flush();
            self.inherit(now);
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&self) -> io::Result<Ready> {
        let tun = self.tun.as_ref().ok_or_else(|| io::Error::other("the interface was deleted"))?;
        let first_waits_for_v6 = self.waiting.front().map(|datagram| datagram.path.remote.is_ipv6());
        let if_so = |condition| if condition { PollFlags::POLLIN } else { PollFlags::empty() };
        let read_tunnel = if_so(self.waiting.is_empty() && self.other.leaves_tunnel());
        let read_network = if_so(self.other.leaves_network());
        let mut descriptors =
            vec![PollFd::new(self.woken.as_fd(), PollFlags::POLLIN), PollFd::new(tun.as_fd(), read_tunnel)];
        let sockets = self.sockets.iter().flat_map(Sockets::descriptors).zip([false, true]);
        descriptors.extend(sockets.map(|(socket, is_v6)| {
            let write =
                if first_waits_for_v6 == Some(is_v6) { PollFlags::POLLOUT } else { PollFlags::empty() };
            PollFd::new(socket, read_network | write)
        }));
        let sockets = 2..descriptors.len();
        descriptors.extend(self.other.descriptor().map(|other| PollFd::new(other, PollFlags::POLLIN)));
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
        Ok(Ready {
            tunnel: found(1).contains(PollFlags::POLLIN),
            network: self.other.leaves_network()
                && sockets.clone().any(|index| found(index).intersects(readable)),
            other: self.other.descriptor().is_some()
                && found(sockets.end).intersects(readable | PollFlags::POLLHUP),
        })
    }

    fn until_next_tick(&self) -> PollTimeout {
        let left = self.next_tick.saturating_duration_since(Instant::now());
        // Rounded up, or the loop would spin through the last millisecond.
        PollTimeout::try_from(left.as_millis().saturating_add(1)).unwrap_or(PollTimeout::MAX)
    }

    fn obey(&mut self) -> Flow {
        let mut bytes = [0; 64];
        while self.woken.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
        while let Ok(command) = self.inbox.try_recv() {
            // Whoever asked may have gone: an answer that cannot be delivered is no error.
            match command {
                Command::State(answer) => drop(answer.send(self.state())),
                Command::Change(change, answer) => drop(answer.send(self.change(&change))),
                Command::SendError(key, answer) => {
                    drop(answer.send(self.engine.send_error(&key).map(str::to_owned)));
                }
                Command::Delete(answer) => {
                    drop(answer.send(self.tun.take().map_or(Ok(()), Tun::delete)));
                    return Flow::End;
                }
                Command::Retire(path, answer) => {
                    let retirement =
                        Retirement::start(&path).map_err(|source| Error::Retire { path, source });
                    drop(answer.send(retirement.map(|retirement| self.other = Other::Successor(retirement))));
                }
                Command::Stop => return Flow::End,
            }
        }
        Flow::Continue
    }

    fn state(&self) -> DeviceState {
        DeviceState {
            private_key: self.engine.private_key().cloned(),
            listen_port: self.sockets.as_ref().map_or(0, Sockets::port),
            fwmark: self.mark,
            peers: self.engine.peers().collect(),
        }
    }

    /// All or nothing: whatever can fail comes before the first effect.
    fn change(&mut self, change: &DeviceChange) -> Result<(), Error> {
        self.engine.check(change)?;
        let mark = change.fwmark.unwrap_or(self.mark);
        let present = self.sockets.as_ref().map(Sockets::port);
        match change.listen_port.filter(|port| Some(*port) != present) {
            Some(port) => self.open(port, mark)?,
            None if mark != self.mark => {
                self.sockets.iter().try_for_each(|sockets| sockets.set_mark(mark))?
            }
            None => {}
        }
        self.mark = mark;
        let now = Now::read();
        self.engine.apply(change, now, &mut self.outputs);
        self.next_tick = now.instant;
        Ok(())
    }

    fn open(&mut self, port: u16, mark: u32) -> Result<(), Error> {
        let Other::Predecessor(inheritance) = &mut self.other else {
            self.sockets = Some(Sockets::open(port, mark)?);
            return Ok(());
        };
        let inherited = inheritance.take_sockets(port);
        let is_inherited = inherited.is_some();
        self.sockets = Some(match inherited {
            Some(sockets) => Sockets::inherit(sockets, port, mark)?,
            None => Sockets::open(port, mark)?,
        });
        if let Err(error) = inheritance.arrive(is_inherited, Instant::now()) {
            self.orphan(&error);
        }
        Ok(())
    }

    /// Goes on alone.
    fn orphan(&mut self, error: &io::Error) {
        tracing::warn!(interface = %self.name, %error, "the predecessor went away half-way");
        self.other = Other::Nobody;
    }

    /// Moves on with what a predecessor has left.
    fn inherit(&mut self, now: Now) {
        let Other::Predecessor(inheritance) = &mut self.other else { return };
        match inheritance.step(now.instant, |key| self.engine.is_settled(key)) {
            Ok(true) => {}
            Ok(false) => {
                tracing::info!(interface = %self.name, "took over from the program before");
                // Whoever is configured from now on may have moved since.
                self.engine.inherit(&[]);
                self.other = Other::Nobody;
            }
            Err(error) => self.orphan(&error),
        }
    }

    /// Hears the other process.
    fn attend(&mut self, now: Now) -> Flow {
        match &mut self.other {
            Other::Nobody => {}
            // It never speaks again: it has gone.
            Other::Predecessor(_) => self.orphan(&io::ErrorKind::ConnectionReset.into()),
            Other::Successor(retirement) => {
                for _ in 0..BATCH {
                    match retirement.next() {
                        Work::Greet => {
                            let port = self.sockets.as_ref().map_or(0, Sockets::port);
                            let tun = self.tun.iter().map(Tun::as_fd);
                            let descriptors: Vec<_> =
                                tun.chain(self.sockets.iter().flat_map(Sockets::descriptors)).collect();
                            let peers = self.engine.acquaintances();
                            retirement.greet(Welcome { port, peers }, &descriptors);
                        }
                        Work::Datagram(path, datagram) => {
                            self.engine.incoming(datagram, path, now, &mut self.outputs);
                        }
                        Work::Nothing => break,
                        Work::End => return Flow::End,
                    }
                }
            }
        }
        Flow::Continue
    }

    fn take_from_network(&mut self, receiver: &mut Receiver, now: Now) {
        let Some(sockets) = &self.sockets else { return };
        for socket in sockets.descriptors() {
            for _ in 0..BATCH {
                match receiver.receive(socket) {
                    Ok(Some((path, datagram))) => match &self.other {
                        // If it has gone meanwhile, the next look at the connection says so.
                        Other::Predecessor(inheritance) if self.engine.is_of_another(datagram) => {
                            drop(inheritance.pass_on(path, datagram));
                        }
                        _ => self.engine.incoming(datagram, path, now, &mut self.outputs),
                    },
                    Ok(None) => {}
                    // Nothing there, or an ICMP error that reading has cleared.
                    Err(_) => break,
                }
            }
        }
    }

    fn take_from_tunnel(&mut self, buffer: &mut [u8], now: Now) -> io::Result<()> {
        let Some(tun) = &self.tun else { return Ok(()) };
        for _ in 0..BATCH {
            match tun.read(buffer) {
                Ok(length) => {
                    let packet = buffer.get(..length).unwrap_or_default();
                    self.engine.outgoing(packet, now, &mut self.outputs);
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

    /// Sends and writes what the engine wants out, older datagrams first.
    fn flush(&mut self) {
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
                Output::Datagram(datagram) if self.waiting.len() < MOST_WAITING => {
                    self.waiting.push_back(datagram)
                }
                Output::Datagram(_) => {}
            }
        }
        // Keeps the allocation, unless one flood made it huge.
        outputs.shrink_to(MOST_WAITING);
        self.outputs = outputs;
    }

    fn write(&self, packet: &[u8]) {
        // The interface may be down, or its queue full: a network may lose packets.
        if let Some(Err(error)) = self.tun.as_ref().map(|tun| tun.write(packet)) {
            tracing::trace!(interface = %self.name, %error, "packet lost at the TUN");
        }
    }

    /// Sends a datagram; gives it back if the socket has no room.
    fn send(&mut self, datagram: Datagram) -> Option<Datagram> {
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

/// Sends from our known address; if that fails, lets the kernel choose another, and says so in `path`.
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
