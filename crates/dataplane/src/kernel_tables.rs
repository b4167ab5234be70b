//! Tables of the kernel that pods and neighbours fill: connections that are tracked, and neighbours. A full one drops packets of others, too, and says
//! so nowhere but in the kernel's log.

use std::fs;
use std::path::Path;

/// A table that is full beyond this share, in percent, is a problem, until it is below the other one.
const FULL: u64 = 90;
const RELIEVED: u64 = 80;

/// A table of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Table {
    Connections,
    NeighboursOfIpv4,
    NeighboursOfIpv6,
}

impl Table {
    const ALL: [Self; 3] = [Self::Connections, Self::NeighboursOfIpv4, Self::NeighboursOfIpv6];

    /// Entries, and how many there can be; `None` where the kernel does not say it, as in namespaces other than the host's.
    fn fill(self, proc: &Path) -> Option<(u64, u64)> {
        let number = |path: &str| fs::read_to_string(proc.join(path)).ok()?.trim().parse::<u64>().ok();
        match self {
            Self::Connections => Some((
                number("sys/net/netfilter/nf_conntrack_count")?,
                number("sys/net/netfilter/nf_conntrack_max")?,
            )),
            Self::NeighboursOfIpv4 => {
                Some((entries(proc, "arp_cache")?, number("sys/net/ipv4/neigh/default/gc_thresh3")?))
            }
            Self::NeighboursOfIpv6 => {
                Some((entries(proc, "ndisc_cache")?, number("sys/net/ipv6/neigh/default/gc_thresh3")?))
            }
        }
    }

    fn problem(self) -> &'static str {
        match self {
            Self::Connections => {
                "ConnectionTableFull: the kernel tracks more than nine tenths of the connections that it can, and drops new ones of all pods when it \
                 tracks no more: raise net.netfilter.nf_conntrack_max, or find the pod with the connections (conntrack -L)"
            }
            Self::NeighboursOfIpv4 => {
                "NeighbourTableFull: the kernel has more than nine tenths of the IPv4 neighbours that it can have, and drops packets to others when it has no \
                 more: raise net.ipv4.neigh.default.gc_thresh3, or find the network with the neighbours (ip -4 neigh)"
            }
            Self::NeighboursOfIpv6 => {
                "NeighbourTableFull: the kernel has more than nine tenths of the IPv6 neighbours that it can have, and drops packets to others when it has no \
                 more: raise net.ipv6.neigh.default.gc_thresh3, or find the network with the neighbours (ip -6 neigh)"
            }
        }
    }
}

/// Entries of a table of neighbours: the first column, in hexadecimal, which is the same for each processor (`neigh_stat_seq_show`,
/// `net/core/neighbour.c`).
fn entries(proc: &Path, table: &str) -> Option<u64> {
    let text = fs::read_to_string(proc.join("net/stat").join(table)).ok()?;
    u64::from_str_radix(text.lines().nth(1)?.split_ascii_whitespace().next()?, 16).ok()
}

/// Tables that were too full when they were looked at last.
#[derive(Debug, Default)]
pub struct KernelTables(Vec<Table>);

impl KernelTables {
    /// Looks at the tables of the network namespace of the calling thread; returns a sentence on each that is nearly full.
    pub fn problems(&mut self) -> Vec<&'static str> {
        self.problems_in(Path::new("/proc"))
    }

    fn problems_in(&mut self, proc: &Path) -> Vec<&'static str> {
        let is_full = |table: &Table| {
            let share = if self.0.contains(table) { RELIEVED } else { FULL };
            table.fill(proc).is_some_and(|(entries, most)| {
                entries.saturating_mul(100) >= most.saturating_mul(share) && most > 0
            })
        };
        self.0 = Table::ALL.into_iter().filter(is_full).collect();
        self.0.iter().map(|table| table.problem()).collect()
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// Files as Linux 6.12 has them.
    fn write(proc: &TempDir, connections: u64, neighbours: u64) {
        let files = [
            ("sys/net/netfilter/nf_conntrack_count", format!("{connections}\n")),
            ("sys/net/netfilter/nf_conntrack_max", "262144\n".to_owned()),
            ("sys/net/ipv4/neigh/default/gc_thresh3", "1024\n".to_owned()),
            (
                "net/stat/arp_cache",
                format!(
                    "entries  allocs   destroys hash_grows lookups  hits     res_failed rcv_probes_mcast rcv_probes_ucast periodic_gc_runs \
                     forced_gc_runs unresolved_discards table_fulls\n{neighbours:08x} 00000005 00000001 00000000   00000011 00000010 00000000   \
                     00000000         00000000         00000005         00000000       00000000            00000000   \n"
                ),
            ),
        ];
        for (path, text) in files {
            let path = proc.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn a_table_that_is_nearly_full_is_a_problem_until_it_has_room_again() {
        let proc = TempDir::new().unwrap();
        let mut tables = KernelTables::default();
        let mut reasons = |connections, neighbours| -> Vec<&'static str> {
            write(&proc, connections, neighbours);
            let problems = tables.problems_in(proc.path()).into_iter();
            problems.map(|problem| problem.split(':').next().unwrap()).collect()
        };
        assert_eq!(reasons(200_000, 900), [] as [&str; 0]);
        assert_eq!(reasons(236_000, 900), ["ConnectionTableFull"]);
        assert_eq!(reasons(220_000, 1_000), ["ConnectionTableFull", "NeighbourTableFull"]);
        assert_eq!(reasons(209_000, 900), ["NeighbourTableFull"]);
        assert_eq!(reasons(209_000, 800), [] as [&str; 0]);
    }

    #[test]
    fn what_the_kernel_does_not_say_is_no_problem() {
        assert!(KernelTables::default().problems_in(TempDir::new().unwrap().path()).is_empty());
    }

    #[test]
    fn the_kernel_of_this_host_says_how_many_neighbours_it_has() {
        assert!(entries(Path::new("/proc"), "arp_cache").is_some());
    }
}
