use std::sync::Mutex;
use std::time::Duration;

use fairlead_source_addresses::members::Member;
use fairlead_wire::egress_peers as wire;
use tokio::io::AsyncWriteExt as _;
use tokio::time::{sleep, timeout};

use super::*;

/// Notes what it hears.
#[derive(Default)]
struct Noted(Mutex<Vec<String>>);

impl Hold for Noted {
    fn heartbeat(&self, from: &str, heartbeat: Heartbeat) -> Answer {
        self.0.lock().unwrap().push(format!("heartbeat {} of {from}", heartbeat.sequence));
        Answer { sequence: heartbeat.sequence, ..Answer::default() }
    }

    fn answer(&self, from: &str, answer: Answer) {
        self.0.lock().unwrap().push(format!("answer {} of {from}", answer.sequence));
    }
}

struct Gateway {
    peers: Arc<Peers>,
    heard: mpsc::Receiver<Heard>,
    noted: Arc<Noted>,
    members: watch::Sender<Option<Arc<Members>>>,
    identity: Identity,
    address: IpAddr,
    listener: Option<TcpListener>,
    _task: tokio::task::JoinSet<()>,
}

impl Gateway {
    fn new(port: u16, address: &str) -> Self {
        let address: IpAddr = address.parse().unwrap();
        let listener = fairlead_transport::listen((address, port).into()).unwrap();
        let members = watch::Sender::new(None);
        let (peers, heard) = Peers::new(members.subscribe());
        let (noted, identity) = (Arc::new(Noted::default()), Identity::generate().unwrap());
        let listener = Some(listener);
        Self { peers, heard, noted, members, identity, address, listener, _task: tokio::task::JoinSet::new() }
    }

    fn run(&mut self, port: u16, others: &[(&str, Member)]) {
        let listener = self.listener.take().unwrap();
        let (peers, noted) = (Arc::clone(&self.peers), Arc::clone(&self.noted));
        let running = peers.run(listener, self.identity.clone(), port, noted);
        self._task.spawn(async move {
            let _never = running.await;
        });
        let others = others.iter().map(|(pod, member)| ((*pod).to_owned(), member.clone()));
        self.members.send_replace(Some(Arc::new(others.collect())));
    }

    fn member(&self) -> Member {
        Member { uid: String::new(), addresses: vec![self.address], key: self.identity.key }
    }

    async fn wait_for(&self, line: &str) {
        let found = async {
            while !self.noted.0.lock().unwrap().iter().any(|it| it == line) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(20), found)
            .await
            .unwrap_or_else(|_| panic!("{line}: {:?}", self.noted.0));
    }

    async fn connected(&self, member: &str) -> u64 {
        let mut connections = self.peers.connections();
        let connected = connections.wait_for(|all| all.contains_key(member));
        let all = timeout(Duration::from_secs(20), connected).await.unwrap().unwrap().clone();
        all[member]
    }
}

/// A free port of all addresses of 127.0.0.0/8.
async fn port() -> u16 {
    TcpListener::bind("0.0.0.0:0").await.unwrap().local_addr().unwrap().port()
}

fn flows(slot: u32) -> to_member::Kind {
    to_member::Kind::Flows(wire::Flows { slot, ..wire::Flows::default() })
}

