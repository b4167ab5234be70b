//! UDP sockets beside those of the WireGuard port: a birthday attempt opens many for some seconds, and keeps the one for which a
//! NAT has a mapping that the peer reaches. What goes to the peer's endpoint goes from that socket from then on, and what comes in
//! by it is received as if by the port.
//!
//! IPv4 only: there is no such NAT for IPv6.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use socket2::Socket;

use crate::udp::{self, Path};

/// Most sockets that are open in an attempt.
const MAX_OPEN: u16 = 256;
/// Most sockets that are kept.
const MAX_KEPT: usize = 256;
/// Sockets that are read before the others of the packet loop.
const MAX_READY: usize = 64;

/// A socket with datagrams that wait.
pub(crate) struct ReadySocket {
    pub(crate) socket: Arc<Socket>,
    /// Number of the socket in the attempt; `None` once that has ended.
    pub(crate) number: Option<u16>,
    /// The only endpoint from which it receives, if it is kept.
    pub(crate) remote: Option<SocketAddr>,
}

/// The sockets of one device. The packet loop waits for [`Self::descriptor`] and needs no word of what is opened and closed.
pub(crate) struct ExtraSockets {
    readable: Epoll,
    open: Mutex<Open>,
    /// The sockets that are kept, for each datagram that is sent; not locked while there are none.
    kept: RwLock<BTreeMap<SocketAddr, Arc<Socket>>>,
    has_kept: AtomicBool,
}

#[derive(Default)]
struct Open {
    next: u64,
    all: BTreeMap<u64, Entry>,
    /// Keys in `all` of the sockets of the attempt, by number.
    attempt: Vec<u64>,
}

struct Entry {
    socket: Arc<Socket>,
    number: Option<u16>,
    remote: Option<SocketAddr>,
}

