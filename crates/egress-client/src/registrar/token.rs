//! Tokens for gateways: of this program's own ServiceAccount, bound to its own pod, or to its Node where it runs outside of one. An
//! admission policy refuses all others (`deploy/policy/node-tokens.yaml`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fairlead_egress::registration::issued_for;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, SelfSubjectReview, TokenRequest, TokenRequestSpec, UserInfo,
};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client};

/// Lifetime of a token that is requested; the API server may grant another one.
const LIFETIME: Duration = Duration::from_secs(3600);
/// Shortest lifetime that is believed: clocks differ.
const SHORTEST: Duration = Duration::from_secs(60);
/// Longest request to the API server.
const REQUEST: Duration = Duration::from_secs(5);
/// Prefix of the user names of ServiceAccounts (Kubernetes, `MakeUsername`).
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// Requests a token for an audience.
pub(super) type RequestToken =
    Arc<dyn Fn(String) -> BoxFuture<'static, Result<Issued, TokenError>> + Send + Sync>;

/// A token and its lifetime from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Issued {
    pub(super) token: String,
    pub(super) lifetime: Duration,
}

/// Reason why there is no token.
#[derive(Debug, thiserror::Error)]
pub(super) enum TokenError {
    #[error("cannot ask the API server who this program is (SelfSubjectReview): {0}")]
    Identity(kube::Error),
    #[error(
        "this program's credentials are of {0:?}, which is no ServiceAccount: run it with a token of kube-system/fairlead-node"
    )]
    NoServiceAccount(String),
    #[error(
        "this program's token is bound to neither a pod nor a Node: run it in a pod, or with a token that is bound to its Node \
         (kubectl create token --bound-object-kind=Node, Kubernetes 1.33)"
    )]
    NotBound,
    #[error("{0}; deploy/rbac/node.yaml grants serviceaccounts/token of its own ServiceAccount")]
    Request(kube::Error),
    #[error("the API server does not answer within {} s", REQUEST.as_secs())]
    Timeout,
    #[error("the API server's answer has no token")]
    Empty,
}

/// Requests to the API server of `client`.
pub(super) fn request_with(client: Client) -> RequestToken {
    let requests = Arc::new(Requests { client, identity: Mutex::default() });
    Arc::new(move |audience| {
        let requests = Arc::clone(&requests);
        async move {
            let requested = tokio::time::timeout(REQUEST, requests.token(audience)).await;
            requested.unwrap_or(Err(TokenError::Timeout))
        }
        .boxed()
    })
}

struct Requests {
    client: Client,
    /// Forgotten when a request fails: the credentials of a kubeconfig may be replaced while the program runs.
    identity: Mutex<Option<Identity>>,
}

impl Requests {
    async fn token(&self, audience: String) -> Result<Issued, TokenError> {
        let identity = self.identity().await?;
        let spec = TokenRequestSpec {
            audiences: vec![audience],
            expiration_seconds: i64::try_from(LIFETIME.as_secs()).ok(),
            bound_object_ref: Some(identity.bound),
        };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), &identity.namespace);
        let answer = accounts.create_token_request(&identity.account, &PostParams::default(), &request).await;
        let status = answer.map_err(|error| {
            self.remembered().take();
            TokenError::Request(error)
        })?;
        let status = status.status.filter(|status| !status.token.is_empty()).ok_or(TokenError::Empty)?;
        let lifetime = lifetime(&status.token, status.expiration_timestamp.0, Timestamp::now());
        Ok(Issued { token: status.token, lifetime })
    }

    async fn identity(&self) -> Result<Identity, TokenError> {
        if let Some(identity) = self.remembered().clone() {
            return Ok(identity);
        }
        let reviews = Api::all(self.client.clone());
        let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await;
        let status = review.map_err(TokenError::Identity)?.status;
        let identity = Identity::of(&status.and_then(|status| status.user_info).unwrap_or_default())?;
        *self.remembered() = Some(identity.clone());
        Ok(identity)
    }

    fn remembered(&self) -> MutexGuard<'_, Option<Identity>> {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lifetime of a token that was issued just now, from 60 s to an hour: by its own claims, whatever the clock of this node shows, or if it has
