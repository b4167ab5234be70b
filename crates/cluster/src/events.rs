//! Kubernetes Events, published without delaying the caller.
//!
//! A caller puts an Event into a bounded queue and goes on; one task publishes them. What does not fit, and what the API
//! server does not take, is dropped and counted: a log line says the same. Container runtimes retry a pod again and again, and
//! what is wrong may come and go: the same reason of the same object is published once within [`DEDUPLICATION_PERIOD`].

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

use crate::metrics::declare;
use crate::subsystem::Subsystem;

/// Events that may wait to be published.
const QUEUE: usize = 64;
/// Period in which the same reason of the same object is published once.
const DEDUPLICATION_PERIOD: Duration = Duration::from_mins(10);
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
    /// Reason: the event in one CamelCase word.
    pub reason: &'static str,
    /// Action that was tried, in one CamelCase word.
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
        Self { dropped: declare(registry, "events_dropped", help) }
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
    /// Receiver of the success of an Event of a change, which is published even if one of the same reason just was.
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

/// Times at which reasons were published, by object and reason.
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
    /// Reason when there are no problems any more.
    pub resolved: &'static str,
    /// Note when there are no problems any more.
    pub resolved_note: &'static str,
    /// Action that was tried, in one CamelCase word.
    pub action: &'static str,
}

/// Publishes the problems of an object, one Event for each reason, whenever those of that reason have changed.
pub struct ProblemEvents {
    publisher: EventPublisher,
    regarding: ObjectReference,
    words: ProblemEvent,
    reasons: BTreeMap<&'static str, Reason>,
    /// Whether the API server took a warning since it took the Event that there are no problems.
    has_warned: bool,
}

/// Events of one reason.
#[derive(Debug, Default)]
struct Reason {
    /// The notes of the last Event that the API server took; empty once they are not true any more.
    published: Vec<String>,
    /// Contents of an Event on its way, and the receiver of its success.
    pending: Option<(Vec<String>, oneshot::Receiver<()>)>,
    at: Option<Instant>,
}

impl ProblemEvents {
    /// Nothing is published before there is a problem.
    pub fn new(publisher: EventPublisher, regarding: ObjectReference, words: ProblemEvent) -> Self {
        Self { publisher, regarding, words, reasons: BTreeMap::new(), has_warned: false }
    }

    /// To be called again and again, with the problems as they are: reason and note. What comes and goes makes one Event per
    /// reason and [`DEDUPLICATION_PERIOD`]; what changed meanwhile, or was dropped, is published by a later call.
    pub fn update(&mut self, problems: impl IntoIterator<Item = (&'static str, String)>, now: Instant) {
        let mut notes: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        for (reason, note) in problems {
            notes.entry(reason).or_default().push(note);
        }
        let taken =
            self.reasons.iter_mut().filter_map(|(reason, state)| state.take_answer().then_some(*reason));
        let (resolved, warnings): (Vec<_>, Vec<_>) = taken.partition(|reason| *reason == self.words.resolved);
        self.has_warned = !warnings.is_empty() || (self.has_warned && resolved.is_empty());
        if notes.is_empty() && self.has_warned {
            notes.insert(self.words.resolved, vec![self.words.resolved_note.to_owned()]);
        }
        for (reason, state) in &mut self.reasons {
            if !notes.contains_key(reason) {
                state.published.clear();
            }
        }
        for (reason, notes) in notes {
            self.publish(reason, notes, now);
        }
    }

    fn publish(&mut self, reason: &'static str, notes: Vec<String>, now: Instant) {
        let state = self.reasons.entry(reason).or_default();
        let recent = |at| now.saturating_duration_since(at) < DEDUPLICATION_PERIOD;
        if state.pending.is_some() || state.published == notes || state.at.is_some_and(recent) {
            return;
        }
        let type_ = if reason == self.words.resolved { EventType::Normal } else { EventType::Warning };
        let regarding = self.regarding.clone();
        let action = self.words.action;
        let event = PendingEvent { regarding, reason, action, note: notes.join("; ") };
        let (change, answer) = oneshot::channel();
        self.publisher.enqueue(Queued { event, type_, change: Some(change) });
        state.pending = Some((notes, answer));
        state.at = Some(now);
    }
}

impl Reason {
    /// Whether the API server took the Event that was on its way.
    fn take_answer(&mut self) -> bool {
        let Some((notes, mut answer)) = self.pending.take() else { return false };
        match answer.try_recv() {
            Ok(()) => {
                self.published = notes;
                true
            }
            Err(TryRecvError::Closed) => false,
            Err(TryRecvError::Empty) => {
                self.pending = Some((notes, answer));
                false
            }
        }
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
        let mut bed = Bed::new(1);
        let claimed = ("AddressConflict", "two nodes claim 192.0.2.1");
        bed.expect(&[claimed], 1).await;
        bed.now += DEDUPLICATION_PERIOD;
        bed.expect(&[claimed], 2).await;
        bed.now += DEDUPLICATION_PERIOD;
        bed.expect(&[claimed], 2).await;
        bed.expect(&[], 3).await;
        let seen = bed.seen.lock().unwrap();
        let words = |index: usize| [&seen[index]["type"], &seen[index]["reason"], &seen[index]["note"]];
        assert_eq!(words(1), ["Warning", claimed.0, claimed.1]);
        assert_eq!(words(2), ["Normal", "MeshProblemsGone", "the mesh has no problems any more"]);
        assert_eq!(bed.metrics.dropped.get(), 1);
    }

