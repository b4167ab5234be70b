//! Settings below `/proc/sys/net`, in the calling thread's network namespace. They are written only when they differ, so that
//! a read-only `/proc/sys` with the right values is no problem.

use std::path::{Path, PathBuf};
use std::{fs, io};

use fairlead_address::IpFamily;

/// A setting could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}: {source}; is /proc/sys mounted writable?", .path.display())]
pub struct SysctlError {
    /// "read", "list" or "write … to".
    pub operation: String,
    /// The file.
    pub path: PathBuf,
    /// Error of the system.
    pub source: io::Error,
}

type Result<T> = std::result::Result<T, SysctlError>;

const IPV4: &str = "/proc/sys/net/ipv4";
const IPV6: &str = "/proc/sys/net/ipv6";
/// Settings of connection tracking, which are there once its module is.
const NETFILTER: &str = "/proc/sys/net/netfilter";
/// The widest range of groups that every kernel takes for `ping_group_range`, as the kernel prints it.
const ALL_GROUPS: &str = "0\t2147483647";

/// Lets a pod answer packets that came in by an interface although other rules route their sources elsewhere: the check of sources
/// (`rp_filter`, RFC 3704) is off, and what answers a packet with a mark has its mark: TCP sockets that were accepted (`tcp_fwmark_accept`) and what
/// the kernel answers itself (`fwmark_reflect`). Returns the settings that differed; only with `apply` are they written.
///
/// # Errors
/// A setting cannot be read or written.
pub fn answer_by_mark(interface: &str, apply: bool) -> Result<Vec<PathBuf>> {
    let filter = |name| (of_interface(IPV4, name, "rp_filter"), "0");
    let wanted = [
        filter("all"),
        filter(interface),
        (Path::new(IPV4).join("tcp_fwmark_accept"), "1"),
        (Path::new(IPV4).join("fwmark_reflect"), "1"),
        (Path::new(IPV6).join("fwmark_reflect"), "1"),
    ];
    let mut changed = Vec::new();
    for (path, value) in wanted {
        let differs =
            if apply { set(&path, value)? } else { read(&path)?.is_some_and(|found| found != value) };
        if differs {
            changed.push(path);
        }
    }
    Ok(changed)
}

/// Whether the kernel has IPv6: it has none with `ipv6.disable=1`.
pub fn has_ipv6() -> bool {
    Path::new(IPV6).exists()
}

/// Reads a setting; `None` if this kernel or interface does not have it.
fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(SysctlError { operation: "read".to_owned(), path: path.to_owned(), source }),
    }
}

/// Writes a setting unless it is missing or has the value; returns whether it was written.
fn set(path: &Path, value: &str) -> Result<bool> {
    if read(path)?.is_none_or(|found| found == value) {
        return Ok(false);
    }
    fs::write(path, value).map_err(|source| SysctlError {
        operation: format!("write {value} to"),
        path: path.to_owned(),
        source,
    })?;
    Ok(true)
}

/// Path of a setting that had to be written.
fn changed((path, value): (PathBuf, &str)) -> Option<Result<PathBuf>> {
    set(&path, value).map(|is_written| is_written.then_some(path)).transpose()
}

fn of_interface(family: &str, interface: &str, switch: &str) -> PathBuf {
    [family, "conf", interface, switch].iter().collect()
}

/// Makes the node forward IPv4 and IPv6 between its links, and returns the files that were changed.
///
/// A router ignores router advertisements, so a node that has its IPv6 default route from one would lose it the
/// moment forwarding is enabled. Where an interface accepts advertisements as a host (`accept_ra` = 1, not
/// forwarding yet) it is first set to accept them as a router, too (2). Interfaces that already forward are left
/// unchanged. Interfaces that are added later start with the kernel's default; call this again then.
/// (`Documentation/networking/ip-sysctl.rst`)
///
/// # Errors
/// A setting that differs cannot be written.
pub fn enable_forwarding() -> Result<Vec<PathBuf>> {
    let mut wanted = vec![(Path::new(IPV4).join("ip_forward"), "1")];
    let ipv6 = of_interface(IPV6, "all", "forwarding");
    if read(&ipv6)?.is_some_and(|found| found != "1") {
        wanted.extend(
            advertised_interfaces()?.into_iter().map(|name| (of_interface(IPV6, &name, "accept_ra"), "2")),
        );
        wanted.push((ipv6, "1"));
    }
    wanted.into_iter().filter_map(changed).collect()
}

/// Whether packets of a family are forwarded between links.
///
/// # Errors
/// The setting cannot be read.
pub fn forwards(family: IpFamily) -> Result<bool> {
    let path = match family {
        IpFamily::V4 => Path::new(IPV4).join("ip_forward"),
        IpFamily::V6 => of_interface(IPV6, "all", "forwarding"),
    };
    Ok(read(&path)?.as_deref() == Some("1"))
}

