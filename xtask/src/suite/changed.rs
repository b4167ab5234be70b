//! `cargo xtask test --changed`: the packages whose tests a change can break.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use cargo_metadata::Metadata;

use super::executables;
use crate::steps::root;

/// Packages whose tests run programs of the workspace, of which cargo does not know.
const RUN_PROGRAMS: &[&str] = &[
    "fairlead-bench",
    "fairlead-conformance",
    "fairlead-demo",
    "testbed-kube",
    "testbed-nodes",
    "testbed-vm",
];
/// The packages of these programs.
const PROGRAMS: &[&str] = &["fairlead", "fairlead-cni-plugin"];
/// Packages whose tests `testbed-vm` runs on another kernel.
const RUN_IN_VMS: &[&str] = &[
    "fairlead-dataplane",
    "fairlead-egress-client",
    "fairlead-egress-gateway",
    "fairlead-fou",
    "fairlead-relay",
    "fairlead-tunnel",
];
/// Text that few packages read, by the beginning of its path. A file of no package and not of these may be read by all.
const TEXT: &[(&str, &[&str])] = &[
    ("ARCHITECTURE.md", &["xtask"]),
    ("CHANGELOG.md", &["xtask"]),
    ("CONTRIBUTING.md", &["xtask"]),
    ("README.md", &["xtask"]),
    ("SECURITY.md", &["xtask"]),
    ("STYLE.md", &["xtask"]),
    ("docs/", &["xtask", "testbed-kube", "testbed-metrics"]),
    ("findings/", &["xtask"]),
    (
        "fuzz/corpus/",
        &[
            "fairlead-api",
            "fairlead-cni-plugin",
            "fairlead-controller",
            "fairlead-dataplane",
            "fairlead-discovery",
            "fairlead-egress",
            "fairlead-egress-client",
            "fairlead-egress-gateway",
            "fairlead-netlink",
            "fairlead-port-mapping",
            "fairlead-relay",
            "fairlead-source-addresses",
            "fairlead-tunnel",
            "fairlead-wire",
            "fairlead-wireguard",
        ],
    ),
];

/// A package of the workspace.
#[derive(Debug, Default, PartialEq, Eq)]
struct Package {
    /// Directory of the package, relative to the root, with a slash at the end.
    directory: String,
    /// Packages that it is built with, for its tests, too, and those whose programs these run.
    uses: BTreeSet<String>,
}

/// The packages that may be broken by what differs from `revision`, also by what is not committed.
///
/// # Errors
/// git does not know the revision, or cargo cannot read the workspace.
pub(crate) fn packages(revision: Option<&str>) -> Result<BTreeSet<String>, String> {
    let base = match revision {
        Some(revision) => revision.to_owned(),
        None => branch_point()?,
    };
    let mut files = git(&["diff", "--name-only", "--no-renames", &base, "--"])?;
    files.extend(git(&["ls-files", "--others", "--exclude-standard"])?);
    Ok(affected(&files, &of_workspace(&executables::workspace()?)))
}

/// The commit that this branch has in common with the one that it is to be merged into.
fn branch_point() -> Result<String, String> {
    let heads = ["origin/HEAD", "origin/main", "main"];
    let common = heads.iter().find_map(|head| git(&["merge-base", "HEAD", head]).ok()?.pop());
    common
        .ok_or_else(|| format!("none of {} is known: name a revision, --changed=REVISION", heads.join(", ")))
}

