//! Access to `/metrics` as the API server grants it: a TokenReview says whose token a client shows, a SubjectAccessReview
//! whether that user may `get` the path. Verdicts are remembered for a minute, so that scrapes cost no request each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;

/// Lifetime of a verdict.
const LIFETIME: Duration = Duration::from_secs(60);
/// Verdicts that are remembered; scrapers are few.
const MAX_REMEMBERED: usize = 64;
/// Reviews at once: clients with invalid tokens must not load the API server.
const MAX_CONCURRENT: usize = 2;
/// Longer tokens are refused without a review. Those of Kubernetes have about 1 KiB.
const MAX_TOKEN: usize = 8 << 10;

/// Answer of the API server about a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allowed,
    /// The user of the token may not read metrics.
    Forbidden,
    /// The token is not valid.
    Unauthenticated,
}

struct Reviewer {
    client: Client,
    remembered: Mutex<BTreeMap<(String, String), (Verdict, Instant)>>,
    reviews: Semaphore,
}

/// Answers requests to `routes` only if the API server allows their token `get` on the path. The program needs `create` on
/// `tokenreviews` and `subjectaccessreviews`.
pub(super) fn require(routes: Router, client: Client) -> Router {
    let reviewer = Reviewer { client, remembered: Mutex::default(), reviews: Semaphore::new(MAX_CONCURRENT) };
    routes.layer(from_fn_with_state(Arc::new(reviewer), authorize))
}

