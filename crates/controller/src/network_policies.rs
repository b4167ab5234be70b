//! Tells of NetworkPolicies that no program enforces.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use fairlead_cluster::events::{EventPublisher, PendingEvent};
use fairlead_cluster::network_policies::{Unenforced, unenforced};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;

/// Interval of looks.
const INTERVAL: Duration = Duration::from_secs(300);
/// Interval of Events about the same NetworkPolicy: the API server keeps them for an hour.
const REPETITION: Duration = Duration::from_secs(3600);

/// Looks forever.
pub(crate) async fn run(client: Client, events: EventPublisher) -> Infallible {
    let mut told = None;
    loop {
        match unenforced(&client).await {
            Ok(found) => {
                if let Some(policy) = due(found, &mut told, Instant::now()) {
                    tracing::warn!("{policy}");
                    events.warn(event(&policy));
                }
            }
            Err(error) => {
                tracing::debug!(%error, "cannot read whether NetworkPolicies are enforced; retrying")
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The NetworkPolicy to tell of now; `told` is the last one, with the time. Pure.
fn due(
    found: Option<Unenforced>,
    told: &mut Option<(Unenforced, Instant)>,
    now: Instant,
) -> Option<Unenforced> {
    let Some(found) = found else {
        *told = None;
        return None;
    };
    let is_told = told
        .as_ref()
        .is_some_and(|(last, at)| *last == found && now.saturating_duration_since(*at) < REPETITION);
    if is_told {
        return None;
    }
    *told = Some((found.clone(), now));
    Some(found)
}

fn event(policy: &Unenforced) -> PendingEvent {
    let regarding = ObjectReference {
        api_version: Some("networking.k8s.io/v1".to_owned()),
        kind: Some("NetworkPolicy".to_owned()),
        name: Some(policy.name.clone()),
        namespace: Some(policy.namespace.clone()),
        uid: Some(policy.uid.clone()),
        ..ObjectReference::default()
    };
    PendingEvent { regarding, reason: "NotEnforced", action: "Enforce", note: policy.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(name: &str) -> Unenforced {
        let [namespace, name, uid] = ["shop", name, name].map(str::to_owned);
        Unenforced { namespace, name, uid }
    }

    #[test]
    fn a_policy_is_told_once_an_hour_and_another_one_at_once() {
        let (mut told, now) = (None, Instant::now());
        assert_eq!(due(Some(policy("a")), &mut told, now), Some(policy("a")));
        assert_eq!(due(Some(policy("a")), &mut told, now + INTERVAL), None);
        assert_eq!(due(Some(policy("b")), &mut told, now + INTERVAL), Some(policy("b")));
        assert_eq!(due(Some(policy("b")), &mut told, now + INTERVAL + REPETITION), Some(policy("b")));
        assert_eq!(due(None, &mut told, now), None);
        assert_eq!(due(Some(policy("b")), &mut told, now), Some(policy("b")), "its enforcer went");
    }

    #[test]
    fn the_event_is_at_the_policy_and_says_what_to_do() {
        let event = event(&policy("a"));
        assert_eq!(event.regarding.namespace.as_deref(), Some("shop"));
        assert!(
            event.note.contains("shop/a is not enforced") && event.note.contains("kube-network-policies")
        );
        assert!(event.note.len() < 1000);
    }
}
