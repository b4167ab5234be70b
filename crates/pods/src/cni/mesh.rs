//! Mesh, as far as the CNI service asks for it.

use std::time::Duration;

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

    /// Whether the kernel leads packets to other nodes into the mesh or drops them, or there is none; false before the first step of the program.
    fn is_settled(&self) -> bool;
}

/// Lock of a container whose interface may be attached: waits [`PATIENCE`] at most until the mesh is settled, where one is wanted. What a pod sends to other
/// nodes before, as after a reboot, leaves in clear text. A DEL of the container waits as well: it must not overtake the ADD.
///
/// # Errors
/// The mesh is not settled by then.
pub(super) async fn lock_once_settled(
    locks: &ContainerLocks,
    container: &str,
    is_wanted: bool,
    mesh: &dyn MeshStatus,
) -> Result<Guard, Failure> {
    let guard = locks.lock(container).await;
    settled_within(PATIENCE, is_wanted, mesh).await?;
    Ok(guard)
}

async fn settled_within(patience: Duration, is_wanted: bool, mesh: &dyn MeshStatus) -> Result<(), Failure> {
    let settled = async {
        while is_wanted && !mesh.is_settled() {
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

    use super::*;

    /// Settled at the look of this number.
    struct Starting(AtomicU32);

    impl MeshStatus for Starting {
        fn mtu(&self) -> Option<u32> {
            None
        }

        fn problem(&self) -> Option<String> {
            None
        }

        fn is_settled(&self) -> bool {
            self.0.fetch_sub(1, Ordering::Relaxed) == 1
        }
    }

    #[tokio::test]
    async fn an_add_waits_for_the_mesh_where_there_is_to_be_one() {
        let (long, short) = (Duration::from_secs(30), Duration::from_millis(200));
        assert_eq!(settled_within(long, true, &Starting(3.into())).await, Ok(()));
        let never = settled_within(short, true, &Starting(1_000_000.into())).await.unwrap_err();
        assert_eq!(never.reason, Reason::MeshStarting);
        assert!(never.message.contains("has not started within 200ms"), "{}", never.message);
        assert_eq!(settled_within(short, false, &Starting(1_000_000.into())).await, Ok(()));
    }

    /// The ADD goes on when its plugin is killed, and the runtime sends a DEL then.
    #[tokio::test]
    async fn a_del_waits_while_an_add_of_the_container_waits_for_the_mesh() {
        let (locks, mesh) = (ContainerLocks::default(), Starting(1_000_000.into()));
        let mut add = Box::pin(lock_once_settled(&locks, "a", true, &mesh));
        assert!(futures::poll!(&mut add).is_pending());
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
    }
}
