//! Disconnecting a pod.

use fairlead_netlink::route::{Link, RouteSocket, delete_link, link_exists};
use tracing::trace_span;

use super::{Error, PodAlias, Result, plan};

/// Disconnects a pod: deletes its link, and with it the addresses and routes on both ends. Returns whether there was
/// one. The pod's namespace is not needed.
///
/// # Errors
/// The kernel refused.
pub fn remove(container_id: &str, ifname: &str) -> Result<bool> {
    let removal = Removal::find(container_id, ifname)?;
    removal.apply()?;
    Ok(removal.is_needed())
}

/// The removal of a pod in two steps, for callers that need not wait until the kernel has freed the link's memory.
///
/// The kernel deletes a link in a few hundred microseconds: both ends are shut, their routes and neighbours go, and they
/// are removed from the list of links, so that no process can find or use them (`unregister_netdevice_many_notify`,
/// `net/core/dev.c`). Before it acknowledges the request it also waits for all processors to have forgotten them
/// (`rcu_barrier` in `netdev_run_todo`), which takes 10 to 40 milliseconds and occupies only the requesting thread.
#[derive(Debug, Clone)]
pub struct Removal {
    container_id: String,
    ifname: String,
    /// Nearly always one.
    links: Vec<u32>,
}

impl Removal {
    /// Finds the links of an interface of a container on the host.
    ///
    /// # Errors
    /// The kernel does not show them.
    pub fn find(container_id: &str, ifname: &str) -> Result<Self> {
        let find = || {
            let mut host = RouteSocket::open()?;
            Ok(match link_by_usual_name(&mut host, container_id, ifname)? {
                Some(link) => vec![link.index],
                None => links_of(&mut host, container_id, ifname)?,
            })
        };
        let links = trace_span!("look up").in_scope(find);
        let container_id = container_id.to_owned();
        let ifname = ifname.to_owned();
        match links {
            Ok(links) => Ok(Self { container_id, ifname, links }),
            Err(source) => Err(Error::Kernel { container_id, ifname, source }),
        }
    }

    /// Whether there is anything to delete.
    pub fn is_needed(&self) -> bool {
        !self.links.is_empty()
    }

    /// Deletes the links; returns when the kernel has freed them.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn apply(&self) -> Result<()> {
        let delete_all = || {
            let mut host = RouteSocket::open()?;
            self.links.iter().try_for_each(|link| delete(&mut host, *link))
        };
        trace_span!("delete").in_scope(delete_all).map_err(|source| Error::Kernel {
            container_id: self.container_id.clone(),
            ifname: self.ifname.clone(),
            source,
        })
    }

    /// Whether none of the links exists any more. From then on no packet reaches the pod by them, and their names and
    /// addresses are free. Cheap, and takes no lock of the kernel.
    pub fn is_over(&self) -> bool {
        !self.links.iter().any(|link| link_exists(*link))
    }
}

fn belongs_to(link: &Link, container_id: &str, ifname: &str) -> bool {
    let alias = link.alias.as_deref().and_then(PodAlias::parse);
    alias.is_some_and(|alias| alias.container_id == container_id && alias.ifname == ifname)
}

/// The link of a pod if it has the name that is tried first, which nearly every pod's has: one request, however many
/// pods there are.
fn link_by_usual_name(
    host: &mut RouteSocket,
    container_id: &str,
    ifname: &str,
) -> fairlead_netlink::Result<Option<Link>> {
    let link = host.link_by_name(&plan::host_name(container_id, ifname, 0))?;
    Ok(link.filter(|link| belongs_to(link, container_id, ifname)))
}

/// Links of an interface, by alias among all links: those that Coil made have names drawn at random.
pub(super) fn links_of(
    host: &mut RouteSocket,
    container_id: &str,
    ifname: &str,
) -> fairlead_netlink::Result<Vec<u32>> {
    let links = host.links_of_kind("veth")?;
    let stale = links.iter().filter(|link| belongs_to(link, container_id, ifname));
    Ok(stale.map(|link| link.index).collect())
}

pub(super) fn delete(host: &mut RouteSocket, link: u32) -> fairlead_netlink::Result<()> {
    match host.apply(&[delete_link(link)]) {
        // The pair was deleted meanwhile, with the pod's namespace.
        Err(error) if error.is_missing() => Ok(()),
        other => other,
    }
}
