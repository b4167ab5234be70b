//! Answers reviews of AddressPools. The API server has validated the object by its schema and CEL rules; this validates it
//! against the other pools.

use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use fairlead_api::names::{COIL_FINALIZER, WEBHOOK_PATH_MUTATE_POOL, WEBHOOK_PATH_VALIDATE_POOL};
use fairlead_api::resources::AddressPool;
use fairlead_ipam::{MAX_INDEX, Pool, admit};
use kube::api::ListParams;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::timeout;

use super::metrics::WebhookMetrics;

/// Time for the list of pools; below the `timeoutSeconds` of the webhook configuration.
const LIST_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Clone)]
struct Context {
    pools: Api<AddressPool>,
    metrics: WebhookMetrics,
}

/// The answer to a review.
enum Verdict {
    /// The object may be stored, with a patch and warnings for the user.
    Allowed { patch: serde_json::Value, warnings: Vec<String> },
    /// The object is invalid.
    Denied(String),
    /// The review could not be decided.
    Failed(String),
}

/// The webhook's paths.
pub(super) fn routes(client: Client, metrics: WebhookMetrics) -> Router {
    let context = Context { pools: Api::all(client), metrics };
    Router::new()
        .route(WEBHOOK_PATH_MUTATE_POOL, post(mutate))
        .route(WEBHOOK_PATH_VALIDATE_POOL, post(validate))
        .with_state(context)
}

async fn mutate(State(context): State<Context>, body: Bytes) -> Response {
    let request = match parse(&body) {
        Ok(request) => request,
        Err(error) => return malformed(&context, "mutate", &error),
    };
    let finalizers = request.object.as_ref().map(|object| object.finalizers().to_vec()).unwrap_or_default();
    let verdict = Verdict::Allowed { patch: finalizer(&finalizers), warnings: Vec::new() };
    answer(&context, "mutate", &request, verdict)
}

async fn validate(State(context): State<Context>, body: Bytes) -> Response {
    let request = match parse(&body) {
        Ok(request) => request,
        Err(error) => return malformed(&context, "validate", &error),
    };
    let verdict = match (pool(request.object.as_ref()), pool(request.old_object.as_ref())) {
        (Ok(Some(pool)), Ok(before)) => match others(&context.pools).await {
            Ok(others) => validate_pool(&pool, before.as_ref(), &others),
            Err(error) => Verdict::Failed(error),
        },
        (Ok(None), _) => Verdict::Failed("the review has no object".to_owned()),
        (Err(error), _) | (_, Err(error)) => Verdict::Denied(error),
    };
    answer(&context, "validate", &request, verdict)
}

fn parse(body: &[u8]) -> Result<AdmissionRequest<DynamicObject>, String> {
    let review: AdmissionReview<DynamicObject> =
        serde_json::from_slice(body).map_err(|error| error.to_string())?;
    review.try_into().map_err(|error: kube::core::admission::ConvertAdmissionReviewError| error.to_string())
}

fn pool(object: Option<&DynamicObject>) -> Result<Option<AddressPool>, String> {
    let parsed = object.map(|object| object.clone().try_parse::<AddressPool>());
    parsed.transpose().map_err(|error| format!("not an AddressPool: {error}"))
}

/// From the API server and not from a cache, so that a pool created a moment ago counts.
async fn others(pools: &Api<AddressPool>) -> Result<Vec<AddressPool>, String> {
    let failed = "cannot list AddressPools to check for overlaps; try again";
    match timeout(LIST_TIMEOUT, pools.list(&ListParams::default())).await {
        Ok(Ok(list)) => Ok(list.items),
        Ok(Err(error)) => Err(format!("{failed}: {error}")),
        Err(_) => Err(format!("{failed}: the API server does not answer")),
    }
}

/// A JSON patch (RFC 6902) that adds the finalizer, as Coil does: a pool is never deleted before its blocks, even while no
/// controller runs.
fn finalizer(present: &[String]) -> serde_json::Value {
    if present.iter().any(|finalizer| finalizer == COIL_FINALIZER) {
        return json!([]);
    }
    match present.is_empty() {
        true => json!([{ "op": "add", "path": "/metadata/finalizers", "value": [COIL_FINALIZER] }]),
        false => json!([{ "op": "add", "path": "/metadata/finalizers/-", "value": COIL_FINALIZER }]),
    }
}

/// Validates a pool against the others. Pure.
fn validate_pool(pool: &AddressPool, before: Option<&AddressPool>, others: &[AddressPool]) -> Verdict {
    let parsed = match Pool::try_from(pool) {
        Ok(parsed) => parsed,
        Err(error) => return Verdict::Denied(error.to_string()),
    };
    let before = before.and_then(|before| Pool::try_from(before).ok());
    let name = pool.name_any();
    for other in others.iter().filter(|other| other.name_any() != name) {
        // An invalid pool grants no addresses.
        let Ok(other) = Pool::try_from(other) else { continue };
        if let Err(overlap) = admit(&parsed, before.as_ref(), &other) {
            return Verdict::Denied(format!(
                "{overlap}: no address may be in two pools; choose another subnet"
            ));
        }
    }
    let max_blocks = u128::from(MAX_INDEX).saturating_add(1);
    let too_many = (parsed.capacity() > max_blocks).then(|| {
        format!("only the first {max_blocks} blocks of pool {name} can be granted: raise spec.blockSizeBits, or use a smaller subnet")
    });
    Verdict::Allowed { patch: json!([]), warnings: too_many.into_iter().collect() }
}

fn answer(
    context: &Context,
    webhook: &'static str,
    request: &AdmissionRequest<DynamicObject>,
    verdict: Verdict,
) -> Response {
    let mut response = AdmissionResponse::from(request);
    let result = match verdict {
        Verdict::Allowed { patch, warnings } => {
            response.warnings = (!warnings.is_empty()).then_some(warnings);
            match serde_json::from_value(patch).map(|patch| response.clone().with_patch(patch)) {
                Ok(Ok(with_patch)) if webhook == "mutate" => response = with_patch,
                _ => {}
            }
            "allowed"
        }
        Verdict::Denied(message) => {
            tracing::info!(pool = request.name, message, "denied");
            response = response.deny(message);
            response.result.code = 422;
            "denied"
        }
        Verdict::Failed(message) => {
            tracing::warn!(pool = request.name, message, "cannot review");
            response = response.deny(message);
            response.result.code = 500;
            "failed"
        }
    };
    context.metrics.reviewed(webhook, result);
    match serde_json::to_string(&response.into_review()) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn malformed(context: &Context, webhook: &'static str, error: &str) -> Response {
    context.metrics.reviewed(webhook, "failed");
    (StatusCode::BAD_REQUEST, format!("not an AdmissionReview: {error}")).into_response()
}
