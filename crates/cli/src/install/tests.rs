//! Real files and processes; the plugin is a shell script that answers VERSION like the real one.

use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tempfile::TempDir;

use super::*;

const LIST: &str = r#"{"cniVersion": "1.0.0", "name": "k8s-pod-network", "plugins": [{"type": "coil"}]}"#;
const ANSWER: &str = r#"{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}"#;

/// Serialises the tests: a file just written cannot be executed while a process forked by another test holds it open.
static SERIAL: Mutex<()> = Mutex::new(());

struct Node {
    directory: TempDir,
    _serial: MutexGuard<'static, ()>,
}

impl Node {
    fn new() -> Self {
        let serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
        let node = Self { directory: TempDir::new().unwrap(), _serial: serial };
        node.plugin(&format!("#!/bin/sh\necho '{ANSWER}'\n"));
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn plugin(&self, script: &str) {
        put(&self.path("image"), "coil", script.as_bytes(), 0o755).unwrap();
    }

    fn paths(&self) -> Paths {
        Paths {
            conf_name: "10-coil.conflist".to_owned(),
            conf_dir: self.path("etc/cni/net.d"),
            bin_dir: self.path("opt/cni/bin"),
            plugin: self.path("image/coil"),
        }
    }

    fn install(&self, netconf: &str) -> Result<ExitCode, String> {
        self.install_with(Some(netconf.to_owned()))
    }

    fn chain(&self) -> Result<ExitCode, String> {
        self.install_with(None)
    }

    fn install_with(&self, netconf: Option<String>) -> Result<ExitCode, String> {
        let arguments = InstallArguments {
            paths: self.paths(),
            netconf_file: None,
            chain: netconf.is_none(),
            netconf,
            socket: NODE_SOCKET.into(),
        };
        install(&arguments).map_err(|error| format!("{error:#}"))
    }

    fn conf(&self, name: &str) -> PathBuf {
        self.path("etc/cni/net.d").join(name)
    }

    fn installed(&self) -> PathBuf {
        self.path("opt/cni/bin/coil")
    }

    /// Every file of the two directories, with the time it was written.
    fn files(&self) -> Vec<(PathBuf, SystemTime)> {
        let list = |name: &str| fs::read_dir(self.path(name)).unwrap().map(|entry| entry.unwrap());
        let mut files: Vec<_> = list("etc/cni/net.d")
            .chain(list("opt/cni/bin"))
            .map(|entry| (entry.path(), entry.metadata().unwrap().modified().unwrap()))
            .collect();
        files.sort();
        files
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn an_empty_node_gets_plugin_and_configuration() {
    let node = Node::new();
    node.install(LIST).unwrap();
    assert_eq!(fs::read_to_string(node.conf("10-coil.conflist")).unwrap(), LIST);
    assert_eq!(mode(&node.conf("10-coil.conflist")), 0o644);
    assert_eq!(fs::read(node.installed()).unwrap(), fs::read(node.path("image/coil")).unwrap());
    assert_eq!(mode(&node.installed()), 0o755);
    assert_eq!(node.files().len(), 2, "unexpected files: {:?}", node.files());
}

#[test]
fn unchanged_files_are_not_written() {
    let node = Node::new();
    node.install(LIST).unwrap();
    let before = node.files();
    node.install(LIST).unwrap();
    assert_eq!(node.files(), before);
    let other = LIST.replace("1.0.0", "1.1.0");
    node.install(&other).unwrap();
    assert_eq!(fs::read_to_string(node.conf("10-coil.conflist")).unwrap(), other);
}

#[test]
fn a_wrong_mode_is_corrected() {
    let node = Node::new();
    node.install(LIST).unwrap();
    fs::set_permissions(node.installed(), Permissions::from_mode(0o600)).unwrap();
    node.install(LIST).unwrap();
    assert_eq!(mode(&node.installed()), 0o755);
}

#[test]
fn other_files_are_kept_and_those_that_sort_first_reported() {
    let node = Node::new();
    node.install(LIST).unwrap();
    for name in ["05-other.conflist", "10-calico.conf", "20-late.conflist", "00-notes.txt", ".hidden"] {
        fs::write(node.conf(name), "{}").unwrap();
    }
    node.install(LIST).unwrap();
    assert_eq!(node.files().len(), 7);
    let before = sorted_before(&node.paths().conf_dir, "10-coil.conflist").unwrap();
    assert_eq!(before, ["05-other.conflist", "10-calico.conf"]);
}

#[test]
fn a_running_plugin_is_replaced() {
    let node = Node::new();
    node.install(LIST).unwrap();
    fs::copy("/bin/sleep", node.installed()).unwrap();
    let mut old: Child = Command::new(node.installed()).arg("1000").spawn().unwrap();
    let outcome = node.install(LIST);
    old.kill().unwrap();
    old.wait().unwrap();
    outcome.unwrap();
    assert_eq!(fs::read(node.installed()).unwrap(), fs::read(node.path("image/coil")).unwrap());
}

#[test]
fn the_temporary_file_of_a_killed_run_is_replaced() {
    let node = Node::new();
    fs::create_dir_all(node.paths().conf_dir).unwrap();
    fs::write(node.conf(".10-coil.conflist.fairlead"), "{\"cni").unwrap();
    node.install(LIST).unwrap();
    assert!(!node.conf(".10-coil.conflist.fairlead").exists());
    assert_eq!(fs::read_to_string(node.conf("10-coil.conflist")).unwrap(), LIST);
}

#[test]
fn an_invalid_configuration_changes_nothing() {
    let node = Node::new();
    node.install(LIST).unwrap();
    let before = node.files();
    let error = node.install(&LIST.replace("1.0.0", "9.0.0")).unwrap_err();
    assert!(error.contains("10-coil.conflist is invalid") && error.contains("9.0.0"), "{error}");
    let error = node.install(" ").unwrap_err();
    assert!(error.contains("set CNI_NETCONF or CNI_NETCONF_FILE"), "{error}");
    assert_eq!(node.files(), before);
}

#[test]
fn the_variable_takes_precedence_over_the_file() {
    let node = Node::new();
    let file = node.path("netconf.json");
    fs::write(&file, LIST).unwrap();
    let mut arguments = InstallArguments {
        paths: node.paths(),
        netconf_file: Some(file),
        netconf: None,
        chain: false,
        socket: PathBuf::new(),
    };
    assert_eq!(netconf(&arguments).unwrap(), LIST);
    arguments.netconf = Some("other".to_owned());
    assert_eq!(netconf(&arguments).unwrap(), "other");
}

#[test]
fn a_plugin_that_cannot_be_executed_is_not_installed() {
    let node = Node::new();
    for (script, words) in [
        ("#!/bin/sh\nexit 3\n", "exited with exit status: 3"),
        ("#!/bin/sh\necho hello\n", "is not the CNI plugin"),
        ("#!/nonexistent/loader\n", "cannot run"),
    ] {
        node.plugin(script);
        let error = node.install(LIST).unwrap_err();
        assert!(error.contains(words), "{error}");
        assert!(!node.installed().exists());
    }
}

#[test]
fn file_names_that_runtimes_ignore_are_refused() {
    let node = Node::new();
    for wrong in ["../10-coil.conflist", "coil", ".coil.conflist", ""] {
        let paths = Paths { conf_name: wrong.to_owned(), ..node.paths() };
        let error = paths.plugin_type().unwrap_err().to_string();
        assert!(error.contains("CNI_CONF_NAME"), "{error}");
    }
}

#[test]
fn cleanup_removes_only_files_of_fairlead() {
    let node = Node::new();
    node.install(LIST).unwrap();
    fs::write(node.conf("20-other.conflist"), "{}").unwrap();
    fs::write(node.path("opt/cni/bin/portmap"), "").unwrap();
    remove_files(&node.paths()).unwrap();
    let left: Vec<PathBuf> = node.files().into_iter().map(|(path, _)| path).collect();
    assert_eq!(left, [node.conf("20-other.conflist"), node.path("opt/cni/bin/portmap")]);
    fs::write(node.conf("10-coil.conflist"), r#"{"type": "other"}"#).unwrap();
    remove_files(&node.paths()).unwrap();
    assert!(node.conf("10-coil.conflist").exists());
}

#[test]
fn a_chained_plugin_is_in_the_configuration_that_the_runtime_uses_until_it_is_removed() {
    let node = Node::new();
    fs::create_dir_all(node.path("etc/cni/net.d")).unwrap();
    assert!(node.chain().unwrap_err().contains("another CNI plugin must be installed first"));
    let other = r#"{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "ptp"}]}"#;
    for name in ["10-other.conflist", "20-late.conflist"] {
        fs::write(node.conf(name), other).unwrap();
    }
    fs::set_permissions(node.conf("10-other.conflist"), Permissions::from_mode(0o600)).unwrap();
    node.chain().unwrap();
    let text = || fs::read_to_string(node.conf("10-other.conflist")).unwrap();
    assert!(netconf::names(&text(), "coil") && netconf::names(&text(), "ptp"), "{}", text());
    assert_eq!(mode(&node.conf("10-other.conflist")), 0o600);
    assert_eq!(fs::read_to_string(node.conf("20-late.conflist")).unwrap(), other);
    assert!(!node.conf("10-coil.conflist").exists());
    assert!(node.installed().exists());
    let before = node.files();
    node.chain().unwrap();
    assert_eq!(node.files(), before, "nothing is written twice");

    remove_files(&node.paths()).unwrap();
    assert!(!netconf::names(&text(), "coil") && netconf::names(&text(), "ptp"), "{}", text());
    assert!(!node.installed().exists());
}
