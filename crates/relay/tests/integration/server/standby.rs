//! Two links of a client, at two replicas behind one address.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_relay::client::{LinkQueue, LinkStatus, keep_connected};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use crate::bed::{Bed, public};

/// Interval at which a datagram is sent.
const INTERVAL: Duration = Duration::from_millis(10);

/// Leads each connection to the target that has the fewest, as a load balancer for TCP does.
struct LoadBalancer {
    port: u16,
    /// The target that is silent from now on.
    silent: watch::Sender<Option<SocketAddr>>,
    task: AbortHandle,
}

impl LoadBalancer {
    async fn start(targets: Vec<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (silent, is_silent) = watch::channel(None);
        let serve = async move {
            let mut connections = JoinSet::new();
            let mut targets: Vec<(Arc<()>, SocketAddr)> =
                targets.into_iter().map(|target| (Arc::default(), target)).collect();
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                targets.sort_by_key(|(connections, _)| Arc::strong_count(connections));
                for (count, target) in &targets {
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        client.set_nodelay(true).unwrap();
                        server.set_nodelay(true).unwrap();
                        let (mut is_silent, target, counted) =
                            (is_silent.clone(), *target, Arc::clone(count));
                        connections.spawn(async move {
                            let _counted = counted;
                            tokio::select! {
                                _ = tokio::io::copy_bidirectional(&mut client, &mut server) => return,
                                () = becomes_silent(&mut is_silent, target) => {}
                            }
                            // Both connections stay, and nothing passes.
                            std::future::pending().await
                        });
                        break;
                    }
                }
            }
        };
        Self { port, silent, task: tokio::spawn(serve).abort_handle() }
    }
}

impl Drop for LoadBalancer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn becomes_silent(silent: &mut watch::Receiver<Option<SocketAddr>>, target: SocketAddr) {
    // The lock of a value that is not sent between threads ends here.
    drop(silent.wait_for(|silent| *silent == Some(target)).await);
}

/// A client that stays connected, and what it received: the numbers of datagrams, and when.
struct Client {
    queue: LinkQueue,
    status: watch::Receiver<LinkStatus>,
    received: Arc<Mutex<Vec<(u32, Instant)>>>,
    tasks: JoinSet<()>,
}

