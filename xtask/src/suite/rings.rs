//! Rings of packages that are tested together.

use std::time::Duration;

use super::executables::Executable;
use super::jobs::{Filter, Selection};
use super::times::Time;

/// Tests of the soak.
#[derive(Debug, PartialEq)]
pub(crate) struct Soaked {
    pub(crate) package: &'static str,
    /// Module or whole name.
    pub(crate) name: &'static str,
    /// Nothing runs beside them: emulated machines, times and losses have no processor to spare.
    pub(crate) alone: bool,
}

/// A group of packages tested together.
#[derive(Debug, PartialEq)]
pub(crate) struct Ring {
    pub(crate) name: &'static str,
    pub(crate) packages: &'static [&'static str],
    /// Modules of integration tests that measure, or count losses: nothing runs beside them.
    pub(crate) alone: &'static [&'static str],
    /// Tests that are too long for every run: `cargo xtask test soak` runs them.
    pub(crate) soak: &'static [Soaked],
    /// Only when it is named: a cluster of real nodes needs the machine to itself.
    pub(crate) only_by_name: bool,
    /// Time of one test of every run, after which it is taken for hung: several times what it takes on two busy cores.
    pub(crate) limit: Duration,
    /// Time of a job that `times.tsv` does not have.
    pub(crate) typical: Time,
    /// Least share of processors of a job, in hundredths, whatever `times.tsv` says: what processes used that were not waited for, such as
    /// the nodes of a cluster, is missing there.
    pub(crate) least: u32,
    /// Tests write to the terminal directly: what one wrote until it hung must not be lost.
    pub(crate) nocapture: bool,
}

const MINUTE: u64 = 60;
/// Share of a cluster of real nodes: three go together, also where `times.tsv` has less than they use.
const CLUSTER: u32 = 50;

