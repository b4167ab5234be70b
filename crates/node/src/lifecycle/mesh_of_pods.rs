//! The mesh as far as pods of this node depend on it.

use std::time::Duration;

use fairlead_mesh::model::problem::MeshFailure;
use fairlead_mesh::{MeshView, Snapshot};
use fairlead_pods::cni::MeshStatus;

/// Time for which the API server must keep this node from the mesh until that counts. While it starts, it refuses what RBAC grants, and does
/// not know its custom resources; after etcd was restored, the Node may be missing until its kubelet registers it.
const TRANSIENT: Duration = Duration::from_secs(30);

/// Status of the mesh for the CNI service and the network of the pods.
pub(super) struct MeshOfPods(pub(super) MeshView);

impl MeshStatus for MeshOfPods {
    fn mtu(&self) -> Option<u32> {
        self.0.mtu()
    }

    fn problem(&self) -> Option<String> {
        self.0.problem().map(|failure| failure.to_string())
    }

    fn is_settled(&self) -> bool {
        let Snapshot { report, failure, failing_since, .. } = self.0.snapshot();
        let lasted = failing_since.map(|since| since.elapsed()).unwrap_or_default();
        report.is_some() || failure.is_some_and(|failure| counts(&failure, lasted))
    }
}

/// Whether a failure that has lasted this long is a reason to start pods without a mesh. Pure.
fn counts(failure: &MeshFailure, lasted: Duration) -> bool {
    match failure {
        MeshFailure::DeviceFailed(_)
        | MeshFailure::KernelRefused(_)
        | MeshFailure::KeyUnusable(_)
        | MeshFailure::NumbersTaken(_) => true,
        MeshFailure::Forbidden(_) | MeshFailure::NoMesh | MeshFailure::NodeNotFound(_) => lasted >= TRANSIENT,
        MeshFailure::WaitingForApiServer => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_api_server_says_while_it_starts_counts_once_it_lasts() {
        let words = String::new;
        let (at_once, soon, later) = (Duration::ZERO, Duration::from_secs(29), Duration::from_secs(30));
        for failure in
            [MeshFailure::Forbidden(words()), MeshFailure::NoMesh, MeshFailure::NodeNotFound(words())]
        {
            assert_eq!(
                [at_once, soon, later].map(|lasted| counts(&failure, lasted)),
                [false, false, true],
                "{failure}"
            );
        }
        for failure in [MeshFailure::KeyUnusable(words()), MeshFailure::DeviceFailed(words())] {
            assert!(counts(&failure, at_once), "{failure:?}");
        }
        assert!(!counts(&MeshFailure::WaitingForApiServer, Duration::from_secs(3600)));
    }
}
