//! The control plane is real, keeps its state over a crash of its API server, and leaves nothing behind.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use testbed_kube::{ControlPlane, Options};
use testbed_lab::eventually;

const CONFIG_MAP: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: note}\ndata: {text: before}\n";

fn start() -> ControlPlane {
    ControlPlane::start(Options::default()).unwrap()
}

fn note(plane: &ControlPlane) -> anyhow::Result<String> {
    plane.kubectl(&["get", "configmap", "note", "-o", "jsonpath={.data.text}"])
}

/// Programs whose command line names the directory, that is, all that belong to one control plane.
fn processes_of(directory: &Path) -> Vec<PathBuf> {
    let name = directory.to_str().unwrap().as_bytes();
    let mentions = |process: &PathBuf| {
        let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
        line.windows(name.len()).any(|window| window == name)
    };
    std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()).filter(mentions).collect()
}

#[test]
fn server_and_kubectl_know_their_version() {
    let plane = start();
    let version: Value = serde_json::from_str(&plane.kubectl(&["version", "-o", "json"]).unwrap()).unwrap();
    assert_eq!(version["serverVersion"]["major"], "1");
    assert!(version["serverVersion"]["gitVersion"].as_str().unwrap().starts_with("v1."), "{version}");
    assert!(plane.server_url().starts_with("https://127.0.0.1:"), "{}", plane.server_url());
}

#[test]
fn errors_of_the_api_server_reach_the_caller() {
    let plane = start();
    let error = plane.apply(&CONFIG_MAP.replace("name: note", "name: Not_A_Name")).unwrap_err().to_string();
    assert!(error.contains("Not_A_Name") && error.contains("Invalid value"), "{error}");
    let error = note(&plane).unwrap_err().to_string();
    assert!(error.contains("configmaps \"note\" not found"), "{error}");
}

#[test]
fn requests_without_a_kubectl_of_their_own_do_what_kubectl_does() {
    let plane = start();
    let path = "/api/v1/namespaces/default/configmaps/note";
    let error = format!("{:#}", plane.get(path).unwrap_err());
    assert!(error.contains("configmaps \"note\" not found"), "{error}");
    plane.apply_at(path, CONFIG_MAP).unwrap();
    assert_eq!(note(&plane).unwrap(), "before");
    let error = format!("{:#}", plane.apply_at(path, &CONFIG_MAP.replace("data:", "daten:")).unwrap_err());
    assert!(error.contains("daten"), "{error}");
    plane.merge(path, &json!({ "data": { "text": "after" } })).unwrap();
    assert_eq!(note(&plane).unwrap(), "after");
    let printed = plane.kubectl(&["get", "configmap", "note", "-o", "json"]).unwrap();
    assert_eq!(plane.get(path).unwrap(), serde_json::from_str::<Value>(&printed).unwrap());
    plane.stop_apiserver().unwrap();
    assert!(plane.get(path).is_err());
    plane.start_apiserver().unwrap();
    assert_eq!(plane.get(path).unwrap()["data"]["text"], "after");
}

#[test]
fn state_survives_a_crash_of_the_api_server() {
    let plane = start();
    plane.apply(CONFIG_MAP).unwrap();
    plane.stop_apiserver().unwrap();
    assert!(note(&plane).unwrap_err().to_string().contains("refused"));
    assert!(format!("{:#}", plane.stop_apiserver().unwrap_err()).contains("not running"));
    plane.start_apiserver().unwrap();
    assert_eq!(note(&plane).unwrap(), "before");
}

#[test]
fn what_was_written_after_a_backup_of_etcd_is_gone_when_it_is_restored() {
    let plane = start();
    plane.apply(CONFIG_MAP).unwrap();
    let backup = tempfile::tempdir().unwrap();
    let backup = backup.path().join("etcd");
    plane.back_up_etcd(&backup).unwrap();
    assert_eq!(note(&plane).unwrap(), "before");
    plane.apply(&CONFIG_MAP.replace("before", "after")).unwrap();
    plane.restore_etcd(&backup).unwrap();
    assert_eq!(note(&plane).unwrap(), "before");
}