/// none, the time from `now` until `expires`.
fn lifetime(token: &str, expires: Timestamp, now: Timestamp) -> Duration {
    let left = || Duration::try_from(expires.duration_since(now)).unwrap_or_default();
    issued_for(token).unwrap_or_else(left).clamp(SHORTEST, LIFETIME)
}

/// The ServiceAccount of this program, and what its tokens are bound to.
#[derive(Debug, Clone, PartialEq)]
struct Identity {
    namespace: String,
    account: String,
    bound: BoundObjectReference,
}

impl Identity {
    fn of(user: &UserInfo) -> Result<Self, TokenError> {
        let username = user.username.as_deref().unwrap_or_default();
        let account = username.strip_prefix(SERVICE_ACCOUNT).and_then(|name| name.split_once(':'));
        let (namespace, account) =
            account.ok_or_else(|| TokenError::NoServiceAccount(username.to_owned()))?;
        let none = BTreeMap::new();
        let extra = user.extra.as_ref().unwrap_or(&none);
        let bound = |kind: &str, claim: &str| {
            let part =
                |part| extra.get(&format!("authentication.kubernetes.io/{claim}-{part}"))?.first().cloned();
            Some(BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some(kind.to_owned()),
                name: Some(part("name")?),
                uid: Some(part("uid")?),
            })
        };
        let bound = bound("Pod", "pod").or_else(|| bound("Node", "node")).ok_or(TokenError::NotBound)?;
        Ok(Self { namespace: namespace.to_owned(), account: account.to_owned(), bound })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str, extra: &[(&str, &str)]) -> UserInfo {
        let extra = extra.iter().map(|(claim, value)| {
            (format!("authentication.kubernetes.io/{claim}"), vec![(*value).to_owned()])
        });
        UserInfo { username: Some(name.to_owned()), extra: Some(extra.collect()), ..UserInfo::default() }
    }

    #[test]
    fn tokens_are_bound_to_the_own_pod_or_else_to_the_own_node() {
        let name = "system:serviceaccount:kube-system:fairlead-node";
        let node = [("node-name", "n1"), ("node-uid", "u1")];
        let pod = [("pod-name", "coild-x"), ("pod-uid", "u2"), ("node-name", "n1"), ("node-uid", "u1")];
        for (extra, kind, bound_name, uid) in
            [(&node[..], "Node", "n1", "u1"), (&pod[..], "Pod", "coild-x", "u2")]
        {
            let identity = Identity::of(&user(name, extra)).unwrap();
            assert_eq!((&*identity.namespace, &*identity.account), ("kube-system", "fairlead-node"));
            let bound = identity.bound;
            let parts = [bound.api_version, bound.kind, bound.name, bound.uid].map(Option::unwrap);
            assert_eq!(parts, ["v1", kind, bound_name, uid]);
        }
    }

    #[test]
    fn other_credentials_are_explained() {
        let unbound = Identity::of(&user("system:serviceaccount:kube-system:fairlead-node", &[]));
        assert!(unbound.unwrap_err().to_string().contains("--bound-object-kind=Node"));
        let admin = Identity::of(&user("kubernetes-admin", &[]));
        assert!(admin.unwrap_err().to_string().contains("\"kubernetes-admin\", which is no ServiceAccount"));
        let without_uid = user("system:serviceaccount:a:b", &[("node-name", "n1")]);
        assert!(matches!(Identity::of(&without_uid), Err(TokenError::NotBound)));
    }

    #[test]
    fn the_lifetime_is_what_is_left_within_reason() {
        let now = Timestamp::now();
        let after = |seconds| now.checked_add(Duration::from_secs(seconds)).unwrap();
        let seconds = [1200, 7200, 0].map(|seconds| lifetime("opaque", after(seconds), now).as_secs());
        assert_eq!(seconds, [1200, 3600, 60]);
        assert_eq!(lifetime("opaque", Timestamp::UNIX_EPOCH, now), SHORTEST);
        // {"iat":1000,"exp":2800}: whatever this node's clock shows.
        let token = "e30.eyJpYXQiOjEwMDAsImV4cCI6MjgwMH0.c2ln";
        let expires = Timestamp::from_second(2800).unwrap();
        for now in [0, 1000, 2800, 6400].map(|seconds| Timestamp::from_second(seconds).unwrap()) {
            assert_eq!(lifetime(token, expires, now).as_secs(), 1800);
        }
    }
}
