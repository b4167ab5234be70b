//! Kubernetes Events, told without making anybody wait.
//!
//! Whoever has something to tell puts it into a short queue and goes on. A task publishes it; what does not fit is
//! dropped and counted, for a log line says the same. Runtimes try a pod again and again: what was told of it lately is
//! not told again, and after that the recorder counts it up on the same Event.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::metrics::Metrics;

/// Events that may wait to be published.
const QUEUE: usize = 64;
/// How long the same of the same object is not told again.
const QUIET: Duration = Duration::from_secs(30);
/// Objects remembered for that.
const REMEMBERED: usize = 1024;
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Pauses between attempts while the API server is away, in seconds; after the last the Event is dropped.
const PAUSES: [u64; 5] = [1, 3, 10, 30, 60];
/// Longest note the API server takes (`events.k8s.io/v1`, `note`).
const LONGEST_NOTE: usize = 1000;

/// Something to be told about an object.
#[derive(Debug, Clone, PartialEq)]
pub struct News {
    /// The object.
    pub regarding: ObjectReference,
    /// What happened, in one word for programs.
    pub reason: &'static str,
    /// What was tried, in one word for programs.
    pub action: &'static str,
    /// For people.
    pub note: String,
}

/// Takes what is to be told.
#[derive(Clone)]
pub struct Teller {
    queue: mpsc::Sender<News>,
    metrics: Arc<Metrics>,
}

impl Teller {
    /// Starts the task that publishes.
    pub fn spawn(tasks: &mut JoinSet<()>, client: Client, node: &str, metrics: Arc<Metrics>) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE);
        let recorder = Recorder::new(client, reporter(node));
        tasks.spawn(publish_all(recorder, inbox, Arc::clone(&metrics)));
        Self { queue, metrics }
    }

    /// Has it published as a warning, if there is room. Never waits.
    pub fn warn(&self, news: News) {
        if self.queue.try_send(news).is_err() {
            self.metrics.event_dropped();
        }
    }
}

async fn publish_all(recorder: Recorder, mut inbox: mpsc::Receiver<News>, metrics: Arc<Metrics>) {
    let mut told = Told::default();
    while let Some(news) = inbox.recv().await {
        if told.is_due(&news, Instant::now()) && !publish(&recorder, &news).await {
            metrics.event_dropped();
        }
    }
}

/// Whether it was published in the end.
async fn publish(recorder: &Recorder, news: &News) -> bool {
    let event = Event {
        type_: EventType::Warning,
        reason: news.reason.to_owned(),
        note: Some(cut(news.note.clone())),
        action: news.action.to_owned(),
        secondary: None,
    };
    for pause in PAUSES {
        match tokio::time::timeout(ATTEMPT, recorder.publish(&event, &news.regarding)).await {
            Ok(Ok(())) => return true,
            // The namespace may be gone, or the right missing: asking again changes nothing.
            Ok(Err(kube::Error::Api(status))) if (400..500).contains(&status.code) && status.code != 429 => {
                tracing::warn!(
                    reason = news.reason,
                    error = status.message,
                    "the API server refuses an Event"
                );
                return false;
            }
            Ok(Err(error)) => tracing::debug!(reason = news.reason, %error, "cannot publish an Event yet"),
            Err(_) => tracing::debug!(reason = news.reason, "publishing an Event takes too long"),
        }
        tokio::time::sleep(Duration::from_secs(pause)).await;
    }
    false
}

/// What was told of whom lately.
#[derive(Debug, Default)]
struct Told(BTreeMap<(String, &'static str), Instant>);

impl Told {
    /// Whether to tell it now; remembers that it was.
    fn is_due(&mut self, news: &News, now: Instant) -> bool {
        self.0.retain(|_, at| now.saturating_duration_since(*at) < QUIET);
        let object = &news.regarding;
        let part = |text: &Option<String>| text.clone().unwrap_or_default();
        let name = format!("{}/{}/{}", part(&object.namespace), part(&object.name), part(&object.uid));
        let key = (name, news.reason);
        if self.0.contains_key(&key) || self.0.len() >= REMEMBERED {
            return false;
        }
        self.0.insert(key, now);
        true
    }
}

/// Who tells: this program on this node.
pub fn reporter(node: &str) -> Reporter {
    Reporter { controller: "fairlead-node".to_owned(), instance: Some(node.to_owned()) }
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
pub fn cut(mut note: String) -> String {
    let end = (0..=LONGEST_NOTE.min(note.len())).rev().find(|at| note.is_char_boundary(*at));
    note.truncate(end.unwrap_or_default());
    note
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
    use crate::ipam::tests::client;

    fn news(pod: &str, reason: &'static str) -> News {
        let regarding = pod_reference("shop", pod, Some(format!("uid-{pod}")));
        News { regarding, reason, action: "AllocateAddress", note: "no".to_owned() }
    }

    #[test]
    fn the_same_of_the_same_pod_is_told_once_in_a_while() {
        let (mut told, start) = (Told::default(), Instant::now());
        assert!(told.is_due(&news("web", "PoolExhausted"), start));
        assert!(!told.is_due(&news("web", "PoolExhausted"), start + QUIET / 2));
        assert!(told.is_due(&news("web", "UnknownPool"), start + QUIET / 2));
        assert!(told.is_due(&news("db", "PoolExhausted"), start + QUIET / 2));
        assert!(told.is_due(&news("web", "PoolExhausted"), start + QUIET));
    }

    #[test]
    fn what_is_remembered_has_an_end() {
        let (mut told, start) = (Told::default(), Instant::now());
        let due = (0..2 * REMEMBERED).filter(|index| told.is_due(&news(&index.to_string(), "X"), start));
        assert_eq!(due.count(), REMEMBERED);
        assert!(told.is_due(&news("late", "X"), start + QUIET));
    }

    #[test]
    fn a_long_note_is_cut_at_a_character() {
        let note = cut("é".repeat(2000));
        assert!(note.len() <= LONGEST_NOTE && note.chars().all(|c| c == 'é'));
    }

    #[tokio::test]
    async fn nobody_waits_for_a_silent_api_server_and_the_rest_is_counted() {
        let mut tasks = JoinSet::new();
        let metrics = Arc::new(Metrics::default());
        let silent = client(|_| futures::future::pending().boxed());
        let teller = Teller::spawn(&mut tasks, silent, "n1", Arc::clone(&metrics));
        for index in 0..QUEUE + 3 {
            teller.warn(news(&index.to_string(), "PoolExhausted"));
        }
        assert!(metrics.text().contains("fairlead_events_dropped_total 3"), "{}", metrics.text());
    }
}