async fn authorize(State(reviewer): State<Arc<Reviewer>>, request: Request, next: Next) -> Response {
    let header = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token =
        header.and_then(|value| value.strip_prefix("Bearer ")).filter(|token| token.len() <= MAX_TOKEN);
    let verdict = match token {
        Some(token) => reviewer.verdict(token, request.uri().path()).await,
        None => Ok(Verdict::Unauthenticated),
    };
    match verdict {
        Ok(Verdict::Allowed) => next.run(request).await,
        Ok(Verdict::Forbidden) => StatusCode::FORBIDDEN.into_response(),
        Ok(Verdict::Unauthenticated) => {
            (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")]).into_response()
        }
        Err(error) => {
            tracing::warn!(%error, "cannot ask the API server whether a client may read metrics");
            (StatusCode::SERVICE_UNAVAILABLE, "the API server cannot be asked\n").into_response()
        }
    }
}

impl Reviewer {
    async fn verdict(&self, token: &str, path: &str) -> kube::Result<Verdict> {
        let key = (token.to_owned(), path.to_owned());
        if let Some(verdict) = self.remembered(&key) {
            return Ok(verdict);
        }
        // The semaphore is never closed.
        let _permit = self.reviews.acquire().await;
        if let Some(verdict) = self.remembered(&key) {
            return Ok(verdict);
        }
        let verdict = match self.authenticate(token).await? {
            Some(user) => match self.may_get(user, path).await? {
                true => Verdict::Allowed,
                false => Verdict::Forbidden,
            },
            None => Verdict::Unauthenticated,
        };
        self.remember(key, verdict, Instant::now());
        Ok(verdict)
    }

    fn remembered(&self, key: &(String, String)) -> Option<Verdict> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let (verdict, at) = remembered.get(key)?;
        (at.elapsed() < LIFETIME).then_some(*verdict)
    }

    /// Invalid tokens are remembered only while there is room: they must not displace those of scrapers.
    fn remember(&self, key: (String, String), verdict: Verdict, now: Instant) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.retain(|_, (_, at)| now.saturating_duration_since(*at) < LIFETIME);
        if remembered.len() >= MAX_REMEMBERED && verdict == Verdict::Allowed {
            remembered.retain(|_, (verdict, _)| *verdict == Verdict::Allowed);
        }
        if remembered.len() < MAX_REMEMBERED {
            remembered.insert(key, (verdict, now));
        }
    }

    async fn authenticate(&self, token: &str) -> kube::Result<Option<UserInfo>> {
        let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let status = reviews.create(&PostParams::default(), &review).await?.status.unwrap_or_default();
        Ok(status.user.filter(|_| status.authenticated == Some(true)))
    }

    async fn may_get(&self, user: UserInfo, path: &str) -> kube::Result<bool> {
        let attributes = NonResourceAttributes { path: Some(path.to_owned()), verb: Some("get".to_owned()) };
        let spec = SubjectAccessReviewSpec {
            user: user.username,
            groups: user.groups,
            uid: user.uid,
            extra: user.extra,
            non_resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let status = reviews.create(&PostParams::default(), &review).await?.status;
        Ok(status.is_some_and(|status| status.allowed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::Body;
    use axum::routing::get;
    use kube::client::Body as ClientBody;
    use serde_json::{Value, json};
    use tower::{ServiceExt as _, service_fn};

    use super::*;

    /// An API server that knows the tokens `prometheus` and `pod`, and allows metrics to the first; it counts requests.
    fn routes() -> (Router, Arc<AtomicUsize>) {
        let requests = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&requests);
        let server = service_fn(move |request: axum::http::Request<ClientBody>| {
            counted.fetch_add(1, Ordering::Relaxed);
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                review["status"] = if path.ends_with("/tokenreviews") {
                    let user = review["spec"]["token"].clone();
                    json!({ "authenticated": user == "prometheus" || user == "pod",
                        "user": { "username": user, "groups": ["system:authenticated"] } })
                } else {
                    assert_eq!(
                        review["spec"]["nonResourceAttributes"],
                        json!({"path": "/metrics", "verb": "get"})
                    );
                    assert_eq!(review["spec"]["groups"], json!(["system:authenticated"]));
                    json!({ "allowed": review["spec"]["user"] == "prometheus" })
                };
                let body = ClientBody::from(serde_json::to_vec(&review).unwrap());
                Ok::<_, std::convert::Infallible>(axum::http::Response::new(body))
            }
        });
        let routes = Router::new().route("/metrics", get(|| async { "metrics" }));
        (require(routes, Client::new(server, "default")), requests)
    }

    async fn status(routes: &Router, authorization: Option<&str>) -> u16 {
        let mut request = Request::get("/metrics");
        if let Some(value) = authorization {
            request = request.header("Authorization", value);
        }
        let request = request.body(Body::empty()).unwrap();
        routes.clone().oneshot(request).await.unwrap().status().as_u16()
    }

    #[tokio::test]
    async fn only_a_token_whose_user_may_get_the_path_reads_metrics() {
        let (routes, _) = routes();
        assert_eq!(status(&routes, Some("Bearer prometheus")).await, 200);
        assert_eq!(status(&routes, Some("Bearer pod")).await, 403);
        for wrong in [None, Some("Bearer stranger"), Some("Basic prometheus"), Some("prometheus")] {
            assert_eq!(status(&routes, wrong).await, 401, "{wrong:?}");
        }
    }

    #[tokio::test]
    async fn verdicts_are_remembered_and_long_tokens_not_even_reviewed() {
        let (routes, requests) = routes();
        for _ in 0..3 {
            assert_eq!(status(&routes, Some("Bearer prometheus")).await, 200);
            assert_eq!(status(&routes, Some("Bearer stranger")).await, 401);
        }
        assert_eq!(requests.load(Ordering::Relaxed), 3);
        let long = format!("Bearer {}", "x".repeat(MAX_TOKEN + 1));
        assert_eq!(status(&routes, Some(&long)).await, 401);
        assert_eq!(requests.load(Ordering::Relaxed), 3);
    }

    #[tokio::test]
    async fn invalid_tokens_do_not_displace_a_valid_one() {
        let (routes, requests) = routes();
        for number in 0..2 * MAX_REMEMBERED {
            assert_eq!(status(&routes, Some(&format!("Bearer stranger-{number}"))).await, 401);
        }
        assert_eq!(status(&routes, Some("Bearer prometheus")).await, 200);
        let before = requests.load(Ordering::Relaxed);
        assert_eq!(status(&routes, Some("Bearer prometheus")).await, 200);
        assert_eq!(requests.load(Ordering::Relaxed), before);
    }
}