impl Client {
    fn start(bed: &Bed, port: u16, number: u8) -> Self {
        let mut settings = bed.settings("tcp", number);
        settings.endpoint.port = port;
        let received = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&received);
        let receive = Arc::new(move |_: PublicKey, payload: &[u8]| {
            let number = u32::from_be_bytes(*payload.first_chunk().unwrap());
            log.lock().unwrap().push((number, Instant::now()));
        });
        let (sender, status) = watch::channel(LinkStatus::default());
        let queue = LinkQueue::default();
        let mut tasks = JoinSet::new();
        tasks.spawn(keep_connected(settings, queue.clone(), receive, sender));
        Self { queue, status, received, tasks }
    }

    async fn has_links(&mut self, count: usize) {
        let links = |status: &LinkStatus| usize::from(status.is_up) + usize::from(status.has_standby);
        self.status.wait_for(|status| links(status) == count).await.unwrap();
    }

    /// Sends numbered datagrams to a peer until it is dropped.
    fn send_to(&mut self, peer: u8) {
        let (queue, peer) = (self.queue.clone(), PublicKey(public(peer)));
        self.tasks.spawn(async move {
            let mut tick = tokio::time::interval(INTERVAL);
            for number in 0_u32.. {
                tick.tick().await;
                queue.send(&peer, false, &number.to_be_bytes());
            }
        });
    }

    async fn has_received(&self, count: usize) {
        let goal = self.received.lock().unwrap().len() + count;
        while self.received.lock().unwrap().len() < goal {
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// The longest time without a datagram, and how many are missing.
    fn gap(&self) -> (Duration, usize) {
        let received = self.received.lock().unwrap();
        let longest = received.windows(2).map(|pair| pair[1].1 - pair[0].1).max().unwrap();
        let sent = usize::try_from(received.last().unwrap().0 - received[0].0).unwrap() + 1;
        (longest, sent - received.len())
    }
}

/// Two replicas, a load balancer in front of them, and two clients with two links each.
async fn two_clients() -> (Vec<Bed>, LoadBalancer, [Client; 2]) {
    let first = Bed::start_replica(&[]).await;
    let second = first.another(&[first.replica_address.unwrap()]).await;
    while first.observer.snapshot().replicas < 1 {
        tokio::time::sleep(INTERVAL).await;
    }
    let balancer = LoadBalancer::start(vec![first.address, second.address]).await;
    let mut a = Client::start(&first, balancer.port, 1);
    a.has_links(1).await;
    let mut b = Client::start(&first, balancer.port, 2);
    a.has_links(2).await;
    b.has_links(2).await;
    (vec![first, second], balancer, [a, b])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_has_a_link_at_two_replicas_and_loses_nothing_when_one_drains() {
    let (mut beds, _balancer, [mut a, b]) = two_clients().await;
    assert_eq!(beds.iter().map(|bed| bed.observer.snapshot().links).collect::<Vec<_>>(), [2, 2]);
    a.send_to(2);
    b.has_received(50).await;
    beds[0].stop();
    b.has_received(200).await;
    let (longest, lost) = b.gap();
    println!("a replica drains: {longest:?} without a datagram, {lost} lost");
    assert_eq!(lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_link_is_used_at_once_when_a_replica_is_killed() {
    let (mut beds, _balancer, [mut a, mut b]) = two_clients().await;
    a.send_to(2);
    b.has_received(50).await;
    beds.remove(0).kill().await;
    b.has_received(200).await;
    let (longest, lost) = b.gap();
    println!("a replica is killed: {longest:?} without a datagram, {lost} lost");
    assert!(longest < Duration::from_secs(3), "{longest:?}");
    // The one that is left says that there is no other.
    a.has_links(1).await;
    b.has_links(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_link_is_used_when_a_replica_says_nothing_more() {
    let (beds, balancer, [mut a, b]) = two_clients().await;
    a.send_to(2);
    b.has_received(50).await;
    balancer.silent.send_replace(Some(beds[0].address));
    b.has_received(200).await;
    let (longest, lost) = b.gap();
    println!("a replica is silent: {longest:?} without a datagram, {lost} lost");
    // Two seconds of unanswered datagrams, and what a busy machine adds.
    assert!(longest < Duration::from_secs(10), "{longest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_programs_with_one_key_and_two_links_each_are_told() {
    let (beds, balancer, [_a, mut b]) = two_clients().await;
    let mut settings = beds[0].settings("tcp", 2);
    (settings.endpoint.port, settings.instance) = (balancer.port, [99; 8]);
    let mark = Instant::now();
    let (sender, mut other) = watch::channel(LinkStatus::default());
    let run = keep_connected(settings, LinkQueue::default(), Arc::new(|_, _: &[u8]| ()), sender);
    let told = async {
        tokio::join!(
            b.status.wait_for(|status| status.duplicate_until.is_some()),
            other.wait_for(|status| status.duplicate_until.is_some()),
        )
    };
    tokio::select! {
        () = run => {}
        (one, another) = told => assert!(one.is_ok() && another.is_ok()),
    }
    println!("both programs were told after {:?}", mark.elapsed());
    assert!(mark.elapsed() < Duration::from_secs(60));
}

#[tokio::test]
async fn a_relay_without_replicas_has_one_link_of_a_client() {
    let bed = Bed::start().await;
    let mut client = Client::start(&bed, bed.address.port(), 1);
    client.has_links(1).await;
    // Longer than a stand-by link would take.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!((bed.observer.snapshot().connections, client.status.borrow().has_standby), (1, false));
}