#[tokio::test]
async fn gateways_hear_each_other_and_no_others() {
    let port = port().await;
    let (mut a, mut b) = (Gateway::new(port, "127.0.0.1"), Gateway::new(port, "127.0.0.2"));
    let mut stranger = Gateway::new(port, "127.0.0.3");
    a.run(port, &[("b", b.member())]);
    b.run(port, &[("a", a.member())]);
    stranger.run(port, &[("a", a.member()), ("b", Member { key: [0; 32], ..b.member() })]);
    let connection = a.connected("b").await;
    b.connected("a").await;
    assert!(a.peers.heartbeat("b", Heartbeat { sequence: 7, ..Heartbeat::default() }));
    a.wait_for("answer 7 of b").await;
    b.wait_for("heartbeat 7 of a").await;
    assert!(!a.peers.heartbeat("c", Heartbeat::default()));
    let to = [("b".to_owned(), connection)].into();
    assert_eq!(a.peers.flows(&to, flows(5)), Vec::<String>::new());
    let heard = timeout(Duration::from_secs(20), b.heard.recv()).await.unwrap().unwrap();
    assert!(
        heard.from == "a" && matches!(heard.news, News::Flows(to_member::Kind::Flows(it)) if it.slot == 5)
    );
    // What it sends is read by no member, and it sends nothing to one whose key is another.
    stranger.peers.heartbeat("a", Heartbeat { sequence: 9, ..Heartbeat::default() });
    sleep(Duration::from_millis(300)).await;
    assert!(!stranger.peers.heartbeat("b", Heartbeat::default()));
    assert_eq!(a.noted.0.lock().unwrap().len(), 1, "{:?}", a.noted.0);
    // A member that is gone.
    a.members.send_replace(Some(Arc::default()));
    let mut connections = a.peers.connections();
    timeout(Duration::from_secs(20), connections.wait_for(BTreeMap::is_empty)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_gateway_that_is_no_member_any_more_is_not_heard() {
    let port = port().await;
    let (mut a, mut b) = (Gateway::new(port, "127.0.0.1"), Gateway::new(port, "127.0.0.2"));
    a.run(port, &[("b", b.member())]);
    b.run(port, &[("a", a.member())]);
    let to: BTreeMap<String, u64> = [("b".to_owned(), a.connected("b").await)].into();
    assert!(a.peers.heartbeat("b", Heartbeat { sequence: 1, ..Heartbeat::default() }));
    a.wait_for("answer 1 of b").await;
    // Another process of the pod, whose key the Lease shows now.
    for now in [vec![], vec![("a".to_owned(), Member { key: [0; 32], ..a.member() })]] {
        b.members.send_replace(Some(Arc::new(now.into_iter().collect())));
        for sequence in 2..20 {
            a.peers.heartbeat("b", Heartbeat { sequence, ..Heartbeat::default() });
            a.peers.flows(&to, flows(5));
            sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(*b.noted.0.lock().unwrap(), ["heartbeat 1 of a"]);
        assert!(b.heard.try_recv().is_err());
    }
    b.members.send_replace(Some(Arc::new([("a".to_owned(), a.member())].into())));
    let answered = async {
        while !a.noted.0.lock().unwrap().iter().any(|line| line == "answer 30 of b") {
            a.peers.heartbeat("b", Heartbeat { sequence: 30, ..Heartbeat::default() });
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(20), answered).await.unwrap();
}

#[tokio::test]
async fn what_a_member_cannot_take_is_dropped_and_it_says_so() {
    let port = port().await;
    let (mut a, mut b) = (Gateway::new(port, "127.0.0.1"), Gateway::new(port, "127.0.0.2"));
    a.run(port, &[("b", b.member())]);
    b.run(port, &[("a", a.member())]);
    let to: BTreeMap<String, u64> = [("b".to_owned(), a.connected("b").await)].into();
    // Nothing takes them out of b's inbox.
    let mut sent = 0;
    while sent <= INBOX {
        match a.peers.flows(&to, flows(5)).is_empty() {
            true => sent += 1,
            false => sleep(Duration::from_millis(5)).await,
        }
    }
    let heard = timeout(Duration::from_secs(20), a.heard.recv()).await.unwrap().unwrap();
    assert!(heard.from == "b" && matches!(heard.news, News::Missed(5)));
    assert!(b.peers.take_dropped("a") && !b.peers.take_dropped("a"));
    assert!(b.peers.take_lost() > 0 && b.peers.take_lost() == 0);
    assert!(a.peers.heartbeat("b", Heartbeat { sequence: 3, ..Heartbeat::default() }), "heartbeats go on");
    a.wait_for("answer 3 of b").await;
}

#[tokio::test]
async fn a_message_that_is_too_long_or_has_too_many_flows_ends_the_connection() {
    let port = port().await;
    let (mut a, mut b) = (Gateway::new(port, "127.0.0.1"), Gateway::new(port, "127.0.0.2"));
    let member = b.member();
    a.run(port, &[("b", member.clone())]);
    let many = wire::Flows { set: vec![wire::Flow::default(); 2000], ..wire::Flows::default() };
    let many = frames::encode(&ToMember { kind: Some(to_member::Kind::Flows(many)) });
    let long = [0u8, 1, 0, 1].to_vec();
    for bytes in [many.to_vec(), long, vec![0, 0, 0, 2, 0xff, 0xff]] {
        let stream = fairlead_transport::dial([(a.address, port).into()], 0, |_| Ok(())).await.unwrap();
        let (mut stream, _) = b.identity.connect(stream, a.address).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        let mut buffer = Vec::new();
        let read = frames::read::<wire::FromMember>(&mut stream, &mut buffer);
        assert!(timeout(Duration::from_secs(20), read).await.unwrap().is_err());
    }
    assert!(a.heard.try_recv().is_err());
    b.run(port, &[("a", a.member())]);
    b.connected("a").await;
}