    #[tokio::test]
    async fn a_reason_is_published_once_in_a_period_and_delays_no_other() {
        let mut bed = Bed::new(0);
        let (one, other) = (("NoKey", "node a has no key"), ("PathMTU", "short packets only"));
        let changed = ("NoKey", "node b has no key");
        bed.expect(&[one], 1).await;
        bed.expect(&[one, other], 2).await;
        // Other nodes, and what comes and goes, wait for the end of the period.
        bed.expect(&[changed, other], 2).await;
        bed.expect(&[], 3).await;
        bed.expect(&[changed], 3).await;
        bed.expect(&[], 3).await;
        bed.now += DEDUPLICATION_PERIOD / 2;
        bed.expect(&[changed], 3).await;
        bed.now += DEDUPLICATION_PERIOD / 2;
        bed.expect(&[changed], 4).await;
        bed.expect(&[], 5).await;
        let seen = bed.seen.lock().unwrap();
        let reasons: Vec<_> = seen.iter().map(|event| event["reason"].as_str().unwrap()).collect();
        assert_eq!(reasons, ["NoKey", "PathMTU", "MeshProblemsGone", "NoKey", "MeshProblemsGone"]);
        assert_eq!(seen[3]["note"], "node b has no key");
    }

    /// Problems of a node, and an API server in memory that keeps the Events it is sent.
    struct Bed {
        seen: Arc<Mutex<Vec<serde_json::Value>>>,
        metrics: EventMetrics,
        events: ProblemEvents,
        now: Instant,
        _supervisor: Supervisor,
    }

    impl Bed {
        /// The API server refuses so many Events.
        fn new(refused: usize) -> Self {
            let seen: Arc<Mutex<Vec<serde_json::Value>>> = Arc::default();
            let kept = Arc::clone(&seen);
            let server = service_fn(move |request: Request<Body>| {
                let seen = Arc::clone(&kept);
                async move {
                    let body = request.into_body().collect_bytes().await.unwrap();
                    let mut seen = seen.lock().unwrap();
                    seen.push(serde_json::from_slice(&body).unwrap());
                    let (code, answer) = if seen.len() <= refused {
                        (403, br#"{"kind":"Status","status":"Failure","code":403}"#.to_vec())
                    } else {
                        (201, body.to_vec())
                    };
                    Ok::<_, Infallible>(Response::builder().status(code).body(Body::from(answer)).unwrap())
                }
            });
            let mut supervisor = Supervisor::default();
            let (publisher, metrics) = start(&mut supervisor, Client::new(server, "default"));
            let words = ProblemEvent {
                resolved: "MeshProblemsGone",
                resolved_note: "the mesh has no problems any more",
                action: "JoinMesh",
            };
            let events = ProblemEvents::new(publisher, node_reference("n1"), words);
            Self { seen, metrics, events, now: Instant::now(), _supervisor: supervisor }
        }

        /// Updates the problems, and asserts how many Events were sent since the beginning.
        async fn expect(&mut self, problems: &[(&'static str, &str)], requests: usize) {
            self.events.update(problems.iter().map(|(reason, note)| (*reason, (*note).to_owned())), self.now);
            while self.seen.lock().unwrap().len() < requests {
                tokio::task::yield_now().await;
            }
            // For the answer to arrive, or for a request that should not be made.
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert_eq!(self.seen.lock().unwrap().len(), requests);
        }
    }
}
