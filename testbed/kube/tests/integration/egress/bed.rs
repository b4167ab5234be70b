//! One API server with the controllers of Kubernetes and the controller of egress gateways, for all tests of this program. The
//! controller runs beside the API server with the rights of its ServiceAccount; the pods of gateways never start.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed_kube::{ControlPlane, Options};
use testbed_lab::{eventually, executable};

use crate::reads;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// The image of the pod that the controller takes for its own.
pub(crate) const IMAGE: &str = "registry.example.com/fairlead:7";

pub(crate) struct Bed {
    pub(crate) plane: ControlPlane,
    controller: Child,
    directory: TempDir,
}

/// One for the tests that run at the same time; the last one to end takes it away.
pub(crate) fn bed() -> Arc<Bed> {
    static SHARED: Mutex<Weak<Bed>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let bed = Arc::new(Bed::start());
        *shared = Arc::downgrade(&bed);
        bed
    })
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.controller.kill();
        let _ = self.controller.wait();
    }
}

impl Bed {
    fn start() -> Self {
        let plane = ControlPlane::start(Options { controllers: true, ..Options::default() }).unwrap();
        let directory = TempDir::new().unwrap();
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").canonicalize().unwrap();
        plane.kubectl(&["apply", "--server-side", "-k", deploy.join("crds").to_str().unwrap()]).unwrap();
        plane.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=120s"]).unwrap();
        // Kustomize takes only relative paths.
        let up = "../".repeat(directory.path().components().count() - 1);
        let component = format!("{up}{}/components/egress", deploy.to_str().unwrap().trim_start_matches('/'));
        let kustomization = format!("components: [{component}]\n");
        std::fs::write(directory.path().join("kustomization.yaml"), kustomization).unwrap();
        plane.kubectl(&["apply", "-k", directory.path().to_str().unwrap()]).unwrap();
        let own_pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "controller-0", "namespace": "kube-system" },
            "spec": {
                "serviceAccountName": "coil-egress-controller", "containers": [{ "name": "a", "image": IMAGE }],
            },
        });
        plane.apply(&own_pod.to_string()).unwrap();
        let controller = controller(&plane, directory.path());
        Self { plane, controller, directory }
    }

    /// Output of `kubectl get -o json`.
    pub(crate) fn get(&self, arguments: &[&str]) -> Result<Value> {
        reads::get(&self.plane, arguments)
    }

    /// kubectl with the token of the controller, and this standard input.
    ///
    /// # Errors
    /// Message of the API server.
    pub(crate) fn as_controller(&self, arguments: &[&str], stdin: &str) -> Result<String, String> {
        let kubeconfig = self.directory.path().join("kubeconfig");
        let arguments = [&["--kubeconfig", kubeconfig.to_str().unwrap()], arguments].concat();
        self.plane.kubectl_stdin(&arguments, stdin).map_err(|error| format!("{error:#}"))
    }

    /// Waits until an object of a namespace passes `check`.
    #[track_caller]
    pub(crate) fn until(
        &self,
        namespace: &str,
        object: &[&str],
        check: impl Fn(&Value) -> Result<()>,
    ) -> Value {
        let arguments = [object, &["--namespace", namespace]].concat();
        let found = eventually(TIMEOUT, || {
            let found = self.get(&arguments)?;
            check(&found).with_context(|| found.to_string())?;
            Ok(found)
        });
        found.unwrap_or_else(|error| panic!("{object:?} in {namespace}: {error:#}"))
    }

    /// Waits until an object of a namespace is there.
    #[track_caller]
    pub(crate) fn there(&self, namespace: &str, object: &[&str]) -> Value {
        self.until(namespace, object, |_| Ok(()))
    }

    /// Waits until an object of a namespace is gone.
    #[track_caller]
    pub(crate) fn gone(&self, namespace: &str, kind: &str, name: &str) {
        let arguments = ["get", kind, name, "--namespace", namespace, "--ignore-not-found", "-o", "name"];
        let gone = eventually(TIMEOUT, || {
            let found = self.plane.kubectl(&arguments)?;
            ensure!(found.is_empty(), "{found} is there");
            Ok(())
        });
        gone.unwrap();
    }

    /// Waits until the condition Ready of an Egress has this status and reason; returns its message.
    #[track_caller]
    pub(crate) fn ready(&self, namespace: &str, egress: &str, status: &str, reason: &str) -> String {
        let find = |found: &Value| {
            let conditions = found["status"]["conditions"].as_array()?;
            conditions.iter().find(|condition| condition["type"] == "Ready").cloned()
        };
        let found = self.until(namespace, &["egress", egress], |found| {
            let condition = find(found).context("no condition")?;
            ensure!(condition["observedGeneration"] == found["metadata"]["generation"], "not observed");
            ensure!((&condition["status"], &condition["reason"]) == (&json!(status), &json!(reason)));
            Ok(())
        });
        find(&found).unwrap()["message"].as_str().unwrap().to_owned()
    }

    /// The condition `Ready` of Egress `nat` and an Event have these words.
    pub(crate) fn is_named(&self, namespace: &str, reason: &str, words: &str) {
        self.until(namespace, &["egress", "nat"], |egress| {
            let conditions = egress["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.iter().find(|condition| condition["type"] == "Ready");
            let message = ready.and_then(|ready| ready["message"].as_str()).unwrap_or_default();
            ensure!(message.contains(&format!("{reason}: ")) && message.contains(words), "{message}");
            Ok(())
        });
        let is_published = || {
            let events = self.get(&["events.events.k8s.io", "--namespace", namespace])?;
            let events = events["items"].as_array().cloned().unwrap_or_default();
            let is_it = |event: &Value| {
                event["regarding"]["name"] == "nat"
                    && event["reason"] == reason
                    && event["note"].as_str().is_some_and(|note| note.contains(words))
            };
            ensure!(events.iter().any(is_it), "{events:?}");
            Ok(())
        };
        eventually(TIMEOUT, is_published).unwrap();
    }

    pub(crate) fn namespace(&self, name: &str) {
        self.plane.apply(&format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n")).unwrap();
    }

    pub(crate) fn patch(&self, namespace: &str, object: [&str; 2], patch: &Value) {
        let patch = patch.to_string();
        let [kind, name] = object;
        let arguments = ["patch", kind, name, "--namespace", namespace, "--type=merge", "--patch", &patch];
        self.plane.kubectl(&arguments).unwrap();
    }

    pub(crate) fn delete(&self, namespace: &str, object: [&str; 2]) {
        let [kind, name] = object;
        self.plane.kubectl(&["delete", kind, name, "--namespace", namespace]).unwrap();
    }

    /// Namespaces whose gateways have the rights of the ClusterRole.
    pub(crate) fn bound(&self) -> Result<Vec<String>> {
        let binding = self.get(&["clusterrolebinding", "coil-egress"])?;
        let subjects = binding["subjects"].as_array().cloned().unwrap_or_default();
        Ok(subjects.iter().filter_map(|subject| Some(subject["namespace"].as_str()?.to_owned())).collect())
    }
}

fn controller(plane: &ControlPlane, directory: &Path) -> Child {
    let kubeconfig = directory.join("kubeconfig");
    let token = plane.token("coil-egress-controller", "kube-system", None).unwrap();
    plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
    let addresses = ["--metrics-addr=127.0.0.1:0", "--health-addr=127.0.0.1:0"];
    Command::new(executable("fairlead").unwrap())
        .args(["egress-controller", "--identity=controller-0", "--zap-stacktrace-level=panic"])
        .arg("--egress-source-addresses=203.0.113.0/24,2001:db8:5::/64")
        .args(addresses)
        .env("KUBECONFIG", kubeconfig)
        .env("COIL_POD_NAMESPACE", "kube-system")
        .env("COIL_POD_NAME", "controller-0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// An Egress for the Internet with more fields.
pub(crate) fn egress(namespace: &str, name: &str, fields: &Value) -> String {
    let mut spec = json!({ "destinations": ["0.0.0.0/0"] });
    for (field, value) in fields.as_object().unwrap() {
        spec[field] = value.clone();
    }
    json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
        "metadata": { "name": name, "namespace": namespace }, "spec": spec,
    })
    .to_string()
}

/// A gateway whose answer to requests for a path is this: status and body.
pub(crate) fn serve(
    address: &str,
    port: u16,
    path: &'static str,
    answer: impl Fn() -> (&'static str, String) + Send + 'static,
) {
    let listener = TcpListener::bind((address, port)).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 1024];
            let length = stream.read(&mut request).unwrap_or_default();
            assert!(request[..length].starts_with(format!("GET {path} HTTP/1.1\r\n").as_bytes()));
            let (status, body) = answer();
            let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        }
    });
}