impl ExtraSockets {
    pub(crate) fn new() -> io::Result<Self> {
        let readable = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { readable, open: Mutex::default(), kept: RwLock::default(), has_kept: false.into() })
    }

    /// Opens sockets on ports that the kernel chooses, numbered from zero; those of the last attempt are closed.
    pub(crate) fn open(&self, count: u16, mark: u32) -> io::Result<()> {
        self.close();
        let mut open = self.lock();
        for number in 0..count.min(MAX_OPEN) {
            match self.add(&mut open, 0, mark) {
                Ok(id) => {
                    open.all.entry(id).and_modify(|entry| entry.number = Some(number));
                    open.attempt.push(id);
                }
                Err(error) => {
                    drop(open);
                    self.close();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Opens a socket that is neither of an attempt nor kept yet.
    fn add(&self, open: &mut Open, port: u16, mark: u32) -> io::Result<u64> {
        self.insert(open, udp::open_extra(port, mark)?)
    }

    fn insert(&self, open: &mut Open, socket: Socket) -> io::Result<u64> {
        let id = open.next;
        self.readable.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, id))?;
        open.next = id.wrapping_add(1);
        open.all.insert(id, Entry { socket: Arc::new(socket), number: None, remote: None });
        Ok(id)
    }

    /// Sends from a socket of the attempt.
    pub(crate) fn send(&self, number: u16, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let socket = {
            let open = self.lock();
            let id = open.attempt.get(usize::from(number));
            let entry = id.and_then(|id| open.all.get(id)).ok_or(io::ErrorKind::NotConnected)?;
            Arc::clone(&entry.socket)
        };
        udp::send_from(&socket, &Path::to(remote), payload)
    }

    /// Keeps a socket of the attempt for an endpoint, instead of any other one.
    pub(crate) fn keep(&self, number: u16, remote: SocketAddr) -> io::Result<()> {
        self.leave(remote);
        let mut open = self.lock();
        let id = open.attempt.get(usize::from(number)).copied().ok_or(io::ErrorKind::NotFound)?;
        self.keep_as(&mut open, id, remote)
    }

    /// Opens a socket at a port and keeps it for an endpoint, instead of any other one.
    pub(crate) fn reserve(&self, port: u16, remote: SocketAddr, mark: u32) -> io::Result<()> {
        self.leave(remote);
        let mut open = self.lock();
        let id = self.add(&mut open, port, mark)?;
        let kept = self.keep_as(&mut open, id, remote);
        drop(open);
        if kept.is_err() {
            self.sweep();
        }
        kept
    }

    /// Keeps a socket of another process for an endpoint.
    pub(crate) fn adopt(&self, remote: SocketAddrV4, socket: Socket) -> io::Result<()> {
        let mut open = self.lock();
        let id = self.insert(&mut open, socket)?;
        self.keep_as(&mut open, id, remote.into())
    }

    /// The sockets that are kept, at most so many, by their endpoints.
    pub(crate) fn all_kept(&self, most: usize) -> Vec<(SocketAddrV4, Arc<Socket>)> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let of_ipv4 = kept.iter().filter_map(|(remote, socket)| match remote {
            SocketAddr::V4(remote) => Some((*remote, Arc::clone(socket))),
            SocketAddr::V6(_) => None,
        });
        of_ipv4.take(most).collect()
    }

    fn keep_as(&self, open: &mut Open, id: u64, remote: SocketAddr) -> io::Result<()> {
        if open.all.values().filter(|entry| entry.remote.is_some()).count() >= MAX_KEPT {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let entry = open.all.get_mut(&id).ok_or(io::ErrorKind::NotFound)?;
        udp::enlarge(&entry.socket);
        entry.remote = Some(remote);
        let mut kept = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        kept.insert(remote, Arc::clone(&entry.socket));
        self.has_kept.store(true, Ordering::Release);
        Ok(())
    }

    /// The number that the socket for an endpoint has in the attempt; `None` once that has ended.
    pub(crate) fn number_of(&self, remote: SocketAddr) -> Option<u16> {
        self.kept(&remote)?;
        self.lock().all.values().find(|entry| entry.remote == Some(remote))?.number
    }

    /// Closes the socket that is kept for an endpoint.
    pub(crate) fn leave(&self, remote: SocketAddr) {
        self.lock().all.values_mut().filter(|entry| entry.remote == Some(remote)).for_each(|entry| {
            entry.remote = None;
        });
        let mut kept = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        kept.remove(&remote);
        self.has_kept.store(!kept.is_empty(), Ordering::Release);
        drop(kept);
        self.sweep();
    }

    /// Ends the attempt: closes its sockets but those that are kept.
    pub(crate) fn close(&self) {
        let mut open = self.lock();
        open.attempt.clear();
        open.all.values_mut().for_each(|entry| entry.number = None);
        drop(open);
        self.sweep();
    }

    /// Closes all.
    pub(crate) fn close_all(&self) {
        self.lock().all.values_mut().for_each(|entry| entry.remote = None);
        self.kept.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.has_kept.store(false, Ordering::Release);
        self.close();
    }

    /// The socket that is kept for an endpoint.
    pub(crate) fn kept(&self, remote: &SocketAddr) -> Option<Arc<Socket>> {
        if !self.has_kept.load(Ordering::Acquire) {
            return None;
        }
        self.kept.read().unwrap_or_else(PoisonError::into_inner).get(remote).cloned()
    }

    /// `SO_MARK` of what is kept.
    pub(crate) fn set_mark(&self, mark: u32) -> io::Result<()> {
        self.lock().all.values().try_for_each(|entry| entry.socket.set_mark(mark))
    }

    /// Readable while datagrams wait on any of the sockets.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.readable.0.as_fd()
    }

    /// The sockets on which datagrams wait.
    pub(crate) fn ready(&self) -> Vec<ReadySocket> {
        let mut events = [EpollEvent::empty(); MAX_READY];
        let count = self.readable.wait(&mut events, EpollTimeout::ZERO).unwrap_or_default();
        if count == 0 {
            return Vec::new();
        }
        let open = self.lock();
        let ready = events.iter().take(count).filter_map(|event| open.all.get(&event.data()));
        ready
            .map(|Entry { socket, number, remote }| ReadySocket {
                socket: Arc::clone(socket),
                number: *number,
                remote: *remote,
            })
            .collect()
    }

    /// Closes what is neither of the attempt nor kept.
    fn sweep(&self) {
        self.lock().all.retain(|_, entry| {
            let stays = entry.number.is_some() || entry.remote.is_some();
            if !stays {
                // The packet loop may hold it for a moment.
                let _ = self.readable.delete(&entry.socket);
            }
            stays
        });
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    fn descriptors(sockets: &ExtraSockets) -> usize {
        sockets.lock().all.len()
    }

    #[test]
    fn a_socket_that_is_kept_outlives_the_attempt_and_is_used_for_its_endpoint_only() {
        let sockets = ExtraSockets::new().unwrap();
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let remote = peer.local_addr().unwrap();
        assert!(sockets.send(0, remote, b"early").is_err());
        sockets.open(256, 0).unwrap();
        assert_eq!(descriptors(&sockets), 256);
        sockets.send(7, remote, b"hello").unwrap();
        let (_, from) = peer.recv_from(&mut [0; 16]).unwrap();
        peer.send_to(b"back", ("127.0.0.1", from.port())).unwrap();
        let ready = sockets.ready();
        assert_eq!(
            ready.iter().map(|ready| (ready.number, ready.remote)).collect::<Vec<_>>(),
            [(Some(7), None)]
        );
        sockets.keep(7, remote).unwrap();
        sockets.close();
        assert_eq!(descriptors(&sockets), 1);
        assert!(sockets.send(7, remote, b"late").is_err());
        let kept = sockets.kept(&remote).unwrap();
        assert_eq!(kept.local_addr().unwrap().as_socket().unwrap().port(), from.port());
        assert!(sockets.kept(&"127.0.0.1:1".parse().unwrap()).is_none());
        let ready = sockets.ready();
        assert_eq!((ready[0].number, ready[0].remote), (None, Some(remote)));
        sockets.leave(remote);
        assert_eq!((descriptors(&sockets), sockets.kept(&remote).is_none()), (0, true));
        assert!(sockets.ready().is_empty());
    }

    #[test]
    fn another_attempt_or_another_socket_for_an_endpoint_closes_the_one_before() {
        let sockets = ExtraSockets::new().unwrap();
        let remote = "127.0.0.1:9".parse().unwrap();
        sockets.open(2, 0).unwrap();
        sockets.keep(0, remote).unwrap();
        sockets.open(3, 0).unwrap();
        assert_eq!(descriptors(&sockets), 4);
        sockets.keep(1, remote).unwrap();
        assert_eq!(descriptors(&sockets), 3);
        assert!(sockets.keep(3, remote).is_err(), "there is none of this number");
        sockets.close_all();
        assert_eq!(descriptors(&sockets), 0);
    }
}