/// Whether new interfaces drop IPv4 packets that the main table would answer by another interface: the greater of `all` and `default`
/// counts, and 1 is strict.
///
/// # Errors
/// A setting cannot be read.
pub fn is_reverse_path_strict() -> Result<bool> {
    let of = |interface| read(&of_interface(IPV4, interface, "rp_filter"));
    Ok(of("all")?.max(of("default")?).as_deref() == Some("1"))
}

/// Interfaces that accept router advertisements now but would not once they forward.
fn advertised_interfaces() -> Result<Vec<String>> {
    let directory = Path::new(IPV6).join("conf");
    let failed = |source| SysctlError { operation: "list".to_owned(), path: directory.clone(), source };
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        // These two are not interfaces; "default" stays unchanged, or every later pod link would accept its pod's advertisements.
        if matches!(name.as_str(), "all" | "default" | "lo") {
            continue;
        }
        let is = |switch, value| Ok(read(&of_interface(IPV6, &name, switch))?.as_deref() == Some(value));
        if is("accept_ra", "1")? && is("forwarding", "0")? {
            found.push(name);
        }
    }
    found.sort();
    Ok(found)
}

/// Lets an interface have packets whose sources the main table routes to another interface, or nowhere: those of a device that only
/// marked packets are routed into, and that checks sources itself. `rp_filter` (RFC 3704) is off there, or loose where the host's
/// own setting is strict: the greater of `all` and the interface's counts (`Documentation/networking/ip-sysctl.rst`). Loose alone drops
/// all IPv4 on a host without an IPv4 default route.
///
/// # Errors
/// A setting cannot be read, or differs and cannot be written.
pub fn loosen_reverse_path_filter(interface: &str) -> Result<bool> {
    let is_strict = read(&of_interface(IPV4, "all", "rp_filter"))?.as_deref() == Some("1");
    set(&of_interface(IPV4, interface, "rp_filter"), if is_strict { "2" } else { "0" })
}

/// Lets an interface have packets that this host would answer by another one: where the check of sources (`rp_filter`, RFC 3704) is
/// strict there, it becomes loose. Where it is off or loose, nothing changes.
///
/// # Errors
/// A setting cannot be read, or differs and cannot be written.
pub fn relax_reverse_path_filter(interface: &str) -> Result<bool> {
    let own = of_interface(IPV4, interface, "rp_filter");
    let effective = read(&of_interface(IPV4, "all", "rp_filter"))?.max(read(&own)?);
    if effective.as_deref() == Some("1") { set(&own, "2") } else { Ok(false) }
}

/// Makes the host ignore router advertisements on an interface: a pod's advertisement must never become a route of the
/// node, even where `default/accept_ra` is 2.
///
/// # Errors
/// The setting differs and cannot be written.
pub fn refuse_advertisements(interface: &str) -> Result<bool> {
    set(&of_interface(IPV6, interface, "accept_ra"), "0")
}

/// Lets the kernel answer neighbour solicitations on an interface for the addresses that were added for it
/// ([`fairlead_netlink::route::Proxy`]). Without such addresses the setting has no effect.
///
/// # Errors
/// The setting differs and cannot be written.
pub fn answer_for_neighbours(interface: &str) -> Result<bool> {
    set(&of_interface(IPV6, interface, "proxy_ndp"), "1")
}

/// Enables IPv6 on an interface where container runtimes disabled it by default.
///
/// # Errors
/// The setting differs and cannot be written.
pub fn accept_ipv6(interface: &str) -> Result<bool> {
    set(&of_interface(IPV6, interface, "disable_ipv6"), "0")
}

/// Makes a pod forward what arrives for others, as an egress gateway does, and returns the files that were changed. Packets that come
/// out of a tunnel have sources that the main table routes elsewhere, so the check of sources (`rp_filter`, RFC 3704) is off.
/// Connections are reported and counted from their first packet on, whether or not a program listens. Every group may open sockets for ICMP
/// echo alone, which probe what is outside. For the network namespace of a pod: the host's setting is
/// [`enable_forwarding`]'s.
///
/// # Errors
/// A setting that differs cannot be written.
pub fn forward_in_gateway(interface: &str) -> Result<Vec<PathBuf>> {
    let filter = |name| (of_interface(IPV4, name, "rp_filter"), "0");
    let wanted = [
        (Path::new(IPV4).join("ip_forward"), "1"),
        (of_interface(IPV6, "all", "forwarding"), "1"),
        filter("all"),
        filter("default"),
        filter(interface),
        (Path::new(NETFILTER).join("nf_conntrack_events"), "1"),
        (Path::new(NETFILTER).join("nf_conntrack_acct"), "1"),
        // Last: a user namespace without all groups refuses it.
        (Path::new(IPV4).join("ping_group_range"), ALL_GROUPS),
    ];
    wanted.into_iter().filter_map(changed).collect()
}
