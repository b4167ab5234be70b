//! Review of the tokens that node programs show: the API server reviews each for this gateway's audience.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fairlead_api::names::is_object_name;
use fairlead_egress::registration::{MAX_TOKEN, MIN_LIFETIME, clock_error, lifetime};
use fairlead_limits::{Rate, SourceBuckets};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Key under which the API server names the Node of a token's pod (Kubernetes, KEP-4193).
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
/// Reviews at once.
const MAX_CONCURRENT: usize = 8;
/// Reviews that an address may have at once, and then one in this time.
const REVIEWS: Rate = Rate::one_each(Duration::from_secs(5), 5);
/// Addresses that are remembered. Others are refused until one of these has its whole burst again: more have asked within 25 s than a
/// cluster has nodes.
const MAX_SOURCES: usize = 16_384;
/// Longest review, with the wait for the others.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a token still counts after its expiry, in which the node program gets another.
const GRACE: Duration = Duration::from_secs(60);

/// A token that was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// Name of the Node that the node program runs on.
    pub node: String,
    /// Longest time that the stream may go on.
    pub lifetime: Duration,
    /// Least number of seconds by which the clock here is ahead of the API server's (positive) or behind it; zero if they agree, `None` if the
    /// token does not show it.
    pub clock_error: Option<i64>,
}

/// Reason why a token was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// This address has shown too many tokens.
    #[error("this address has shown too many tokens; wait a few seconds")]
    TooManyReviews,
    /// The API server does not answer, or refuses.
    #[error("the API server cannot review the token: {0}")]
    Unavailable(String),
    /// The token is not valid for this gateway.
    #[error("the token is not valid for this gateway: {0}")]
    Invalid(String),
    /// The user of the token is not the node program.
    #[error("the token is one of {0}, not of {1}")]
    OtherUser(String, String),
    /// The API server does not say on which Node the token is used.
    #[error("the token names no Node: it must be bound to a pod")]
    NoNode,
}

impl Rejected {
    /// Name of the reason, one CamelCase word.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooManyReviews => "TooManyReviews",
            Self::Unavailable(_) => "ReviewUnavailable",
            Self::Invalid(_) => "InvalidToken",
            Self::OtherUser(..) => "OtherUser",
            Self::NoNode => "NodeUnknown",
        }
    }
}

/// Has tokens reviewed.
pub struct Reviewer {
    client: Client,
    audience: String,
    username: String,
    /// So that a flood of bad tokens neither loads the API server nor keeps others out.
    budget: Mutex<SourceBuckets<IpAddr>>,
    reviews: Semaphore,
}

impl Reviewer {
    /// For tokens of this audience and this user.
    pub fn new(client: Client, audience: String, username: String) -> Self {
        let reviews = Semaphore::new(MAX_CONCURRENT);
        let budget = Mutex::new(SourceBuckets::new(REVIEWS, MAX_SOURCES));
        Self { client, audience, username, budget, reviews }
    }

    /// Has a token reviewed that a client at this address shows.
    ///
    /// # Errors
    /// See [`Rejected`].
    pub async fn review(&self, token: String, source: IpAddr) -> Result<Accepted, Rejected> {
        if token.is_empty() || token.len() > MAX_TOKEN {
            return Err(Rejected::Invalid("its length".to_owned()));
        }
        let taken =
            self.budget.lock().unwrap_or_else(PoisonError::into_inner).take(source, Instant::now(), 1);
        taken.map_err(|_| Rejected::TooManyReviews)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let lifetime = lifetime(&token, now).unwrap_or(MIN_LIFETIME) + GRACE;
        let clock_error = clock_error(&token, now);
        let status = match timeout(TIMEOUT, self.ask(token)).await {
            Ok(Ok(status)) => status,
            Ok(Err(error)) => return Err(Rejected::Unavailable(error.to_string())),
            Err(_) => return Err(Rejected::Unavailable("it does not answer".to_owned())),
        };
        let node = judge(status, &self.audience, &self.username)?;
        Ok(Accepted { node, lifetime, clock_error })
    }

    async fn ask(&self, token: String) -> kube::Result<TokenReviewStatus> {
        // The semaphore is never closed.
        let _permit = self.reviews.acquire().await;
        let spec = TokenReviewSpec { token: Some(token), audiences: Some(vec![self.audience.clone()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        Ok(reviews.create(&PostParams::default(), &review).await?.status.unwrap_or_default())
    }
}

/// The Node of an accepted token.
fn judge(status: TokenReviewStatus, audience: &str, username: &str) -> Result<String, Rejected> {
    if status.authenticated != Some(true) {
        return Err(Rejected::Invalid(status.error.unwrap_or_else(|| "it is not authenticated".to_owned())));
    }
    // An API server that knows no audiences says nothing here.
    if !status.audiences.unwrap_or_default().iter().any(|accepted| accepted == audience) {
        return Err(Rejected::Invalid("its audience is another".to_owned()));
    }
    let user = status.user.unwrap_or_default();
    let name = user.username.unwrap_or_default();
    if name != username {
        return Err(Rejected::OtherUser(name, username.to_owned()));
    }
    let node = user.extra.unwrap_or_default().remove(NODE_NAME).unwrap_or_default();
    match <[String; 1]>::try_from(node) {
        Ok([node]) if is_object_name(&node) => Ok(node),
        _ => Err(Rejected::NoNode),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn judged(change: impl FnOnce(&mut Value)) -> Result<String, Rejected> {
        let mut status = json!({
            "authenticated": true, "audiences": ["mine"],
            "user": { "username": "node program", "extra": { NODE_NAME: ["n1"] } },
        });
        change(&mut status);
        judge(serde_json::from_value(status).unwrap(), "mine", "node program")
    }

    #[test]
    fn a_token_must_be_one_of_the_node_program_for_this_gateway() {
        assert_eq!(judged(|_| {}), Ok("n1".to_owned()));
        let invalid = |change: fn(&mut Value)| matches!(judged(change), Err(Rejected::Invalid(_)));
        assert!(invalid(|status| status["authenticated"] = json!(false)));
        assert!(invalid(|status| status["audiences"] = json!(["https://kubernetes.default.svc"])));
        assert!(invalid(|status| status["audiences"] = Value::Null));
        let other = judged(|status| status["user"]["username"] = json!("other"));
        assert_eq!(other, Err(Rejected::OtherUser("other".to_owned(), "node program".to_owned())));
        for names in [json!([]), json!(["a", "b"]), json!(["a/b"]), json!([""])] {
            assert_eq!(judged(|status| status["user"]["extra"][NODE_NAME] = names), Err(Rejected::NoNode));
        }
        assert_eq!(judged(|status| status["user"]["extra"] = Value::Null), Err(Rejected::NoNode));
    }
}
