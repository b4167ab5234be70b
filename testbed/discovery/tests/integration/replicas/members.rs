//! An etcd of three members, of which some are killed.

use tonic::Code;

use crate::replicas::MINUTE;
use crate::replicas::bed::{Caller, Etcd, Replica, until};

/// Publishes as soon as it is accepted, as clients do.
async fn accepted(caller: &Caller, id: &str) {
    until(&format!("{id} is accepted"), async || caller.update(id, "x", &[1], MINUTE).await.ok()).await;
}

async fn leader(etcd: &[Etcd; 3]) -> usize {
    until("a member leads", async || etcd.iter().position(Etcd::is_leader)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_three_members_any_one_may_be_lost_and_with_two_lost_everything_is_read() {
    let mut etcd = Etcd::start_three().await;
    let urls = etcd.each_ref().map(Etcd::url).join(",");
    let replicas = [Replica::start(&urls, &[]), Replica::start(&urls, &[])];
    for replica in &replicas {
        replica.until_ready().await;
    }
    let (a, b) = (replicas[0].client().await, replicas[1].client().await);
    accepted(&a, "at-first").await;
    b.until_ids(&["at-first"]).await;

    // The leader, and then each of the others: one of them is what a replica is connected to.
    let leader = leader(&etcd).await;
    let mut expected = vec!["at-first"];
    for (turn, id) in ["killed-1", "killed-2", "killed-3"].into_iter().enumerate() {
        let member = &mut etcd[(leader + turn) % 3];
        member.kill();
        let (writer, reader) = if turn % 2 == 0 { (&a, &b) } else { (&b, &a) };
        accepted(writer, id).await;
        expected.push(id);
        reader.until_ids(&expected).await;
        member.begin().await;
    }

    // One of three cannot decide alone. It is not the leader that is left, which might have begun to write what is refused.
    let leader = self::leader(&etcd).await;
    let other = (leader + 1) % 3;
    etcd[leader].kill();
    etcd[other].kill();
    until("writes are refused", async || {
        let refused = a.update("refused", "x", &[1], MINUTE).await.err()?;
        (refused.code() == Code::Unavailable).then_some(())
    })
    .await;
    for caller in [&a, &b] {
        assert_eq!(caller.ids().await, expected);
    }
    etcd[other].begin().await;
    accepted(&a, "two-of-three").await;
    expected.push("two-of-three");
    for caller in [&a, &b] {
        caller.until_ids(&expected).await;
    }
}
