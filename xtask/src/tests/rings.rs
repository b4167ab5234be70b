//! Which packages are tested together.

use std::time::Duration;

use super::executables::Executable;

/// A group of packages tested together, from the cheapest to the dearest.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    pub(crate) name: &'static str,
    pub(crate) packages: &'static [&'static str],
    /// Number of test executables that run concurrently: those of the first two rings mostly wait.
    pub(crate) parallel: usize,
    /// Test executables that begin first, in this order: those that take longest, so that none of them is left alone at the end.
    pub(crate) first: &'static [&'static str],
    /// Test executables that wait nearly all of the time: they run beside the others, one at a time.
    pub(crate) waiting: &'static [&'static str],
    /// It mostly waits for virtual machines, and runs beside the ring after it.
    pub(crate) beside_next: bool,
    /// Only when it is named: a cluster of real nodes needs the machine to itself.
    pub(crate) only_by_name: bool,
    /// How long one test executable may run: several times what it takes on two busy cores.
    pub(crate) limit: Duration,
    /// Options of libtest.
    pub(crate) options: &'static [&'static str],
}

const MINUTE: u64 = 60;

pub(crate) const RINGS: &[Ring] = &[
    Ring {
        name: "pure",
        packages: &[
            "fairlead-address",
            "fairlead-api",
            "fairlead-ipam",
            "fairlead-egress",
            "fairlead-topology",
            "fairlead-path",
            "fairlead-discovery",
            "fairlead-relay",
            "testbed-simulation",
            "fairlead-tls",
            "fairlead-wire",
            "fairlead-wireguard",
            "fairlead-cluster",
            "fairlead-cni-plugin",
            "fairlead-node",
            "fairlead-controller",
            "fairlead-image",
            "fairlead-conformance",
            "fairlead",
            "testbed-cache",
            "xtask",
        ],
        parallel: 4,
        first: &[],
        waiting: &[],
        beside_next: false,
        only_by_name: false,
        limit: Duration::from_secs(5 * MINUTE),
        options: &[],
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
        parallel: 3,
        first: &[],
        waiting: &[],
        beside_next: false,
        only_by_name: false,
        limit: Duration::from_secs(5 * MINUTE),
        options: &[],
    },
    Ring {
        name: "kube",
        packages: &["testbed-kube"],
        parallel: 2,
        first: &[],
        waiting: &[],
        beside_next: false,
        only_by_name: false,
        limit: Duration::from_secs(5 * MINUTE),
        options: &[],
    },
    Ring {
        name: "vm",
        packages: &["testbed-vm"],
        parallel: 1,
        first: &[],
        waiting: &[],
        beside_next: true,
        only_by_name: false,
        limit: Duration::from_secs(10 * MINUTE),
        options: &[],
    },
    Ring {
        name: "demo",
        packages: &["fairlead-demo"],
        parallel: 2,
        first: &["relay", "gateways", "nat64", "discovery", "paths"],
        // A rekey takes two minutes to come; the others have few nodes, and wait for timeouts.
        waiting: &["clocks", "bypass", "slow_relay", "stun"],
        beside_next: false,
        only_by_name: false,
        limit: Duration::from_secs(15 * MINUTE),
        options: &[],
    },
    Ring {
        name: "nodes",
        packages: &["testbed-nodes"],
        parallel: 1,
        // The conformance tests run beside the first ones, outside of the cgroups of pods, which get little of a busy processor then. Those
        // of egress send most, and allow no loss.
        first: &["mesh", "outages", "egress"],
        // Small clusters, whose nodes start while the others' tests wait.
        waiting: &["router", "chained"],
        beside_next: false,
        only_by_name: true,
        limit: Duration::from_secs(20 * MINUTE),
        // What a test wrote until it hung must not be lost.
        options: &["--nocapture"],
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
}

/// The rings of these names; without a name all but those that run only by name.
pub(crate) fn choose(names: &[String]) -> Result<Vec<&'static Ring>, String> {
    if let Some(unknown) = names.iter().find(|name| !RINGS.iter().any(|ring| ring.name == name.as_str())) {
        let known: Vec<&str> = RINGS.iter().map(|ring| ring.name).collect();
        return Err(format!("there is no test ring {unknown:?}; there are: {}", known.join(" ")));
    }
    let is_chosen = |ring: &&Ring| {
        if names.is_empty() { !ring.only_by_name } else { names.iter().any(|name| name == ring.name) }
    };
    Ok(RINGS.iter().filter(is_chosen).collect())
}

/// Checks that each executable belongs to a ring: tests of another one would never run.
pub(crate) fn assign(executables: &[Executable]) -> Result<(), String> {
    let in_a_ring = |package: &str| RINGS.iter().any(|ring| ring.packages.contains(&package));
    match executables.iter().find(|executable| !in_a_ring(&executable.package)) {
        Some(Executable { package, .. }) => {
            Err(format!("the tests of {package} are in no ring: add it to xtask/src/tests/rings.rs"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod unit {
    use std::collections::BTreeSet;

    use super::*;
    use crate::tests::executables::workspace;

    #[test]
    fn an_unknown_ring_is_named() {
        let error = choose(&["labb".to_owned()]).unwrap_err();
        assert!(error.contains("labb") && error.contains("pure"), "{error}");
    }

    #[test]
    fn without_a_name_all_rings_run_but_those_that_need_the_machine_to_themselves() {
        let names = |chosen: &[&str]| {
            let chosen: Vec<String> = chosen.iter().map(|name| (*name).to_owned()).collect();
            choose(&chosen).unwrap().iter().map(|ring| ring.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["pure", "lab", "kube", "vm", "demo"]);
        assert_eq!(names(&["nodes", "pure"]), ["pure", "nodes"]);
    }

    #[test]
    fn the_rings_are_the_workspace() {
        let in_rings: Vec<String> =
            RINGS.iter().flat_map(|ring| ring.packages).map(|&package| package.to_owned()).collect();
        let members: BTreeSet<String> =
            workspace().unwrap().packages.iter().map(|package| package.name.to_string()).collect();
        assert_eq!(in_rings.iter().cloned().collect::<BTreeSet<_>>(), members);
        assert_eq!(in_rings.len(), members.len(), "a package is in two rings");
    }

    #[test]
    fn the_programs_that_are_named_exist() {
        let packages = workspace().unwrap().packages;
        for ring in RINGS {
            let of_ring = packages.iter().filter(|package| ring.packages.contains(&package.name.as_str()));
            let programs: Vec<&str> =
                of_ring.flat_map(|package| &package.targets).map(|target| target.name.as_str()).collect();
            for name in ring.first.iter().chain(ring.waiting) {
                assert!(programs.contains(name), "{} has no program {name}", ring.name);
            }
        }
    }

    #[test]
    fn tests_of_a_package_in_no_ring_are_an_error() {
        let of = |package: &str| Executable {
            package: package.to_owned(),
            directory: "/".into(),
            path: "/".into(),
        };
        assert_eq!(assign(&[of("fairlead"), of("xtask")]), Ok(()));
        assert!(assign(&[of("fairlead"), of("newcomer")]).unwrap_err().contains("newcomer"));
    }
}
