//! Kubernetes Events, published without delaying the caller.
//!
//! A caller puts an Event into a bounded queue and goes on; one task publishes them. What does not fit, and what the API
//! server does not take, is dropped and counted: a log line says the same. Container runtimes retry a pod again and again:
//! the same reason of the same object is published once within [`DEDUPLICATION_PERIOD`], and after that the recorder counts
//! it up on the same Event, as client-go's `EventCorrelator` does.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tokio::sync::mpsc;
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::timeout;

use crate::metrics::register;
use crate::subsystem::Subsystem;

/// Events that may wait to be published.
const QUEUE: usize = 64;
/// How long the same reason of the same object is not published again.
const DEDUPLICATION_PERIOD: Duration = Duration::from_secs(30);
/// Objects remembered for the deduplication.
const MAX_REMEMBERED: usize = 1024;
/// Longest one attempt may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses between attempts while the API server is away, in seconds; after the last the Event is dropped.
const RETRY_PAUSES: [u64; 5] = [1, 3, 10, 30, 60];
/// Longest note the API server takes (`events.k8s.io/v1`, `note`).
const MAX_NOTE: usize = 1000;

/// An Event to be published.
#[derive(Debug, Clone, PartialEq)]
pub struct PendingEvent {
    /// The object.
    pub regarding: ObjectReference,
    /// What happened, in one CamelCase word.
    pub reason: &'static str,
    /// What was tried, in one CamelCase word.
    pub action: &'static str,
    /// For people.
    pub note: String,
}

/// Counts what is not published.
#[derive(Debug, Clone, Default)]
pub struct EventMetrics {
    dropped: Counter,
}

impl EventMetrics {
    /// Declares them in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "Kubernetes Events that were not published: too many at once, or the API server did not take them";
        Self { dropped: register(registry, "events_dropped", help, Counter::default()) }
    }
}

/// Publishes Events of this program.
#[derive(Clone)]
pub struct EventPublisher {
    queue: mpsc::Sender<Queued>,
    metrics: EventMetrics,
}

struct Queued {
    event: PendingEvent,
    type_: EventType,
    /// Of a change, which is published even if an Event of the same reason was just published: told of success.
    change: Option<oneshot::Sender<()>>,
}

impl EventPublisher {
    /// Starts the task that publishes, in the name of `reporter`.
    pub fn start(
        subsystem: &mut Subsystem,
        client: Client,
        reporter: Reporter,
        metrics: EventMetrics,
    ) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE);
        subsystem.spawn("events", publish_all(client, reporter, inbox, metrics.clone()));
        Self { queue, metrics }
    }

    /// Queues a warning, or drops it when the queue is full. Never waits.
    pub fn warn(&self, event: PendingEvent) {
        self.enqueue(Queued { event, type_: EventType::Warning, change: None });
    }

    fn enqueue(&self, queued: Queued) {
        if self.queue.try_send(queued).is_err() {
            self.metrics.dropped.inc();
        }
    }
}

async fn publish_all(
    client: Client,
    reporter: Reporter,
    mut inbox: mpsc::Receiver<Queued>,
    metrics: EventMetrics,
) {
    let recorder = Recorder::new(client.clone(), reporter.clone());
    let mut deduplication = Deduplication::default();
    while let Some(Queued { event, type_, change }) = inbox.recv().await {
        // A recorder joins Events that differ only in their note; the note of each change is to be read.
        let published = match change {
            Some(_) => publish(&Recorder::new(client.clone(), reporter.clone()), event, type_).await,
            None if deduplication.is_due(&event, Instant::now()) => publish(&recorder, event, type_).await,
            None => continue,
        };
        if !published {
            metrics.dropped.inc();
        } else if let Some(change) = change {
            let _ = change.send(());
        }
    }
}

/// Whether it was published in the end.
async fn publish(recorder: &Recorder, pending: PendingEvent, type_: EventType) -> bool {
    let PendingEvent { regarding, reason, action, note } = pending;
    let event = Event {
        type_,
        reason: reason.to_owned(),
        note: Some(truncate_note(note)),
        action: action.to_owned(),
        secondary: None,
    };
    for pause in RETRY_PAUSES {
        match timeout(TIMEOUT, recorder.publish(&event, &regarding)).await {
            Ok(Ok(())) => return true,
            // The namespace may be gone, or the permission missing: a retry changes nothing.
            Ok(Err(kube::Error::Api(status))) if (400..500).contains(&status.code) && status.code != 429 => {
                tracing::warn!(reason, error = status.message, "the API server refuses an Event");
                return false;
            }
            Ok(Err(error)) => tracing::debug!(reason, %error, "cannot publish an Event yet"),
            Err(_) => tracing::debug!(reason, "no answer to an Event within {} s", TIMEOUT.as_secs()),
        }
        tokio::time::sleep(Duration::from_secs(pause)).await;
    }
    false
}

