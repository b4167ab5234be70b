//! The gateway pods of an Egress, and what they say of themselves. A gateway may be any program: its answer is short, comes soon, or does not
//! count.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_api::resources::Egress;
use fairlead_egress::objects::pod_labels;
use fairlead_wire::http::{Response, parse_response};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Pods of an Egress that are listed.
const MAX_PODS: u32 = 1_000;
/// Longest time for an answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest answer in bytes.
const MAX_ANSWER: u64 = 4 << 10;

/// The pods that a ReplicaSet of the Egress's Deployment has made: every user who may create pods can give them the labels of gateways.
///
/// # Errors
/// The API server does not list them.
pub(super) async fn gateway_pods(client: &Client, egress: &Egress) -> kube::Result<Vec<Pod>> {
    let namespace = egress.namespace().unwrap_or_default();
    let name = egress.name_any();
    let labels: Vec<String> =
        pod_labels(&name).into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    let parameters = ListParams::default().labels(&labels.join(",")).limit(MAX_PODS).match_any();
    let mut pods = Api::<Pod>::namespaced(client.clone(), &namespace).list(&parameters).await?.items;
    pods.retain(|pod| is_of(pod, &name));
    Ok(pods)
}

fn is_of(pod: &Pod, egress: &str) -> bool {
    let owners = pod.metadata.owner_references.iter().flatten();
    let mut sets = owners.filter(|owner| owner.kind == "ReplicaSet" && owner.controller == Some(true));
    sets.any(|set| set.name.rsplit_once('-').is_some_and(|(deployment, _)| deployment == egress))
}

/// The address that the API server shows of a pod.
pub(super) fn address(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()
}

/// Answer of a gateway to a request for a path; `None` if there is none within the time limit or it is not HTTP.
pub(super) async fn ask(address: IpAddr, port: u16, path: &str) -> Option<Response> {
    let address = SocketAddr::new(address, port);
    match timeout(TIMEOUT, request(address, path)).await {
        Ok(Ok(answer)) => parse(&answer),
        Ok(Err(error)) => {
            tracing::debug!(%address, path, %error, "cannot ask a gateway");
            None
        }
        Err(_) => {
            tracing::debug!(%address, path, "a gateway does not answer");
            None
        }
    }
}

async fn request(address: SocketAddr, path: &str) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: application/json, text/plain\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
    Ok(answer)
}

/// Reads a whole answer whose body ends with the connection.
pub(super) fn parse(answer: &[u8]) -> Option<Response> {
    parse_response(answer, true).ok().flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn one_that_sends_without_end_or_nothing_does_not_count() {
        let serve = |answer: Vec<u8>| async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let server = tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 512];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(&answer).await;
                // It stays open.
                std::future::pending::<()>().await;
            });
            let answer = ask([127, 0, 0, 1].into(), port, "/load").await;
            server.abort();
            answer
        };
        let endless =
            serve(b"HTTP/1.1 200 OK\r\n\r\n".iter().copied().chain([b' '; 1 << 16]).collect()).await;
        assert!(endless.is_none_or(|answer| answer.body.len() <= 4 << 10), "no more than that is read");
        assert_eq!(serve(Vec::new()).await, None);
    }

    #[test]
    fn pods_that_no_replica_set_of_the_egress_has_made_are_no_gateways() {
        let pod = |kind: &str, owner: &str, is_controller: bool| -> Pod {
            let owners = serde_json::json!([{
                "apiVersion": "apps/v1", "kind": kind, "name": owner, "uid": "u", "controller": is_controller,
            }]);
            serde_json::from_value(serde_json::json!({ "metadata": { "ownerReferences": owners } })).unwrap()
        };
        assert!(is_of(&pod("ReplicaSet", "nat-5f", true), "nat"));
        for (kind, owner, is_controller) in
            [("ReplicaSet", "nat-5f", false), ("Job", "nat-5f", true), ("ReplicaSet", "nat-b-5f", true)]
        {
            assert!(!is_of(&pod(kind, owner, is_controller), "nat"), "{kind} {owner}");
        }
        assert!(!is_of(&Pod::default(), "nat"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_answer_or_not(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
