//! Problems of the mesh as Events on the Node, where `kubectl describe node` shows them.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Client, ResourceExt};

use crate::events::{cut, node_reference, reporter};

/// Least pause between two Events: a problem that comes and goes must not flood the API server.
const PAUSE: Duration = Duration::from_secs(30);

/// Remembers what was told.
#[derive(Debug, Default)]
pub struct Events {
    told: Vec<String>,
    at: Option<Instant>,
}

/// An Event to be published, if the problems are others than those told last. Pure.
fn next(told: &[String], problems: &[String]) -> Option<(EventType, &'static str, String)> {
    if told == problems {
        return None;
    }
    if problems.is_empty() {
        return Some((EventType::Normal, "MeshProblemsGone", "the mesh has no problems any more".to_owned()));
    }
    Some((EventType::Warning, "MeshProblem", cut(problems.join("; "))))
}

impl Events {
    /// Publishes an Event when the problems have changed.
    ///
    /// # Errors
    /// The API server's answer.
    pub async fn tell(
        &mut self,
        client: &Client,
        node: &Node,
        problems: &[String],
    ) -> Result<(), kube::Error> {
        let too_soon = self.at.is_some_and(|at| at.elapsed() < PAUSE);
        let Some((type_, reason, note)) = next(&self.told, problems).filter(|_| !too_soon) else {
            return Ok(());
        };
        // A recorder joins Events that differ only in their note; each of ours is to be read.
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: "JoinMesh".to_owned(),
            secondary: None,
        };
        let name = node.name_any();
        Recorder::new(client.clone(), reporter(&name)).publish(&event, &node_reference(&name)).await?;
        self.told = problems.to_vec();
        self.at = Some(Instant::now());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_are_told() {
        let problems = vec!["two nodes claim 192.0.2.1".to_owned()];
        let (type_, reason, note) = next(&[], &problems).unwrap();
        assert_eq!((type_, reason), (EventType::Warning, "MeshProblem"));
        assert!(note.contains("192.0.2.1"));
        assert!(next(&problems, &problems).is_none());
        assert_eq!(next(&problems, &[]).unwrap().0, EventType::Normal);
    }
}