/// When which reason of which object was published.
#[derive(Debug, Default)]
struct Deduplication(BTreeMap<(String, &'static str), Instant>);

impl Deduplication {
    /// Whether to publish it now; remembers that it was.
    fn is_due(&mut self, event: &PendingEvent, now: Instant) -> bool {
        self.0.retain(|_, at| now.saturating_duration_since(*at) < DEDUPLICATION_PERIOD);
        let object = &event.regarding;
        let part = |text: &Option<String>| text.clone().unwrap_or_default();
        let name = format!("{}/{}/{}", part(&object.namespace), part(&object.name), part(&object.uid));
        let key = (name, event.reason);
        if self.0.contains_key(&key) || self.0.len() >= MAX_REMEMBERED {
            return false;
        }
        self.0.insert(key, now);
        true
    }
}

/// The words of Events about the problems of an object.
#[derive(Debug, Clone, Copy)]
pub struct ProblemEvent {
    /// Reason of the warning.
    pub reason: &'static str,
    /// Reason when there are no problems any more.
    pub resolved: &'static str,
    /// Note when there are no problems any more.
    pub resolved_note: &'static str,
    /// What was tried.
    pub action: &'static str,
}

/// Publishes an Event whenever the problems of an object have changed.
pub struct ProblemEvents {
    publisher: EventPublisher,
    regarding: ObjectReference,
    words: ProblemEvent,
    /// The problems of the last Event the API server took.
    published: Vec<String>,
    /// Those of an Event on its way.
    pending: Option<(Vec<String>, oneshot::Receiver<()>)>,
    at: Option<Instant>,
}

impl ProblemEvents {
    /// Nothing is published before there is a problem.
    pub fn new(publisher: EventPublisher, regarding: ObjectReference, words: ProblemEvent) -> Self {
        Self { publisher, regarding, words, published: Vec::new(), pending: None, at: None }
    }

    /// To be called again and again, with the problems as they are. A problem that comes and goes makes one Event per
    /// [`DEDUPLICATION_PERIOD`]; an Event that was dropped is published by a later call.
    pub fn update(&mut self, problems: &[String], now: Instant) {
        if let Some((problems, mut answer)) = self.pending.take() {
            match answer.try_recv() {
                Ok(()) => self.published = problems,
                Err(TryRecvError::Closed) => {}
                Err(TryRecvError::Empty) => {
                    self.pending = Some((problems, answer));
                    return;
                }
            }
        }
        let recent = |at| now.saturating_duration_since(at) < DEDUPLICATION_PERIOD;
        if self.published == problems || self.at.is_some_and(recent) {
            return;
        }
        let (type_, reason, note) = if problems.is_empty() {
            (EventType::Normal, self.words.resolved, self.words.resolved_note.to_owned())
        } else {
            (EventType::Warning, self.words.reason, problems.join("; "))
        };
        let event =
            PendingEvent { regarding: self.regarding.clone(), reason, action: self.words.action, note };
        let (change, answer) = oneshot::channel();
        self.publisher.enqueue(Queued { event, type_, change: Some(change) });
        self.pending = Some((problems.to_vec(), answer));
        self.at = Some(now);
    }
}

/// Events on Nodes carry the node's name as UID: kubelet writes them so, and `kubectl describe node` looks for that.
pub fn node_reference(name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}

/// `kubectl describe pod` looks for the UID.
pub fn pod_reference(namespace: &str, name: &str, uid: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(name.to_owned()),
        namespace: Some(namespace.to_owned()),
        uid,
        ..ObjectReference::default()
    }
}

/// Cuts a note to what the API server takes, at a character.
pub fn truncate_note(mut note: String) -> String {
    let end = (0..=MAX_NOTE.min(note.len())).rev().find(|at| note.is_char_boundary(*at));
    note.truncate(end.unwrap_or_default());
    note
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use axum::http::{Request, Response};
    use kube::client::Body;
    use tower::service_fn;

    use super::*;
    use crate::subsystem::Supervisor;

    fn event(pod: &str, reason: &'static str) -> PendingEvent {
        let regarding = pod_reference("shop", pod, Some(format!("uid-{pod}")));
        PendingEvent { regarding, reason, action: "AllocateAddress", note: "no".to_owned() }
    }

    fn start(supervisor: &mut Supervisor, client: Client) -> (EventPublisher, EventMetrics) {
        let reporter = Reporter { controller: "fairlead-node".to_owned(), instance: Some("n1".to_owned()) };
        let metrics = EventMetrics::default();
        let publisher =
            EventPublisher::start(supervisor.subsystem("events"), client, reporter, metrics.clone());
        (publisher, metrics)
    }

    #[test]
    fn the_same_reason_of_the_same_pod_is_published_once_in_a_period() {
        let (mut sent, start) = (Deduplication::default(), Instant::now());
        let later = start + DEDUPLICATION_PERIOD / 2;
        assert!(sent.is_due(&event("web", "PoolExhausted"), start));
        assert!(!sent.is_due(&event("web", "PoolExhausted"), later));
        assert!(sent.is_due(&event("web", "UnknownPool"), later));
        assert!(sent.is_due(&event("db", "PoolExhausted"), later));
        assert!(sent.is_due(&event("web", "PoolExhausted"), start + DEDUPLICATION_PERIOD));
    }

    #[test]
    fn the_deduplication_is_bounded() {
        let (mut sent, start) = (Deduplication::default(), Instant::now());
        let due = (0..2 * MAX_REMEMBERED).filter(|index| sent.is_due(&event(&index.to_string(), "X"), start));
        assert_eq!(due.count(), MAX_REMEMBERED);
        assert!(sent.is_due(&event("late", "X"), start + DEDUPLICATION_PERIOD));
    }

    #[test]
    fn a_long_note_is_cut_at_a_character() {
        let note = truncate_note("é".repeat(2000));
        assert!(note.len() <= MAX_NOTE && note.chars().all(|c| c == 'é'));
    }

    #[tokio::test]
    async fn a_silent_api_server_delays_no_caller_and_what_does_not_fit_is_counted() {
        let silent =
            service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>());
        let mut supervisor = Supervisor::default();
        let (publisher, metrics) = start(&mut supervisor, Client::new(silent, "default"));
        for index in 0..QUEUE + 3 {
            publisher.warn(event(&index.to_string(), "PoolExhausted"));
        }
        assert_eq!(metrics.dropped.get(), 3);
    }

    /// The API server refuses the first Event and takes the others; each is kept.
    #[tokio::test]
    async fn each_change_of_problems_is_one_event_and_a_refused_one_is_published_later() {
        let seen: Arc<Mutex<Vec<serde_json::Value>>> = Arc::default();
        let kept = Arc::clone(&seen);
        let server = service_fn(move |request: Request<Body>| {
            let seen = Arc::clone(&kept);
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut seen = seen.lock().unwrap();
                seen.push(serde_json::from_slice(&body).unwrap());
                let (code, answer) = match seen.len() {
                    1 => (403, br#"{"kind":"Status","status":"Failure","code":403}"#.to_vec()),
                    _ => (201, body.to_vec()),
                };
                Ok::<_, Infallible>(Response::builder().status(code).body(Body::from(answer)).unwrap())
            }
        });
        let mut supervisor = Supervisor::default();
        let (publisher, metrics) = start(&mut supervisor, Client::new(server, "default"));
        let words = ProblemEvent {
            reason: "MeshProblem",
            resolved: "MeshProblemsGone",
            resolved_note: "the mesh has no problems any more",
            action: "JoinMesh",
        };
        let mut events = ProblemEvents::new(publisher, node_reference("n1"), words);
        let (mut now, problem) = (Instant::now(), ["two nodes claim 192.0.2.1".to_owned()]);
        let requests = || seen.lock().unwrap().len();
        for (problems, expected) in [(&problem[..], 1), (&problem, 2), (&problem, 2), (&[], 3)] {
            events.update(problems, now);
            while requests() < expected {
                tokio::task::yield_now().await;
            }
            // For the answer to arrive, or for a request that should not be made.
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert_eq!(requests(), expected);
            now += DEDUPLICATION_PERIOD;
        }
        events.update(&problem, now - DEDUPLICATION_PERIOD / 2);
        tokio::time::sleep(Duration::from_millis(20)).await;
        let seen = seen.lock().unwrap();
        let words: Vec<_> =
            seen.iter().map(|event| (event["type"].as_str(), event["reason"].as_str())).collect();
        let warning = (Some("Warning"), Some("MeshProblem"));
        assert_eq!(words, [warning, warning, (Some("Normal"), Some("MeshProblemsGone"))]);
        assert_eq!((seen[1]["note"].as_str(), metrics.dropped.get()), (Some(problem[0].as_str()), 1));
    }
}
