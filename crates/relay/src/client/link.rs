//! One registered connection, from its registration to its end.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_wire::relay::{Frame, Notice, StunServer};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{sleep_until, timeout};

use super::links::LinkStatus;
use super::liveness::{Action, Liveness};
use super::queue::{RelayPort, Shared, lock};
use super::{Connection, Receiver, Sender};

/// Time limit of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which the user sees that another program has this key, after the relay has said so.
const DUPLICATE: Duration = Duration::from_secs(120);

/// Takes what the relay passes to this node: the peer and the datagram.
pub type Receive = dyn Fn(PublicKey, &[u8]) + Send + Sync;

/// Report of a link about itself.
pub(super) struct Report {
    pub(super) link: u64,
    pub(super) event: LinkEvent,
}

pub(super) enum LinkEvent {
    /// The relay ends; connect again after this time.
    Draining(Duration),
    /// The connection broke, or the relay does not answer.
    Ended(String),
    /// The relay has ended the link with an error.
    Refused(String),
    /// Number of other replicas of the relay that accept stand-by links.
    Replicas(u8),
    /// Address and STUN ports of the relay, with the credentials of this client.
    Stun(Option<(IpAddr, StunServer)>),
}

/// One registered connection.
pub(super) struct Link {
    pub(super) number: u64,
    pub(super) address: Option<IpAddr>,
    /// The key that is registered.
    pub(super) own: PublicKey,
    pub(super) shared: Arc<Shared>,
    /// There is something to write.
    pub(super) waker: Arc<Notify>,
    pub(super) receive: Arc<Receive>,
    pub(super) status: watch::Sender<LinkStatus>,
    pub(super) report: mpsc::Sender<Report>,
}

/// A link that writes until this is dropped.
struct Writing<'a>(&'a Shared, u64);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.stop_writer(self.1);
    }
}

impl Link {
    pub(super) async fn run(self, connection: Connection) {
        let (sender, receiver) = connection.split();
        let liveness = Mutex::new(Liveness::new(Instant::now()));
        let pongs = Mutex::new(Vec::new());
        // Also when the task is aborted.
        let writing = Writing(&self.shared, self.number);
        let event = tokio::select! {
            event = self.read(receiver, &liveness, &pongs) => event,
            error = self.write(sender, &liveness, &pongs) => LinkEvent::Ended(error),
        };
        drop(writing);
        let report = Report { link: self.number, event };
        drop(self.report.send(report).await);
    }

    /// Writes what is queued, pings, and answers to pings, until the link ends; returns why.
    async fn write(
        &self,
        mut sender: Sender,
        liveness: &Mutex<Liveness>,
        pongs: &Mutex<Vec<[u8; 8]>>,
    ) -> String {
        let mut out = Vec::new();
        loop {
            out.clear();
            if self.shared.take(self.number, &mut out).is_some() && !out.is_empty() {
                lock(liveness).sent(Instant::now());
            }
            for pong in std::mem::take(&mut *lock(pongs)) {
                let _ = Frame::Pong(pong).encode(&mut out);
            }
            let wait = match lock(liveness).poll(Instant::now()) {
                Action::End => return "the relay does not answer".to_owned(),
                Action::Ping => {
                    let _ = Frame::Ping(self.number.to_be_bytes()).encode(&mut out);
                    Instant::now()
                }
                Action::Wait(until) => self.shared.next_due(self.number).map_or(until, |due| until.min(due)),
            };
            if !out.is_empty() {
                match timeout(WRITE_TIMEOUT, sender.send(&out)).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "the relay does not read".to_owned(),
                }
            }
            tokio::select! {
                () = self.waker.notified() => {}
                () = sleep_until(wait.into()) => {}
            }
        }
    }

    async fn read(
        &self,
        mut receiver: Receiver,
        liveness: &Mutex<Liveness>,
        pongs: &Mutex<Vec<[u8; 8]>>,
    ) -> LinkEvent {
        loop {
            let handled = receiver.receive(|frame| self.handle(frame, liveness, pongs)).await;
            match handled {
                Ok(None) => {}
                Ok(Some(LinkEvent::Refused(error))) => return LinkEvent::Refused(error),
                Ok(Some(event)) => {
                    drop(self.report.send(Report { link: self.number, event }).await);
                }
                Err(error) => return LinkEvent::Ended(error.to_string()),
            }
        }
    }

    fn handle(
        &self,
        frame: &Frame<'_>,
        liveness: &Mutex<Liveness>,
        pongs: &Mutex<Vec<[u8; 8]>>,
    ) -> Option<LinkEvent> {
        let now = Instant::now();
        lock(liveness).received(now);
        match frame {
            Frame::Datagram { peer, payload } | Frame::Probe { peer, payload } => {
                let peer = PublicKey(*peer);
                if self.shared.received(&peer, payload, self.own < peer) {
                    (self.receive)(peer, payload);
                }
            }
            Frame::PeerGone(peer) => self.shared.peer_gone(&PublicKey(*peer)),
            Frame::Ping(data) => {
                let mut pongs = lock(pongs);
                if pongs.is_empty() {
                    pongs.push(*data);
                    self.waker.notify_one();
                }
            }
            Frame::Pong(_) => {
                let round_trip = lock(liveness).answered(now);
                if round_trip.is_some() && self.shared.is_writer(self.number) {
                    self.status.send_modify(|status| status.round_trip = round_trip);
                }
            }
            Frame::Draining { reconnect_after, .. } => {
                return Some(LinkEvent::Draining(Duration::from_millis((*reconnect_after).into())));
            }
            Frame::Notice(Notice::DuplicateKey) => {
                self.status.send_modify(|status| status.duplicate_until = Some(now + DUPLICATE));
            }
            Frame::Allocated(allocated) => {
                let port = self.address.map(|address| RelayPort {
                    peer: PublicKey(allocated.peer),
                    address: SocketAddr::new(address, allocated.port),
                    token: allocated.token,
                });
                if let Some(port) = port {
                    self.shared.allocated(port);
                }
            }
            Frame::StunServer(server) => {
                return Some(LinkEvent::Stun(self.address.map(|address| (address, *server))));
            }
            Frame::Error { reason, .. } => {
                return Some(LinkEvent::Refused(format!("the relay ended it: {reason}")));
            }
            Frame::Replicas(count) => return Some(LinkEvent::Replicas(*count)),
            _ => {}
        }
        None
    }
}
