//! Mesh, as far as the CNI service asks for it.

use std::time::Duration;

use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::Cache;
use ipnet::IpNet;

use super::failure::{Failure, Reason};
use crate::container_locks::{ContainerLocks, Guard};

/// Longest time for which an ADD waits for the mesh. After an error the runtime asks again.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two looks at the mesh, which is there within a second or two of the start of the program.
const INTERVAL: Duration = Duration::from_millis(50);

/// Status of the mesh, for the CNI service.
pub trait MeshStatus: Send + Sync {
    /// MTU of the mesh's device; `None` without one.
    fn mtu(&self) -> Option<u32>;

    /// Reason why pods of this node may not reach other nodes; `None` if nothing is wrong, or no mesh is wanted.
    fn problem(&self) -> Option<String>;

    /// Whether the kernel leads packets to other nodes into the mesh or drops them, or there is none, or a reason for that which lasts; false
    /// before the first step of the program.
    fn is_settled(&self) -> bool;

    /// Whether the kernel may still lead packets to a prefix past the mesh, because the mesh takes it for this node's own as of its last step;
    /// false where no mesh is.
    fn takes_for_own(&self, prefix: &IpNet) -> bool;
}

/// Whether packets to other nodes may still leave in clear text although there is to be a mesh. Before the API server has listed them, there may be one.
pub(crate) fn is_starting(meshes: &Cache<WireKubeMesh>, mesh: &dyn MeshStatus) -> bool {
    let is_wanted = !meshes.is_ready() || WireKubeMesh::selected(&meshes.store.state()).is_some();
    is_wanted && !mesh.is_settled()
}

/// Whether an ADD waits for the mesh. Until it is known whether there is to be one, what was before goes on where pods were attached in this boot: the kernel
/// keeps it, and pods that ran here get new sandboxes while the API server is away.
pub(super) fn is_awaited(meshes: &Cache<WireKubeMesh>, mesh: &dyn MeshStatus, was_attached: bool) -> bool {
    (meshes.is_ready() || !was_attached) && is_starting(meshes, mesh)
}

/// Lock of a container whose interface may be attached: waits [`PATIENCE`] at most while the mesh is awaited. What a pod sends to other
/// nodes before, as after a reboot, leaves in clear text. A DEL of the container waits as well: it must not overtake the ADD.
///
/// # Errors
/// The mesh is still awaited then.
pub(super) async fn lock_once_settled(
    locks: &ContainerLocks,
    container: &str,
    is_awaited: impl Fn() -> bool,
) -> Result<Guard, Failure> {
    let guard = locks.lock(container).await;
    settled_within(PATIENCE, is_awaited).await?;
    Ok(guard)
}

async fn settled_within(patience: Duration, is_awaited: impl Fn() -> bool) -> Result<(), Failure> {
    let settled = async {
        while is_awaited() {
            tokio::time::sleep(INTERVAL).await;
        }
    };
    tokio::time::timeout(patience, settled).await.map_err(|_| {
        Failure::new(
            Reason::MeshStarting,
            format!("the mesh of this node has not started within {patience:?}"),
        )
        .details("packets of the pod to other nodes would leave in clear text; see `fairlead status`")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use fairlead_cluster::caches;
    use fairlead_cluster::subsystem::Supervisor;
    use futures::stream::{self, StreamExt as _};
    use kube::runtime::watcher::Event;

    use super::*;

    struct Mesh {
        is_settled: bool,
    }

    impl MeshStatus for Mesh {
        fn mtu(&self) -> Option<u32> {
            None
        }

        fn problem(&self) -> Option<String> {
            None
        }

        fn is_settled(&self) -> bool {
            self.is_settled
        }

        fn takes_for_own(&self, _: &IpNet) -> bool {
            false
        }
    }

    /// The cache of an API server that has listed these meshes; `None` before it has.
    async fn cache(watches: &mut Supervisor, listed: Option<&[&str]>) -> Cache<WireKubeMesh> {
        let mesh = |name: &&str| {
            let spec = serde_json::from_value(serde_json::json!({})).unwrap();
            Ok(Event::InitApply(WireKubeMesh::new(name, spec)))
        };
        let mut events = Vec::new();
        if let Some(meshes) = listed {
            events.push(Ok(Event::Init));
            events.extend(meshes.iter().map(mesh));
            events.push(Ok(Event::InitDone));
        }
        let events = stream::iter(events).chain(stream::pending());
        let cache = caches::start(watches.subsystem("caches"), "WireKubeMeshes", events);
        while listed.is_some() && !cache.is_ready() {
            tokio::task::yield_now().await;
        }
        cache
    }

    const NO_MESH: &[&str] = &[];
    const MESH: &[&str] = &["default"];

    /// A mesh that is not listed yet is not one that is not there.
    #[tokio::test]
    async fn an_add_waits_until_it_is_known_whether_there_is_to_be_a_mesh() {
        let (settled, starting) = (Mesh { is_settled: true }, Mesh { is_settled: false });
        let mut watches = Supervisor::default();
        for (listed, was_attached, waits) in [
            (None, false, true),
            (None, true, false),
            (Some(NO_MESH), false, false),
            (Some(MESH), false, true),
            (Some(MESH), true, true),
        ] {
            let meshes = cache(&mut watches, listed).await;
            assert_eq!(is_awaited(&meshes, &starting, was_attached), waits, "{listed:?} {was_attached}");
            assert!(!is_awaited(&meshes, &settled, was_attached), "{listed:?}");
            assert_eq!(is_starting(&meshes, &starting), listed != Some(NO_MESH), "{listed:?}");
        }
    }

    #[tokio::test]
    async fn an_add_waits_for_the_mesh_for_a_while() {
        let (long, short) = (Duration::from_secs(30), Duration::from_millis(200));
        let looks = AtomicU32::new(3);
        assert_eq!(settled_within(long, || looks.fetch_sub(1, Ordering::Relaxed) > 1).await, Ok(()));
        let never = settled_within(short, || true).await.unwrap_err();
        assert_eq!(never.reason, Reason::MeshStarting);
        assert!(never.message.contains("has not started within 200ms"), "{}", never.message);
    }

    /// The ADD goes on when its plugin is killed, and the runtime sends a DEL then.
    #[tokio::test]
    async fn a_del_waits_while_an_add_of_the_container_waits_for_the_mesh() {
        let locks = ContainerLocks::default();
        let mut add = Box::pin(lock_once_settled(&locks, "a", || true));
        assert!(futures::poll!(&mut add).is_pending());
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
    }
}