pub(crate) const RINGS: &[Ring] = &[
    Ring {
        name: "pure",
        packages: &[
            "fairlead-address",
            "fairlead-api",
            "fairlead-keys",
            "fairlead-limits",
            "fairlead-ipam",
            "fairlead-egress",
            "fairlead-source-addresses",
            "fairlead-topology",
            "fairlead-path",
            "fairlead-discovery",
            "fairlead-relay",
            "testbed-simulation",
            "fairlead-transport",
            "fairlead-wire",
            "fairlead-wireguard",
            "fairlead-cli",
            "fairlead-cluster",
            "fairlead-cni-plugin",
            "fairlead-egress-client",
            "fairlead-members",
            "fairlead-mesh",
            "fairlead-node",
            "fairlead-pods",
            "fairlead-controller",
            "fairlead-image",
            "fairlead-conformance",
            "fairlead",
            "testbed-api",
            "testbed-cache",
            "xtask",
        ],
        alone: &[],
        soak: &[
            Soaked {
                package: "testbed-simulation",
                name: "nats::attempts_between_a_symmetric_and_a_port_restricted_nat_succeed_in_99_of_100_runs",
                alone: false,
            },
            Soaked {
                package: "testbed-simulation",
                name: "nats::attempts_between_two_symmetric_nats_succeed_where_both_sequential",
                alone: false,
            },
            Soaked {
                package: "testbed-simulation",
                name: "nats::attempts_with_random_ports_stay_within_their_limits",
                alone: false,
            },
        ],
        only_by_name: false,
        limit: Duration::from_secs(2 * MINUTE),
        typical: Time { seconds: 5.0, cpu: 5.0 },
        least: 0,
        nocapture: false,
    },
    Ring {
        name: "lab",
        packages: &[
            "testbed-discovery",
            "testbed-lab",
            "testbed-metrics",
            "testbed-netns",
            "fairlead-netlink",
            "fairlead-dataplane",
            "fairlead-egress-gateway",
            "fairlead-fou",
            "fairlead-tunnel",
            "fairlead-port-mapping",
            "fairlead-bench",
        ],
        alone: &[],
        soak: &[],
        only_by_name: false,
        limit: Duration::from_secs(3 * MINUTE),
        typical: Time { seconds: 10.0, cpu: 8.0 },
        least: 0,
        nocapture: false,
    },
    Ring {
        name: "kube",
        packages: &["testbed-kube"],
        alone: &[],
        soak: &[],
        only_by_name: false,
        limit: Duration::from_secs(4 * MINUTE),
        typical: Time { seconds: 60.0, cpu: 60.0 },
        least: 0,
        nocapture: false,
    },
    Ring {
        name: "vm",
        packages: &["testbed-vm"],
        alone: &[],
        soak: &[],
        only_by_name: false,
        limit: Duration::from_secs(6 * MINUTE),
        typical: Time { seconds: 60.0, cpu: 60.0 },
        least: 0,
        nocapture: false,
    },
    Ring {
        name: "demo",
        packages: &["fairlead-demo"],
        alone: &[],
        soak: &[
            Soaked {
                package: "fairlead-demo",
                name: "birthday::birthday_attempts_succeed_in_99_of_100_runs",
                alone: true,
            },
            Soaked { package: "fairlead-demo", name: "interfaces", alone: false },
            Soaked {
                package: "fairlead-demo",
                name: "kernel::a_node_without_ipv6_serves_a_dual_stack_pool_with_ipv4",
                alone: false,
            },
            Soaked { package: "fairlead-demo", name: "kernel_encapsulation", alone: true },
            Soaked { package: "fairlead-demo", name: "kernel_nats", alone: true },
            Soaked { package: "fairlead-demo", name: "kernel_paths", alone: true },
        ],
        only_by_name: false,
        limit: Duration::from_secs(12 * MINUTE),
        typical: Time { seconds: 90.0, cpu: 90.0 },
        least: 0,
        nocapture: false,
    },
    Ring {
        name: "nodes",
        packages: &["testbed-nodes"],
        // The conformance tests run beside the others, outside of the cgroups of pods, which get little of a busy processor then. Those
        // of egress send most, and allow no loss: they come last.
        alone: &["egress"],
        soak: &[
            Soaked { package: "testbed-nodes", name: "control_plane", alone: true },
            Soaked {
                package: "testbed-nodes",
                name: "egress::source_addresses::a_holder_that_is_cut_off_does_not_use_its_addresses_when_it_is_back",
                alone: true,
            },
            Soaked {
                package: "testbed-nodes",
                name: "egress::source_addresses::connections_go_on_when_the_holders_node_loses_its_power",
                alone: true,
            },
            Soaked {
                package: "testbed-nodes",
                name: "egress::use_of_gateways::the_first_connection_of_each_of_200_pods_succeeds",
                alone: true,
            },
            Soaked {
                package: "testbed-nodes",
                name: "mesh::relay::a_managed_relay_is_rolled_out_under_traffic",
                alone: true,
            },
            Soaked {
                package: "testbed-nodes",
                name: "outages::uninstall::a_node_that_is_off_is_named_and_can_be_left_out",
                alone: true,
            },
        ],
        only_by_name: true,
        limit: Duration::from_secs(15 * MINUTE),
        typical: Time { seconds: 300.0, cpu: 300.0 },
        least: CLUSTER,
        nocapture: true,
    },
];

impl Ring {
    /// Whether its tests start API servers.
    pub(crate) fn needs_control_plane(&self) -> bool {
        matches!(self.name, "demo" | "kube" | "nodes")
    }

    /// Whether its tests run containers.
    pub(crate) fn needs_images(&self) -> bool {
        self.name == "nodes"
    }

    /// The entry of a test that runs only in the soak.
    pub(crate) fn soaks(&self, package: &str, test: &str) -> Option<&'static Soaked> {
        self.soak.iter().find(|soaked| {
            soaked.package == package
                && test
                    .strip_prefix(soaked.name)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        })
    }
}

/// The name that stands for the tests of all rings that are too long for every run.
const SOAK: &str = "soak";

/// Rings, and which of their tests run.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) rings: Vec<&'static Ring>,
    pub(crate) selection: Selection,
}

