//! The mesh as far as pods of this node depend on it.

use std::sync::Arc;
use std::time::Duration;

use fairlead_mesh::model::problem::MeshFailure;
use fairlead_mesh::{MeshView, Snapshot};
use fairlead_pods::cni::MeshStatus;
use ipnet::IpNet;

use super::watches::Caches;

/// Time for which the Node must be missing until that counts: after etcd was restored, it may be until its kubelet registers it.
const NODE_MISSING: Duration = Duration::from_secs(30);
/// Least time between the first and the latest refusal of the API server in a row for which these count: while it starts, it refuses what
/// RBAC grants, and does not know its custom resources.
const REFUSED: Duration = Duration::from_secs(20);

/// Status of the mesh for the CNI service and the network of the pods.
pub(super) struct MeshOfPods {
    pub(super) view: MeshView,
    pub(super) caches: Arc<Caches>,
}

impl MeshStatus for MeshOfPods {
    fn mtu(&self) -> Option<u32> {
        self.view.mtu()
    }

    fn problem(&self) -> Option<String> {
        self.view.problem().map(|failure| failure.to_string())
    }

    fn is_settled(&self) -> bool {
        let Snapshot { report, failure, failing_since, .. } = self.view.snapshot();
        let lasted = failing_since.map(|since| since.elapsed()).unwrap_or_default();
        let refused_for = self.caches.mesh_refused_for();
        report.is_some() || failure.is_some_and(|failure| counts(&failure, lasted, refused_for))
    }

    fn takes_for_own(&self, prefix: &IpNet) -> bool {
        let Snapshot { report, failure, .. } = self.view.snapshot();
        report.is_some_and(|report| takes_for_own(&report.own.prefixes, failure.is_some(), prefix))
    }
}

/// Whether a failure that has `lasted` is a reason to start pods without a mesh, where the API server has refused lists for `refused_for`. Pure.
fn counts(failure: &MeshFailure, lasted: Duration, refused_for: Duration) -> bool {
    match failure {
        MeshFailure::DeviceFailed(_)
        | MeshFailure::KernelRefused(_)
        | MeshFailure::KeyUnusable(_)
        | MeshFailure::NumbersTaken(_) => true,
        MeshFailure::Forbidden(_) | MeshFailure::NoMesh => refused_for >= REFUSED,
        MeshFailure::NodeNotFound(_) => lasted >= NODE_MISSING,
        MeshFailure::WaitingForApiServer => false,
    }
}

/// Whether a prefix is among the `own` ones of the last report, or the last step `failed`: it may have left the kernel as it was. Pure.
fn takes_for_own(own: &[IpNet], failed: bool, prefix: &IpNet) -> bool {
    failed || own.iter().any(|own| own.contains(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn what_the_api_server_says_while_it_starts_counts_once_it_lasts() {
        let words = String::new;
        let at = |seconds| Duration::from_secs(seconds);
        let missing = MeshFailure::NodeNotFound(words());
        assert_eq!([0, 29, 30].map(|lasted| counts(&missing, at(lasted), HOUR)), [false, false, true]);
        for refused in [MeshFailure::Forbidden(words()), MeshFailure::NoMesh] {
            // The failure stays while the API server is not asked again.
            assert_eq!(
                [0, 19, 20].map(|seconds| counts(&refused, HOUR, at(seconds))),
                [false, false, true],
                "{refused}"
            );
        }
        for failure in [MeshFailure::KeyUnusable(words()), MeshFailure::DeviceFailed(words())] {
            assert!(counts(&failure, Duration::ZERO, Duration::ZERO), "{failure:?}");
        }
        assert!(!counts(&MeshFailure::WaitingForApiServer, HOUR, HOUR));
    }

    #[test]
    fn a_step_of_the_mesh_that_failed_has_released_no_block() {
        let [own, block, other] =
            ["10.0.0.0/24", "10.0.0.0/27", "10.0.1.0/27"].map(|net| net.parse::<IpNet>().unwrap());
        assert!(takes_for_own(&[own], false, &block));
        assert!(!takes_for_own(&[own], false, &other));
        assert!(!takes_for_own(&[], false, &other));
        assert!(takes_for_own(&[own], true, &other));
    }
}
