//! Stays connected to a relay: over one link, or over two where the relay has replicas, or while one that ends is replaced.

use std::collections::BTreeMap;
use std::future::pending;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_wire::relay::StunServer;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, sleep_until};

use super::link::{Link, LinkEvent, Receive, Report};
use super::plan::{Change, End, Plan, Role};
use super::queue::{LinkQueue, Writer};
use super::{ConnectError, Connection, Settings, connect, connect_standby};

/// Time for which a link that was replaced still receives: the relay passes it nothing new.
const REPLACED: Duration = Duration::from_secs(5);

/// The state of the links, for users.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinkStatus {
    /// Whether the relay passes datagrams.
    pub is_up: bool,
    /// Whether a second link, at another replica of the relay, stands by.
    pub has_standby: bool,
    /// Reason why no link is up.
    pub error: Option<String>,
    /// Time since which none is up.
    pub down_since: Option<Instant>,
    /// Round-trip time to the relay, of the last ping.
    pub round_trip: Option<Duration>,
    /// Address and STUN ports of the relay, with the credentials of this client; `None` if it answers none of its requests.
    pub stun: Option<(IpAddr, StunServer)>,
    /// Time until which another program is taken to use this node's key.
    pub duplicate_until: Option<Instant>,
}

/// Stays connected to the relay of `settings`; never returns. Dropping it ends all links. While there are two of it with one queue, the
/// one that connected last sends.
pub async fn keep_connected(
    settings: Settings,
    queue: LinkQueue,
    receive: Arc<Receive>,
    status: watch::Sender<LinkStatus>,
) {
    let (report, mut reports) = mpsc::channel(16);
    let tasks = JoinSet::new();
    let up = BTreeMap::new();
    let plan = Plan::new(Instant::now());
    let mut links = Links { settings, queue, receive, status, report, tasks, plan, up };
    let mut attempt: Option<Attempt> = None;
    loop {
        let due = links.plan.due();
        // What was begun for a stand-by link does not delay an active one.
        attempt = attempt.filter(|attempt| due.is_some_and(|(_, role)| role == attempt.role));
        let is_connecting = attempt.is_some();
        let begin = async {
            match due.filter(|_| !is_connecting) {
                Some((at, role)) => {
                    sleep_until(at.into()).await;
                    role
                }
                None => pending().await,
            }
        };
        let connected = async {
            match &mut attempt {
                Some(attempt) => (attempt.role, attempt.connection.as_mut().await),
                None => pending().await,
            }
        };
        tokio::select! {
            Some(report) = reports.recv() => links.handle(report),
            role = begin => attempt = Some(links.begin(role)),
            (role, result) = connected => {
                attempt = None;
                match result {
                    Ok(connection) => links.add(role, connection),
                    Err(error) => links.failed(role, &error),
                }
            }
        }
        while links.tasks.try_join_next().is_some() {}
    }
}

/// Anything, also where the system has no random bytes: it only spreads attempts.
fn random() -> u32 {
    crate::random::bytes().map(u32::from_ne_bytes).unwrap_or_default()
}

/// A connection that is being made.
struct Attempt {
    role: Role,
    connection: Pin<Box<dyn Future<Output = Result<Connection, ConnectError>> + Send>>,
}

/// The links of one client.
struct Links {
    settings: Settings,
    queue: LinkQueue,
    receive: Arc<Receive>,
    status: watch::Sender<LinkStatus>,
    report: mpsc::Sender<Report>,
    /// Aborted when this is dropped.
    tasks: JoinSet<()>,
    plan: Plan,
    /// The links of the plan.
    up: BTreeMap<u64, Up>,
}

struct Up {
    task: AbortHandle,
    address: Option<IpAddr>,
    stun: Option<(IpAddr, StunServer)>,
}