#[test]
fn what_is_installed_is_there_from_the_start_and_its_policies_find_their_parameters() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let plane = ControlPlane::start(Options { installed: Some(deploy), ..Options::default() }).unwrap();
    let pool = |name: &str| {
        let spec = json!({ "subnets": [{ "ipv4": "10.64.0.0/16" }] });
        let (kind, version) = ("AddressPool", "coil.cybozu.com/v2");
        json!({ "apiVersion": version, "kind": kind, "metadata": { "name": name }, "spec": spec }).to_string()
    };
    plane.apply_at("/apis/coil.cybozu.com/v2/addresspools/one", &pool("one")).unwrap();
    let is_refused = || {
        let create = ["create", "--dry-run=server", "-f", "-"];
        let error = plane.kubectl_stdin(&create, &pool("two")).err().context("an overlap is accepted")?;
        ensure!(error.to_string().contains("overlaps 10.64.0.0/16 of pool one"), "{error}");
        Ok(())
    };
    // A policy that was bound too early would not find the kind of its parameters for half a minute.
    eventually(Duration::from_secs(20), is_refused).unwrap();
    let token = plane.token("fairlead-node", "kube-system", None).unwrap();
    assert_eq!(token.split('.').count(), 3, "a JSON Web Token");
}

#[test]
fn two_at_once_do_not_see_each_other_and_nothing_stays_behind() {
    let (first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(start);
        (start(), other.join().unwrap())
    });
    first.apply(CONFIG_MAP).unwrap();
    assert!(note(&second).is_err());
    let directory = first.directory().to_owned();
    assert!(!processes_of(&directory).is_empty());
    drop(first);
    assert_eq!(processes_of(&directory), Vec::<PathBuf>::new());
    assert!(!directory.exists());
    second.apply(CONFIG_MAP).unwrap();
}

const OWNER: &str = "control_plane::hold_one_until_killed";

/// Not a test: the process that the next test kills.
#[test]
#[ignore = "started by nothing_stays_behind_when_its_owner_is_killed: cargo xtask test kube -- nothing_stays_behind"]
fn hold_one_until_killed() {
    let plane = start();
    println!("directory: {}", plane.directory().display());
    std::thread::sleep(std::time::Duration::from_secs(600));
}

