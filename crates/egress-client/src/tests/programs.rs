//! Tunnel programs that are loaded before pods need them.

use std::collections::BTreeSet;

use super::*;

/// Another pod, for an ADD beside others.
fn pod(number: usize) -> Pod {
    let mut pod = Pod::new();
    pod.key.container_id = format!("c{number}");
    pod
}

async fn are_ready(bed: &Bed, count: usize) {
    within(10 * SECOND, "programs that are ready", || bed.egress.0.programs.len() == count).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_ready_once_a_pod_may_need_them() {
    let bed = Bed::new(Objects::default());
    tokio::time::sleep(SECOND).await;
    assert_eq!(bed.egress.0.programs.len(), 0, "there is no Egress");
    bed.egresses.apply(egress(INTERNET, &["0.0.0.0/0"]));
    are_ready(&bed, 2).await;
    bed.egresses.delete(egress(INTERNET, &["0.0.0.0/0"]));
    are_ready(&bed, 0).await;
    let (bed, _pod) = client().await;
    are_ready(&bed, 4).await;
    for of in [INTERNET, DOMESTIC] {
        bed.egresses.delete(egress(of, &[]));
    }
    tokio::time::sleep(SECOND).await;
    assert_eq!(bed.egress.0.programs.len(), 4, "the node had a pod that used an Egress");
}

#[tokio::test(flavor = "multi_thread")]
async fn more_pods_at_once_than_programs_are_ready_all_get_theirs() {
    let bed = Bed::new(article());
    bed.gateways.set(INTERNET, gateways(&GATEWAY));
    bed.gateways.set(DOMESTIC, gateways(&[GATEWAY[0]]));
    are_ready(&bed, 2).await;
    let pods: Vec<Pod> = (0..6).map(pod).collect();
    let added = futures::future::join_all(pods.iter().map(|pod| bed.add(pod, BOTH))).await;
    assert!(added.iter().all(Result::is_ok), "{added:?}");
    for pod in &pods {
        assert!(has_what_the_article_prints(pod), "{}", pod.egress_state());
        reaches_gateways(pod);
        // One pair for all its Egresses.
        let programs = pod.inside.sh(
            "for link in $(ip -o link show type ifb | cut -d: -f2) eth0; do tc filter show dev $link egress; done
             tc filter show dev eth0 ingress",
        );
        let ids: BTreeSet<_> =
            programs.split(" id ").skip(1).filter_map(|rest| rest.split_whitespace().next()).collect();
        assert_eq!(ids.len(), 2, "{programs}");
    }
    are_ready(&bed, 4).await;
}