impl Links {
    fn begin(&self, role: Role) -> Attempt {
        let settings = self.settings.clone();
        let active = self.plan.active_replica();
        let address = self.plan.active().and_then(|number| self.up.get(&number)?.address);
        let connection: Pin<Box<dyn Future<Output = _> + Send>> = match (role, active) {
            (Role::Standby, Some(active)) => {
                Box::pin(async move { connect_standby(&settings, active, address).await })
            }
            _ => Box::pin(async move { connect(&settings).await }),
        };
        Attempt { role, connection }
    }

    /// Makes a connection a link. One that it replaces stays for a while, because datagrams are on their way to it.
    fn add(&mut self, role: Role, connection: Connection) {
        let number = self.queue.0.next_link();
        let address = connection.address();
        let replica = connection.replica();
        let waker = Arc::new(Notify::new());
        let link = Link {
            number,
            address,
            own: self.settings.private_key.public_key(),
            shared: Arc::clone(&self.queue.0),
            waker: Arc::clone(&waker),
            receive: Arc::clone(&self.receive),
            status: self.status.clone(),
            report: self.report.clone(),
        };
        match role {
            Role::Active => self.queue.0.start_writer(Writer { link: number, waker }),
            Role::Standby => self.queue.0.stand_by(Writer { link: number, waker }),
        }
        let task = self.tasks.spawn(link.run(connection));
        self.up.insert(number, Up { task, address, stun: None });
        if let Some(replaced) = self.plan.connected(Instant::now(), role, number, replica) {
            self.retire(replaced);
        }
        self.show();
        tracing::info!(relay = %self.settings.endpoint, standby = role == Role::Standby, "connected to the relay");
    }

    fn retire(&mut self, link: u64) {
        if let Some(replaced) = self.up.remove(&link) {
            self.tasks.spawn(async move {
                sleep(REPLACED).await;
                replaced.task.abort();
            });
        }
    }

    fn failed(&mut self, role: Role, error: &ConnectError) {
        self.plan.failed(Instant::now(), role, random());
        // A link that is to be replaced may still work.
        if self.plan.active().is_none() {
            self.down(error.to_string());
        }
        tracing::debug!(relay = %self.settings.endpoint, ?role, %error, "cannot connect to the relay");
    }

    fn handle(&mut self, Report { link, event }: Report) {
        let now = Instant::now();
        match event {
            LinkEvent::Draining(after) => {
                if matches!(self.plan.draining(now, link, after), Change::Promoted(_)) {
                    self.queue.0.promote();
                    self.retire(link);
                    self.show();
                }
            }
            LinkEvent::Ended(error) => self.ended(now, link, End::Lost, error),
            LinkEvent::Refused(error) => self.ended(now, link, End::Refused, error),
            LinkEvent::Replicas(others) => self.plan.replicas(now, link, others, random()),
            LinkEvent::Stun(stun) => {
                if let Some(up) = self.up.get_mut(&link) {
                    up.stun = stun;
                    self.show();
                }
            }
        }
    }

    fn ended(&mut self, now: Instant, link: u64, end: End, error: String) {
        if self.up.remove(&link).is_none() {
            return;
        }
        let change = self.plan.ended(now, link, end, random());
        tracing::info!(relay = %self.settings.endpoint, error, ?change, "a connection to the relay ended");
        match change {
            Change::Down => self.down(error),
            // The queue has turned to the other link already.
            Change::None | Change::Promoted(_) => self.show(),
        }
    }

    /// Shows the links as they are now.
    fn show(&self) {
        let Some(active) = self.plan.active().and_then(|number| self.up.get(&number)) else { return };
        let has_standby = self.plan.standby().is_some();
        self.status.send_if_modified(|status| {
            let before = status.clone();
            status.is_up = true;
            status.error = None;
            status.down_since = None;
            status.has_standby = has_standby;
            status.stun = active.stun.or(status.stun);
            *status != before
        });
    }

    fn down(&self, error: String) {
        self.status.send_if_modified(|status| {
            let differs = status.is_up || status.error.as_ref() != Some(&error);
            status.is_up = false;
            status.error = Some(error);
            status.round_trip = None;
            status.has_standby = false;
            status.down_since.get_or_insert_with(Instant::now);
            differs
        });
    }
}