#[test]
fn nothing_stays_behind_when_its_owner_is_killed() {
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", OWNER, "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(owner.stdout.take().unwrap()).lines().map(Result::unwrap);
    let directory =
        lines.find_map(|line| line.split_once("directory: ").map(|(_, path)| PathBuf::from(path))).unwrap();
    assert!(!processes_of(&directory).is_empty());
    owner.kill().unwrap();
    owner.wait().unwrap();
    for _ in 0..600 {
        if processes_of(&directory).is_empty() && !directory.exists() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!(
        "after a minute: {:?}, {} exists: {}",
        processes_of(&directory),
        directory.display(),
        directory.exists()
    );
}

#[test]
fn node_bound_token_is_its_service_account_and_has_only_its_rights() {
    let plane = start();
    plane.apply("apiVersion: v1\nkind: Node\nmetadata: {name: home-1}\n").unwrap();
    plane.kubectl(&["create", "serviceaccount", "agent"]).unwrap();
    plane.kubectl(&["create", "clusterrole", "see", "--verb=get", "--resource=nodes"]).unwrap();
    plane
        .kubectl(&[
            "create",
            "clusterrolebinding",
            "see",
            "--clusterrole=see",
            "--serviceaccount=default:agent",
        ])
        .unwrap();
    let token = plane.token("agent", "default", Some("home-1")).unwrap();
    let kubeconfig = plane.directory().join("agent.kubeconfig");
    plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
    let flag = format!("--kubeconfig={}", kubeconfig.display());

    let who = plane.kubectl(&[&flag, "auth", "whoami", "-o", "json"]).unwrap();
    assert!(who.contains("system:serviceaccount:default:agent") && who.contains("home-1"), "{who}");
    plane.kubectl(&[&flag, "get", "node", "home-1"]).unwrap();
    let error = plane.kubectl(&[&flag, "delete", "node", "home-1"]).unwrap_err().to_string();
    assert!(error.contains("cannot delete resource \"nodes\""), "{error}");
}

#[test]
fn controllers_and_scheduler_work_when_asked_for() {
    let plane =
        ControlPlane::start(Options { controllers: true, scheduler: true, ..Options::default() }).unwrap();
    plane.kubectl(&["create", "namespace", "shop"]).unwrap();
    let made = ["wait", "serviceaccount/default", "--for=create", "--namespace=shop", "--timeout=120s"];
    plane.kubectl(&made).unwrap();
    let node = "apiVersion: v1\nkind: Node\nmetadata: {name: worker}\n";
    plane.apply(node).unwrap();
    let status = r#"{"status":{"allocatable":{"cpu":"1","memory":"1Gi","pods":"10"},"conditions":[{"type":"Ready","status":"True"}]}}"#;
    plane
        .kubectl(&["patch", "node", "worker", "--subresource=status", "--type=merge", "-p", status])
        .unwrap();
    plane.kubectl(&["run", "web", "--namespace=shop", "--image=none"]).unwrap();
    plane
        .kubectl(&["wait", "pod/web", "--namespace=shop", "--for=condition=PodScheduled", "--timeout=120s"])
        .unwrap();
}

#[test]
fn the_users_own_programs_serve_when_named() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["etcd", "kube-apiserver", "kubectl"] {
        let program = directory.path().join(name);
        let binary = testbed_kube::binary().unwrap();
        std::fs::write(&program, format!("#!/bin/sh\nexec {} {name} \"$@\"\n", binary.display())).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let options = Options { assets: Some(directory.path().to_owned()), ..Options::default() };
    let plane = ControlPlane::start(options).unwrap();
    plane.apply(CONFIG_MAP).unwrap();
    plane.kubectl(&["create", "serviceaccount", "agent"]).unwrap();
    let token = plane.token("agent", "default", None).unwrap();
    plane.stop_apiserver().unwrap();
    assert!(note(&plane).unwrap_err().to_string().contains("refused"));
    plane.start_apiserver().unwrap();
    assert_eq!(note(&plane).unwrap(), "before");
    // Issued before the crash, by the same key as now.
    let kubeconfig = plane.directory().join("agent.kubeconfig");
    plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
    let who = plane.kubectl(&["--kubeconfig", kubeconfig.to_str().unwrap(), "auth", "whoami"]).unwrap();
    assert!(who.contains("system:serviceaccount:default:agent"), "{who}");
    let state = plane.directory().to_owned();
    drop(plane);
    assert_eq!(processes_of(&state), Vec::<PathBuf>::new());
}

static NAMESPACES: AtomicUsize = AtomicUsize::new(0);

/// A network namespace with one address, removed when dropped.
struct Namespace(String);

impl Namespace {
    fn new() -> Self {
        let name = format!("kubebed-{}-{}", std::process::id(), NAMESPACES.fetch_add(1, Ordering::Relaxed));
        ip(&["netns", "add", &name]);
        let namespace = Self(name);
        for arguments in
            ["link set lo up", "addr add 203.0.113.9/32 dev lo", "addr add 2001:db8::9/128 dev lo"]
        {
            let mut all = vec!["-n", &namespace.0];
            all.extend(arguments.split(' '));
            ip(&all);
        }
        namespace
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&["netns", "delete", &self.0]);
    }
}

fn ip(arguments: &[&str]) {
    assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
}

#[test]
fn a_launcher_puts_it_into_a_namespace_where_only_that_namespace_reaches_it() {
    let namespace = Namespace::new();
    let name = namespace.0.clone();
    let options = Options {
        launcher: Some(Box::new(move |program| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &name]).arg(program);
            command
        })),
        addresses: vec!["203.0.113.9".parse().unwrap(), "2001:db8::9".parse().unwrap()],
        extra_names: vec!["api.fairlead.test".into()],
        port: Some(6443),
        ..Options::default()
    };
    let plane = ControlPlane::start(options).unwrap();
    assert_eq!(plane.server_url(), "https://203.0.113.9:6443");
    plane.apply(CONFIG_MAP).unwrap();
    assert_eq!(
        plane.kubectl(&["--server=https://[2001:db8::9]:6443", "get", "--raw", "/readyz"]).unwrap(),
        "ok"
    );
    let named = ["--tls-server-name=api.fairlead.test", "get", "--raw", "/readyz"];
    assert_eq!(plane.kubectl(&named).unwrap(), "ok");
    assert!(
        std::net::TcpStream::connect_timeout(
            &"127.0.0.1:6443".parse().unwrap(),
            std::time::Duration::from_secs(2)
        )
        .is_err()
    );
    drop(plane);
}
