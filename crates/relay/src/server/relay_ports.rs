//! The UDP ports for pairs of peers: a socket and a task for each of [`Allocations`].

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fairlead_address::canonical;
use fairlead_keys::PublicKey;
use fairlead_transport::udp_runs;
use socket2::SockRef;
use tokio::net::UdpSocket;
use tokio_util::task::AbortOnDropHandle;

use super::batch;
use super::udp::bind;
use crate::core::{
    Admission, AllocationCounters, AllocationLimits, AllocationRefusal, Allocations, Output, Token,
};

/// Bytes that wait in the kernel for a port; the system may allow less.
const BUFFER: usize = 1 << 20;
/// Ports of other programs that are tried before a client is refused.
const ATTEMPTS: usize = 32;

/// The open ports. A range that begins with zero is that many free ports and one.
#[derive(Debug)]
pub(super) struct RelayPorts {
    ip: IpAddr,
    range: RangeInclusive<u16>,
    allocations: Arc<Mutex<Allocations>>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    tasks: HashMap<u16, AbortOnDropHandle<()>>,
    /// Number of ports tried so far, from which the next one follows.
    tried: usize,
}

impl RelayPorts {
    pub(super) fn new(ip: IpAddr, range: RangeInclusive<u16>, limits: AllocationLimits) -> io::Result<Self> {
        let allocations = Allocations::new(limits, crate::random::bytes()?, Instant::now());
        Ok(Self { ip, range, allocations: Arc::new(Mutex::new(allocations)), open: Mutex::default() })
    }

    /// All ports that it may open.
    pub(super) fn range(&self) -> &RangeInclusive<u16> {
        &self.range
    }

    /// The port of a client to a peer, opened if there is none yet, and the client's new token for it.
    pub(super) fn allocate(
        &self,
        client: &Admission,
        peer: PublicKey,
    ) -> Result<(u16, Token), AllocationRefusal> {
        let now = Instant::now();
        let token = crate::random::bytes().map_err(|_| AllocationRefusal::NoPort)?;
        // Held while a port is opened: another client may ask for the same one.
        let mut open = self.open();
        if let Some(port) = lock(&self.allocations).join(now, client, peer, token)? {
            return Ok((port, token));
        }
        let Some((port, socket)) = self.bind_next(&mut open) else {
            return Err(lock(&self.allocations).refuse(AllocationRefusal::NoPort));
        };
        lock(&self.allocations).open(now, port, client, peer, token);
        let task = tokio::spawn(pass(socket, port, Arc::clone(&self.allocations)));
        open.tasks.insert(port, AbortOnDropHandle::new(task));
        Ok((port, token))
    }

    /// Counts a refusal that was decided elsewhere.
    pub(super) fn refuse(&self, reason: AllocationRefusal) {
        lock(&self.allocations).refuse(reason);
    }

    fn bind_next(&self, open: &mut Open) -> Option<(u16, UdpSocket)> {
        let count = usize::from(self.range.end().checked_sub(*self.range.start())?).saturating_add(1);
        if open.tasks.len() >= count {
            return None;
        }
        for _ in 0..ATTEMPTS.saturating_add(open.tasks.len()) {
            let offset = u16::try_from(open.tried % count).ok()?;
            open.tried = open.tried.wrapping_add(1);
            let first = *self.range.start();
            let port = if first == 0 { 0 } else { first.checked_add(offset)? };
            if open.tasks.contains_key(&port) {
                continue;
            }
            match bind(SocketAddr::new(self.ip, port)) {
                Ok(socket) => {
                    let port = socket.local_addr().ok()?.port();
                    let options = SockRef::from(&socket);
                    drop(options.set_recv_buffer_size(BUFFER));
                    drop(options.set_send_buffer_size(BUFFER));
                    batch::enable_merging(&socket);
                    return Some((port, socket));
                }
                Err(error) => tracing::debug!(port, %error, "cannot open a UDP port"),
            }
        }
        None
    }

    /// Closes ports that were idle for too long.
    pub(super) fn handle_timeout(&self) {
        let mut open = self.open();
        let gone = lock(&self.allocations).handle_timeout(Instant::now());
        gone.iter().for_each(|port| drop(open.tasks.remove(port)));
    }

    /// Closes ports of clients that are not allowed any more.
    pub(super) fn retain(&self, is_allowed: impl Fn(&Admission) -> bool) {
        let mut open = self.open();
        let gone = lock(&self.allocations).retain(is_allowed);
        gone.iter().for_each(|port| drop(open.tasks.remove(port)));
    }

    /// Counters of all ports, and the number of open ones.
    pub(super) fn counters(&self) -> (AllocationCounters, usize) {
        let allocations = lock(&self.allocations);
        (allocations.counters(), allocations.len())
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        lock(&self.open)
    }
}

/// Passes datagrams on; never returns.
async fn pass(socket: UdpSocket, port: u16, allocations: Arc<Mutex<Allocations>>) {
    let is_ipv6 = socket.local_addr().is_ok_and(|address| address.is_ipv6());
    let are_cut = udp_runs::are_cut(&socket);
    loop {
        if let Err(error) = socket.readable().await {
            tracing::warn!(port, %error, "cannot read from a UDP port");
            return;
        }
        let passed = batch::pass(&socket, are_cut, |datagrams, runs| {
            let mut allocations = lock(&allocations);
            let now = Instant::now();
            for (source, datagram) in datagrams {
                match allocations.handle_datagram(now, port, canonical(source), datagram) {
                    Ok(Output::Answer(answer)) => drop(socket.try_send_to(&answer, source)),
                    Ok(Output::Forward(to)) => runs.push(of_family(to, is_ipv6), datagram),
                    Err(_) => {}
                }
            }
        });
        if let Err(error) = passed
            && error.kind() != io::ErrorKind::WouldBlock
        {
            // An ICMP error of an earlier datagram.
            tracing::trace!(port, %error, "cannot read datagrams");
        }
        tokio::task::yield_now().await;
    }
}

/// An address as a socket of this family writes it.
fn of_family(address: SocketAddr, is_ipv6: bool) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if is_ipv6 => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        other => other,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
