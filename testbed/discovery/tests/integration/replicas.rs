//! Replicas of the discovery server around Debian's etcd: real programs, which are killed, cut off and begun again.

mod bed;
mod members;

use std::sync::Arc;
use std::time::Duration;

use fairlead_discovery::client::{self, Client, Local, View};
use fairlead_wire::discovery::{Affiliate, ClusterSecret, KubeSpan};
use rustls::RootCertStore;
use serde_json::{Value, json};
use testbed_discovery::Judge;
use tokio::time::{sleep, timeout};
use tonic::Code;

use bed::{Caller, Etcd, Forwarder, LIMIT, Replica, message, told, until};

const SECRET: [u8; 32] = [7; 32];
const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

async fn pair(etcd: &Etcd) -> (Replica, Replica) {
    let replicas = (Replica::start(&etcd.url(), &[]), Replica::start(&etcd.url(), &[]));
    replicas.0.until_ready().await;
    replicas.1.until_ready().await;
    replicas
}

fn endpoints(list: &[fairlead_wire::discovery::server::Affiliate]) -> Vec<Vec<u8>> {
    list.iter().map(|affiliate| affiliate.endpoints.iter().map(|sealed| sealed[0]).collect()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_replica_accepts_reaches_the_watches_of_all() {
    let etcd = Etcd::start().await;
    let (first, second) = pair(&etcd).await;
    let (a, b) = (first.client().await, second.client().await);
    let mut watch = b.watch().await;
    assert_eq!(told(&message(&mut watch).await), (vec![], false, false));

    a.update("x", "one", &[1], MINUTE).await.unwrap();
    assert_eq!(a.ids().await, ["x"], "who wrote it has it at once");
    let seen = message(&mut watch).await;
    assert_eq!((told(&seen), &seen.affiliates[0].data[..]), ((vec!["x"], false, false), &b"one"[..]));
    // A renewal is none that watches hear of; a change through the other replica is one.
    a.update("x", "one", &[1], MINUTE).await.unwrap();
    b.update("x", "two", &[2], MINUTE).await.unwrap();
    let seen = message(&mut watch).await;
    assert_eq!((&seen.affiliates[0].data[..], endpoints(&seen.affiliates)), (&b"two"[..], vec![vec![1, 2]]));
    until("the first replica has both endpoints", async || {
        (endpoints(&a.list().await.unwrap()) == [[1, 2]]).then_some(())
    })
    .await;

    // Both at the same time, again and again: nothing that was accepted is lost.
    let mut writers = Vec::new();
    for (caller, numbers) in [(a.clone(), 10..30_u8), (b.clone(), 40..60)] {
        writers.push(tokio::spawn(async move {
            for n in numbers {
                caller.update("y", "", &[n], MINUTE).await.unwrap();
            }
        }));
    }
    for writer in writers {
        writer.await.unwrap();
    }
    for caller in [&a, &b] {
        until("all endpoints are there", async || {
            (caller.list().await.unwrap()[1].endpoints.len() == 40).then_some(())
        })
        .await;
    }
    b.delete("x").await.unwrap();
    a.until_ids(&["y"]).await;
    loop {
        let seen = message(&mut watch).await;
        if seen.deleted {
            break assert_eq!(told(&seen), (vec!["x"], true, false), "deleted, not expired");
        }
    }
    // A refusal is one everywhere.
    assert_eq!(a.update("", "one", &[], MINUTE).await.unwrap_err().code(), Code::InvalidArgument);
    assert!(first.metric("etcd_writes_total").await >= 22.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_replica_accepted_expires_in_time_at_the_others_and_after_a_restart() {
    let etcd = Etcd::start().await;
    let (mut first, mut second) = pair(&etcd).await;
    let (a, b) = (first.client().await, second.client().await);
    let mut watch = b.watch().await;
    message(&mut watch).await;
    // One endpoint lives shorter than its affiliate, one affiliate shorter than the other.
    a.update("long", "x", &[1], 3 * SECOND).await.unwrap();
    a.update("long", "x", &[2], MINUTE).await.unwrap();
    a.update("short", "x", &[], 3 * SECOND).await.unwrap();
    first.kill();
    b.until_ids(&["long", "short"]).await;
    assert_eq!(endpoints(&b.list().await.unwrap()), [vec![1, 2], vec![]]);
    b.until_ids(&["long"]).await;
    until("the endpoint has expired", async || (endpoints(&b.list().await.unwrap()) == [[2]]).then_some(()))
        .await;
    loop {
        let seen = message(&mut watch).await;
        if seen.deleted {
            break assert_eq!(told(&seen), (vec!["short"], true, true), "expired, not deleted");
        }
    }

    // Both are gone, and begin with what etcd has, less the time that has passed.
    b.update("passing", "x", &[], 6 * SECOND).await.unwrap();
    second.kill();
    sleep(2 * SECOND).await;
    first.begin();
    second.begin();
    for replica in [&first, &second] {
        replica.until_ready().await;
        let caller = replica.client().await;
        assert_eq!(caller.ids().await, ["long", "passing"]);
        assert_eq!(endpoints(&caller.list().await.unwrap()), [vec![2], vec![]]);
    }
    for replica in [&first, &second] {
        replica.client().await.until_ids(&["long"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_etcd_everything_is_read_nothing_expires_and_writes_are_refused() {
    let mut etcd = Etcd::start().await;
    let (first, second) = pair(&etcd).await;
    let (a, b) = (first.client().await, second.client().await);
    a.update("kept", "x", &[1], MINUTE).await.unwrap();
    a.update("short", "x", &[], 2 * SECOND).await.unwrap();
    b.until_ids(&["kept", "short"]).await;
    let mut watch = b.watch().await;
    message(&mut watch).await;

    etcd.kill();
    let reason = until("the replica is not ready", async || first.readiness(false).await).await;
    assert!(reason.contains("etcd"), "{reason}");
    until("nor is the other", async || second.readiness(false).await).await;
    let refused = a.update("new", "x", &[], MINUTE).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert_eq!(b.delete("kept").await.unwrap_err().code(), Code::Unavailable);
    sleep(4 * SECOND).await;
    assert_eq!(a.ids().await, ["kept", "short"], "its client cannot renew it now");
    assert_eq!(first.metric("etcd_connected").await, 0.0);

    etcd.begin().await;
    first.until_ready().await;
    second.until_ready().await;
    // The watch of before has gone on all the time.
    a.update("new", "x", &[], MINUTE).await.unwrap();
    assert_eq!(told(&message(&mut watch).await).0, ["new"]);
    a.until_ids(&["kept", "new"]).await;
    assert_eq!(told(&message(&mut watch).await), (vec!["short"], true, true));
    assert_eq!(first.metric("etcd_lists_total").await, 1.0, "the watch went on where it was");

    // A replica that begins while etcd is away has nothing to say.
    etcd.kill();
    let third = Replica::start(&etcd.url(), &[]);
    let c = third.client().await;
    assert_eq!(c.list().await.unwrap_err().code(), Code::Unavailable);
    etcd.begin().await;
    third.until_ready().await;
    // etcd has begun to count the time of leases again.
    c.until_ids(&["kept", "new"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_was_cut_off_goes_on_or_lists_what_was_compacted() {
    let etcd = Etcd::start().await;
    let way = Forwarder::start(vec![etcd.client]).await;
    let first = Replica::start(&etcd.url(), &[]);
    let second = Replica::start(&format!("http://{}", way.address), &[]);
    first.until_ready().await;
    second.until_ready().await;
    let (a, b) = (first.client().await, second.client().await);
    for id in ["u", "v", "w"] {
        a.update(id, "x", &[], MINUTE).await.unwrap();
    }
    b.until_ids(&["u", "v", "w"]).await;
    let mut watch = b.watch().await;
    message(&mut watch).await;

    let outage = async |deleted: &str, written: &str| {
        way.cut();
        until("the second replica notices", async || second.readiness(false).await).await;
        a.delete(deleted).await.unwrap();
        a.update(written, "x", &[], MINUTE).await.unwrap();
        a.update(written, "y", &[], MINUTE).await.unwrap();
    };
    // etcd still has what was missed.
    outage("u", "x").await;
    assert_eq!(b.ids().await, ["u", "v", "w"]);
    way.open();
    b.until_ids(&["v", "w", "x"]).await;
    assert_eq!(second.metric("etcd_lists_total").await, 1.0);
    // etcd has not.
    outage("v", "y").await;
    etcd.ctl(&["compact", &etcd.revision().to_string()]);
    way.open();
    b.until_ids(&["w", "x", "y"]).await;
    assert_eq!(second.metric("etcd_lists_total").await, 2.0);
    let mut deletions = Vec::new();
    while deletions.len() < 2 {
        let seen = message(&mut watch).await;
        if seen.deleted {
            assert!(!seen.expired, "{seen:?}");
            deletions.extend(seen.affiliates.into_iter().map(|affiliate| affiliate.id));
        }
    }
    assert_eq!(deletions, ["u", "v"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_was_emptied_removes_nothing_and_is_filled_again() {
    let mut etcd = Etcd::start().await;
    let (first, second) = pair(&etcd).await;
    let (a, b) = (first.client().await, second.client().await);
    for n in 0..5 {
        a.update("a", &n.to_string(), &[], MINUTE).await.unwrap();
    }
    a.update("b", "x", &[], MINUTE).await.unwrap();
    b.until_ids(&["a", "b"]).await;
    etcd.empty().await;
    first.until_ready().await;
    second.until_ready().await;
    assert_eq!((a.ids().await, b.ids().await), (vec!["a".into(), "b".into()], vec!["a".into(), "b".into()]));
    // Its revisions begin again, below those that are known.
    a.update("a", "new", &[], MINUTE).await.unwrap();
    until("the second replica has it", async || {
        (b.list().await.unwrap()[0].data == b"new"[..]).then_some(())
    })
    .await;
    let third = Replica::start(&etcd.url(), &[]);
    third.until_ready().await;
    assert_eq!(third.client().await.ids().await, ["a"], "and b when its client renews it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_values_in_etcd_are_left_out_and_counted() {
    let etcd = Etcd::start().await;
    let first = Replica::start(&etcd.url(), &[]);
    first.until_ready().await;
    let a = first.client().await;
    a.update("good", "x", &[1], MINUTE).await.unwrap();
    let lease = etcd.ctl(&["lease", "grant", "600"]);
    let lease = format!("--lease={}", lease.split_whitespace().nth(1).unwrap());
    let put = |key: &str, value: &[u8], lease: &str| {
        etcd.put(&format!("/fairlead/discovery/affiliates/{key}"), value, lease);
    };
    put("c/good", b"not a value at all", &lease);
    put("c/newer", &[8, 2], &lease);
    put("c/forever", &[8, 1], "--lease=0");
    put("no affiliate", &[8, 1], &lease);
    // An endpoint of two bytes, for a minute.
    let minute = [0xe0, 0xd4, 3];
    put("c/short", &[&[8, 1, 24][..], &minute, &[34, 8, 10, 2, 7, 7, 16], &minute].concat(), &lease);
    let second = Replica::start(&etcd.url(), &[]);
    second.until_ready().await;
    for replica in [&first, &second] {
        for (reason, count) in
            [("value", 1.0), ("version", 1.0), ("lease", 1.0), ("key", 1.0), ("limit", 1.0)]
        {
            let name = format!("etcd_rejected_values_total{{reason=\"{reason}\"}}");
            until(&name, async || (replica.metric(&name).await == count).then_some(())).await;
        }
    }
    assert_eq!(a.ids().await, ["good"], "what it had stays until it expires");
    let b = second.client().await;
    assert_eq!(b.ids().await, [""; 0]);
    // A client's next update replaces what is broken.
    b.update("good", "again", &[], MINUTE).await.unwrap();
    until("the first replica has it", async || {
        (a.list().await.unwrap()[0].data == b"again"[..]).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_reached_over_tls_with_a_client_certificate() {
    let etcd = Etcd::start_with_tls().await;
    let files = etcd.certificates();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let [authority, chain, key] = [&files.authority, &files.chain, &files.key].map(|file| path(file));
    let ca = ["--etcd-ca-file", &authority];
    let certificate = ["--etcd-cert-file", &chain, "--etcd-key-file", &key];
    let good =
        Replica::start(&etcd.url(), &[ca.as_slice(), &certificate, &["--etcd-prefix", "/a/b/"]].concat());
    good.until_ready().await;
    good.client().await.update("a", "x", &[], MINUTE).await.unwrap();
    assert!(
        etcd.ctl(&["get", "--prefix", "--keys-only", "/a/b/affiliates/"]).contains("/a/b/affiliates/c/a")
    );
    let without = Replica::start(&etcd.url(), &ca);
    let reason = until("it says why", async || {
        without
            .readiness(false)
            .await
            .filter(|reason| reason.contains("cannot connect") || reason.contains("--etcd-cert-file"))
    })
    .await;
    assert!(reason.contains("etcd"), "{reason}");
}

fn published(id: &str, hostname: &str) -> Value {
    json!({
        "node_id": id, "hostname": hostname, "addresses": ["192.0.2.2"], "public_key": KEY,
        "address": "fd7f:175a:b97c:5602::2", "routed": [], "excluded": [], "endpoints": ["192.0.2.2:51820"],
    })
}

fn local(hostname: &str) -> Local {
    let kubespan = KubeSpan { public_key: KEY.to_owned(), ..KubeSpan::default() };
    let affiliate =
        Affiliate { hostname: hostname.to_owned(), kubespan: Some(kubespan), ..Affiliate::default() };
    Local { affiliate, endpoints: vec!["192.0.2.1:51820".parse().unwrap()], ..Local::default() }
}

fn ours(replica: &Replica) -> Client {
    let server = format!("http://{}", replica.address).parse().unwrap();
    let roots = Arc::new(RootCertStore::empty());
    let settings =
        client::Settings::new(server, "c".to_owned(), ClusterSecret::new(SECRET), "ours".to_owned(), roots);
    Client::start(client::Settings { ttl: 8 * SECOND, ..settings })
}

fn hostnames(found: &Value) -> Vec<&str> {
    let members = found["members"].as_array();
    members.into_iter().flatten().filter_map(|member| member["hostname"].as_str()).collect()
}

async fn finds(client: &Client, hostname: &str) {
    let mut view = client.view();
    let is = |view: &View| view.members.iter().any(|(_, member)| member.affiliate.hostname == hostname);
    let found = timeout(LIMIT, view.wait_for(is)).await.map(|view| drop(view.unwrap()));
    assert!(found.is_ok(), "{hostname} is not found: {:?}", client.view().borrow());
}

/// The published client through a balancer, and ours at both replicas, as a node that has both in its `endpoints`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_both_makes_go_on_when_a_replica_is_killed_and_none_is_forgotten() {
    let etcd = Etcd::start().await;
    let (mut first, mut second) = pair(&etcd).await;
    let balancer = Forwarder::start(vec![first.address, second.address]).await;
    let mut theirs = Judge::start(&balancer.address.to_string(), "c", SECRET, "theirs", 8 * SECOND).unwrap();
    let clients = [ours(&first), ours(&second)];
    clients.iter().for_each(|client| client.publish(local("ours")));
    theirs.publish(&published("theirs", "theirs")).await.unwrap();
    theirs.until("ours", |found| hostnames(found) == ["ours"]).await.unwrap();
    for client in &clients {
        finds(client, "theirs").await;
    }
    let bystander: Caller = second.client().await;
    bystander.update("silent", "x", &[], MINUTE).await.unwrap();
    bystander.until_ids(&["ours", "silent", "theirs"]).await;

    // Neither what the first one accepted is lost, nor what its clients say from now on.
    first.kill();
    assert_eq!(bystander.ids().await, ["ours", "silent", "theirs"]);
    theirs.publish(&published("theirs", "theirs, moved")).await.unwrap();
    finds(&clients[1], "theirs, moved").await;
    clients.iter().for_each(|client| client.publish(local("ours, moved")));
    theirs.until("the change", |found| hostnames(found) == ["ours, moved"]).await.unwrap();

    // It comes back with everything, and the other one goes.
    first.begin();
    first.until_ready().await;
    assert_eq!(first.client().await.ids().await, ["ours", "silent", "theirs"]);
    finds(&clients[0], "theirs, moved").await;
    second.kill();
    theirs.publish(&published("theirs", "theirs, back")).await.unwrap();
    finds(&clients[0], "theirs, back").await;
    // Longer than anything lives that is not renewed.
    sleep(10 * SECOND).await;
    assert_eq!(first.client().await.ids().await, ["ours", "silent", "theirs"]);

    // Both at once.
    first.kill();
    first.begin();
    second.begin();
    for replica in [&first, &second] {
        replica.until_ready().await;
        assert_eq!(replica.client().await.ids().await, ["ours", "silent", "theirs"]);
    }
    clients[1].publish(local("ours, at last"));
    theirs.until("the last change", |found| hostnames(found) == ["ours, at last"]).await.unwrap();
}