/// The rings of these names; without a name all but those that run only by name. `soak` stands for what all rings leave out
/// otherwise; a test that the filter names runs, whether it is of the soak or not.
pub(crate) fn choose(names: &[String], filter: &Filter) -> Result<Choice, String> {
    if names.iter().any(|name| name == SOAK) {
        if names.len() > 1 {
            return Err("`soak` is of all rings: it stands alone".to_owned());
        }
        let rings = RINGS.iter().filter(|ring| !ring.soak.is_empty()).collect();
        return Ok(Choice { rings, selection: Selection::Soak });
    }
    if let Some(unknown) = names.iter().find(|name| !RINGS.iter().any(|ring| ring.name == name.as_str())) {
        let known: Vec<&str> = RINGS.iter().map(|ring| ring.name).chain([SOAK]).collect();
        return Err(format!("there is no test ring {unknown:?}; there are: {}", known.join(" ")));
    }
    let is_chosen = |ring: &&Ring| {
        if names.is_empty() { !ring.only_by_name } else { names.iter().any(|name| name == ring.name) }
    };
    let selection = if filter.is_by_name() { Selection::All } else { Selection::WithoutSoak };
    Ok(Choice { rings: RINGS.iter().filter(is_chosen).collect(), selection })
}

/// Checks that each executable belongs to a ring: tests of another one would never run.
pub(crate) fn assign(executables: &[Executable]) -> Result<(), String> {
    let in_a_ring = |package: &str| RINGS.iter().any(|ring| ring.packages.contains(&package));
    match executables.iter().find(|executable| !in_a_ring(&executable.package)) {
        Some(Executable { package, .. }) => {
            Err(format!("the tests of {package} are in no ring: add it to xtask/src/suite/rings.rs"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::suite::executables::workspace;

    fn choice(names: &[&str]) -> Result<(Vec<&'static str>, Selection), String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let choice = choose(&names, &Filter::default())?;
        Ok((choice.rings.iter().map(|ring| ring.name).collect(), choice.selection))
    }

    #[test]
    fn an_unknown_ring_is_named() {
        let error = choice(&["labb"]).unwrap_err();
        assert!(error.contains("labb") && error.contains("pure"), "{error}");
    }

    #[test]
    fn without_a_name_all_rings_run_but_those_that_need_the_machine_to_themselves() {
        let every_run = Selection::WithoutSoak;
        assert_eq!(choice(&[]), Ok((vec!["pure", "lab", "kube", "vm", "demo"], every_run)));
        assert_eq!(choice(&["nodes", "pure"]), Ok((vec!["pure", "nodes"], every_run)));
    }

    #[test]
    fn the_soak_is_of_all_rings_and_what_a_filter_names_runs() {
        let (rings, selection) = choice(&["soak"]).unwrap();
        assert!(rings.contains(&"demo") && selection == Selection::Soak);
        assert!(choice(&["soak", "demo"]).is_err());
        let filter = Filter::parse(&["clocks".to_owned()]).unwrap();
        assert_eq!(choose(&[], &filter).unwrap().selection, Selection::All);
    }

    #[test]
    fn the_rings_are_the_workspace() {
        let in_rings: Vec<String> =
            RINGS.iter().flat_map(|ring| ring.packages).map(|&package| package.to_owned()).collect();
        let workspace = workspace().unwrap();
        // Fuzz targets are programs without tests.
        let tested = workspace.packages.iter().filter(|package| package.targets.iter().any(|it| it.test));
        let members: BTreeSet<String> = tested.map(|package| package.name.to_string()).collect();
        assert_eq!(in_rings.iter().cloned().collect::<BTreeSet<_>>(), members);
        assert_eq!(in_rings.len(), members.len(), "a package is in two rings");
    }

    #[test]
    fn modules_that_are_named_are_of_packages_of_their_ring() {
        for ring in RINGS {
            for soaked @ Soaked { package, name, .. } in ring.soak {
                assert!(ring.packages.contains(package), "{} has no package {package}", ring.name);
                assert_eq!(ring.soaks(package, name), Some(soaked));
                assert_eq!(ring.soaks(package, &format!("{name}x")), None);
            }
        }
    }

    #[test]
    fn tests_of_a_package_in_no_ring_are_an_error() {
        let of = |package: &str| Executable {
            package: package.to_owned(),
            directory: "/".into(),
            path: "/".into(),
            is_integration: false,
        };
        assert_eq!(assign(&[of("fairlead"), of("xtask")]), Ok(()));
        assert!(assign(&[of("fairlead"), of("newcomer")]).unwrap_err().contains("newcomer"));
    }
}