fn git(arguments: &[&str]) -> Result<Vec<String>, String> {
    let output = Command::new("git").args(arguments).current_dir(root()).output();
    let output = output.map_err(|error| format!("cannot run git: {error}"))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        return Err(format!("git {}: {}", arguments.join(" "), reason.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

fn of_workspace(metadata: &Metadata) -> BTreeMap<String, Package> {
    let members: BTreeSet<String> =
        metadata.packages.iter().map(|package| package.name.to_string()).collect();
    let package = |package: &cargo_metadata::Package| {
        let name = package.name.to_string();
        let directory = package.manifest_path.parent().unwrap_or(&package.manifest_path);
        let directory = directory.strip_prefix(&metadata.workspace_root).unwrap_or(directory);
        let uses = package.dependencies.iter().map(|dependency| dependency.name.clone());
        let mut uses: BTreeSet<String> = uses.filter(|name| members.contains(name)).collect();
        if RUN_PROGRAMS.contains(&name.as_str()) {
            uses.extend(PROGRAMS.iter().map(|program| (*program).to_owned()));
        }
        if name == "testbed-vm" {
            uses.extend(RUN_IN_VMS.iter().map(|package| (*package).to_owned()));
        }
        (name, Package { directory: format!("{directory}/"), uses })
    };
    metadata.packages.iter().map(package).collect()
}

fn affected(files: &[String], packages: &BTreeMap<String, Package>) -> BTreeSet<String> {
    let mut affected: BTreeSet<String> = BTreeSet::new();
    for file in files {
        let owner = packages.iter().find(|(_, package)| file.starts_with(&package.directory));
        let readers = TEXT.iter().find(|(path, _)| file.starts_with(path));
        match (owner, readers) {
            (_, Some((_, readers))) => affected.extend(readers.iter().map(|name| (*name).to_owned())),
            (Some((name, _)), None) => drop(affected.insert(name.clone())),
            (None, None) => return packages.keys().cloned().collect(),
        }
    }
    if !files.is_empty() {
        // The laws are about all files.
        affected.insert("xtask".to_owned());
    }
    let mut before = usize::MAX;
    while before != affected.len() {
        before = affected.len();
        let users = packages.iter().filter(|(_, package)| !package.uses.is_disjoint(&affected));
        let users: Vec<String> = users.map(|(name, _)| name.clone()).collect();
        affected.extend(users);
    }
    affected
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn broken_by(files: &[&str]) -> BTreeSet<String> {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        affected(&files, &of_workspace(&executables::workspace().unwrap()))
    }

    #[test]
    fn what_uses_a_changed_package_is_tested_and_nothing_else() {
        assert_eq!(broken_by(&[]), names(&[]));
        assert_eq!(
            broken_by(&["testbed/demo/tests/integration/clocks.rs"]),
            names(&["fairlead-bench", "fairlead-demo", "xtask"])
        );
        let by_fou = broken_by(&["crates/fou/src/lib.rs"]);
        for user in ["fairlead-fou", "fairlead-egress-gateway", "fairlead", "fairlead-demo", "testbed-nodes"]
        {
            assert!(by_fou.contains(user), "{user} is not in {by_fou:?}");
        }
        for other in ["fairlead-relay", "fairlead-path", "fairlead-cni-plugin", "fairlead-keys"] {
            assert!(!by_fou.contains(other), "{other} is in {by_fou:?}");
        }
    }

    #[test]
    fn a_program_that_tests_run_counts_although_cargo_does_not_know() {
        let by_plugin = broken_by(&["crates/cni-plugin/src/main.rs"]);
        assert!(by_plugin.contains("testbed-nodes") && !by_plugin.contains("fairlead-controller"));
    }

    #[test]
    fn files_of_no_package_may_be_read_by_all_but_text_is_not() {
        let all: BTreeSet<String> = of_workspace(&executables::workspace().unwrap()).into_keys().collect();
        assert_eq!(broken_by(&["Cargo.lock"]), all);
        assert_eq!(broken_by(&["deploy/node/daemonset.yaml", "README.md"]), all);
        assert_eq!(broken_by(&["README.md", "CHANGELOG.md"]), names(&["xtask"]));
        let by_corpus = broken_by(&["fuzz/corpus/netlink/any-input"]);
        assert!(by_corpus.contains("fairlead-netlink") && !by_corpus.contains("fairlead-keys"));
    }

    #[test]
    fn the_packages_that_are_named_exist() {
        let packages = of_workspace(&executables::workspace().unwrap());
        let readers = TEXT.iter().flat_map(|(_, readers)| *readers);
        for name in RUN_PROGRAMS.iter().chain(PROGRAMS).chain(RUN_IN_VMS).chain(readers) {
            assert!(packages.contains_key(*name), "{name}");
        }
    }

    #[test]
    fn all_that_replay_a_corpus_of_the_fuzz_targets_are_known() {
        let (_, known) = TEXT.iter().find(|(path, _)| *path == "fuzz/corpus/").unwrap();
        for (name, package) in of_workspace(&executables::workspace().unwrap()) {
            let tests = format!("{}tests", package.directory);
            let replays =
                git(&["grep", "-lF", "fuzz/corpus", "--", &tests]).is_ok_and(|files| !files.is_empty());
            assert_eq!(known.contains(&name.as_str()), replays && name != "xtask", "{name}");
        }
    }

    #[test]
    fn an_unknown_revision_is_named() {
        assert!(packages(Some("no-such-revision")).unwrap_err().contains("no-such-revision"));
    }
}
