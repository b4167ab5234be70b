//! One API server for all tests of this program, programs' views of it, and objects to send to it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use testbed_kube::{ControlPlane, Options};

/// An API server with everything of `deploy/` and two nodes.
pub(crate) struct Bed {
    pub(crate) plane: ControlPlane,
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

pub(crate) fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn fixture(name: &str) -> String {
    let path = checkout().join("crates/api/tests/fixtures").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Bed {
    fn start() -> Self {
        let plane = ControlPlane::start(Options::default()).unwrap();
        plane.kubectl(&["apply", "-k", checkout().join("deploy").to_str().unwrap()]).unwrap();
        plane.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=120s"]).unwrap();
        // Tests use the same prefixes at the same time; only the pools of one of them are compared.
        let labelled = r#"{"spec": {"paramRef": {"selector": {"matchLabels": {"overlap": "judged"}}}}}"#;
        let binding = "validatingadmissionpolicybinding/fairlead-pools-do-not-overlap";
        plane.kubectl(&["patch", binding, "--type=merge", "-p", labelled]).unwrap();
        for node in ["n1", "n2"] {
            plane.apply(&format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {node}}}\n")).unwrap();
        }
        let bed = Self { plane, directory: TempDir::new().unwrap() };
        bed.await_policy();
        bed
    }

    /// The API server puts a policy into force some time after it has accepted it.
    fn await_policy(&self) {
        let n1 = self.program("fairlead-node", Some("n1"));
        let end = Instant::now() + Duration::from_secs(120);
        while n1.create_dry(&peer("n2", "[]")).is_ok() {
            assert!(Instant::now() < end, "the policy does not come into force");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Client with the rights of a program: kubectl with a token of its ServiceAccount, bound to a node or not.
    pub(crate) fn program(&self, account: &str, node: Option<&str>) -> Program<'_> {
        let kubeconfig = self.directory.path().join(format!("{account}-{}", node.unwrap_or("unbound")));
        // Tests at the same time write the same file; each write is complete before it is used.
        static WRITING: Mutex<()> = Mutex::new(());
        let _guard = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        if !kubeconfig.exists() {
            let token = self.plane.token(account, "kube-system", node).unwrap();
            self.plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
        }
        Program { plane: &self.plane, kubeconfig: kubeconfig.to_str().unwrap().to_owned() }
    }

    /// Client with the rights of the managed relay.
    pub(crate) fn relay(&self) -> Program<'_> {
        let token = self.plane.token("fairlead-relay", "fairlead-relay", None).unwrap();
        self.program_with(&token, "fairlead-relay")
    }

    /// Client with the rights of the owner of this token; `name` is that of its kubeconfig.
    pub(crate) fn program_with(&self, token: &str, name: &str) -> Program<'_> {
        let kubeconfig = self.directory.path().join(name);
        self.plane.kubeconfig_for_token(token, &kubeconfig, None).unwrap();
        Program { plane: &self.plane, kubeconfig: kubeconfig.to_str().unwrap().to_owned() }
    }

    pub(crate) fn get(&self, arguments: &[&str]) -> Value {
        let arguments = [&["get", "-o", "json"], arguments].concat();
        serde_json::from_str(&self.plane.kubectl(&arguments).unwrap()).unwrap()
    }

    pub(crate) fn namespace(&self, name: &str) {
        self.plane.apply(&format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n")).unwrap();
    }
}

pub(crate) struct Program<'a> {
    plane: &'a ControlPlane,
    kubeconfig: String,
}

impl Program<'_> {
    pub(crate) fn run(&self, arguments: &[&str], stdin: &str) -> Result<String, String> {
        let arguments = [&["--kubeconfig", self.kubeconfig.as_str()], arguments].concat();
        self.plane.kubectl_stdin(&arguments, stdin).map_err(|error| format!("{error:#}"))
    }

    pub(crate) fn create(&self, object: &str) -> Result<String, String> {
        self.run(&["create", "-f", "-"], object)
    }

    pub(crate) fn create_dry(&self, object: &str) -> Result<String, String> {
        self.run(&["create", "--dry-run=server", "-f", "-"], object)
    }

    pub(crate) fn merge(&self, kind: &str, name: &str, patch: &str) -> Result<String, String> {
        self.run(&["patch", kind, name, "--type=merge", "--patch", patch], "")
    }

    /// Everything it may do with resources in a namespace: verb, `resource.group`, subresource and name.
    pub(crate) fn rights(&self, namespace: &str) -> BTreeSet<[String; 4]> {
        let review = serde_json::json!({"apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}});
        let arguments = ["create", "--validate=false", "-o=json", "-f", "-"];
        let answer: Value =
            serde_json::from_str(&self.run(&arguments, &review.to_string()).unwrap()).unwrap();
        let mut rights = BTreeSet::new();
        for rule in answer["status"]["resourceRules"].as_array().unwrap() {
            let names = Some(strings(&rule["resourceNames"])).filter(|names| !names.is_empty());
            for (group, resource) in strings(&rule["apiGroups"]).iter().flat_map(|group| {
                strings(&rule["resources"]).into_iter().map(move |resource| (group, resource))
            }) {
                let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
                let resource =
                    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") };
                for verb in strings(&rule["verbs"]) {
                    for name in names.as_deref().unwrap_or(&[""]) {
                        rights.insert([verb, &resource, subresource, name].map(str::to_owned));
                    }
                }
            }
        }
        rights
    }

    /// Whether the API server would allow each of these accesses.
    pub(crate) fn may(&self, accesses: &[Access]) -> Vec<bool> {
        let reviews: Vec<String> = accesses.iter().map(Access::review).collect();
        let print = "-o=jsonpath={.status.allowed}{'\\n'}";
        let answers =
            self.run(&["create", "--validate=false", print, "-f", "-"], &reviews.join("\n---\n")).unwrap();
        answers.split_whitespace().map(|answer| answer == "true").collect()
    }
}

/// Strings of a JSON array; an array that is not there has none.
fn strings(array: &Value) -> Vec<&str> {
    array.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// An access as authorization sees it.
#[derive(Debug)]
pub(crate) struct Access {
    pub(crate) verb: &'static str,
    /// `resource.group`, or `resource` of the core group.
    pub(crate) resource: &'static str,
    pub(crate) subresource: &'static str,
    pub(crate) name: &'static str,
    pub(crate) namespace: &'static str,
}

impl Access {
    fn review(&self) -> String {
        let Self { verb, subresource, name, namespace, .. } = self;
        let (resource, group) = self.resource.split_once('.').unwrap_or((self.resource, ""));
        let attributes = serde_json::json!({"verb": verb, "resource": resource, "group": group,
            "subresource": subresource, "name": name, "namespace": namespace});
        format!(
            "{{apiVersion: authorization.k8s.io/v1, kind: SelfSubjectAccessReview, spec: {{resourceAttributes: {attributes}}}}}"
        )
    }
}

#[track_caller]
pub(crate) fn refused(result: Result<String, String>, words: &str) {
    let error = result.expect_err(words);
    assert!(error.contains(words), "expected '{words}' in: {error}");
}

/// The API server puts a policy into force some time after it has accepted it.
pub(crate) fn is_refused_soon(words: &str, attempt: impl Fn() -> Result<String, String>) {
    let end = Instant::now() + Duration::from_secs(60);
    while attempt().is_ok() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
    }
    refused(attempt(), words);
}

pub(crate) fn pool(spec: &str) -> String {
    format!("{{apiVersion: coil.cybozu.com/v2, kind: AddressPool, metadata: {{name: bad}}, spec: {spec}}}")
}

pub(crate) fn block(fields: &str) -> String {
    format!("{{apiVersion: coil.cybozu.com/v2, kind: AddressBlock, metadata: {{name: bad-0}}, {fields}}}")
}

pub(crate) fn egress(spec: &str) -> String {
    format!(
        "{{apiVersion: coil.cybozu.com/v2, kind: Egress, metadata: {{name: bad, namespace: default}}, spec: {spec}}}"
    )
}

pub(crate) fn mesh(spec: &str) -> String {
    format!("{{apiVersion: wirekube.io/v1alpha1, kind: WireKubeMesh, metadata: {{name: bad}}, spec: {spec}}}")
}

pub(crate) fn wirekube_peer(spec: &str) -> String {
    format!("{{apiVersion: wirekube.io/v1alpha1, kind: WireKubePeer, metadata: {{name: bad}}, spec: {spec}}}")
}

pub(crate) fn kilo_peer(spec: &str) -> String {
    format!("{{apiVersion: kilo.squat.ai/v1alpha1, kind: Peer, metadata: {{name: bad}}, spec: {spec}}}")
}

pub(crate) const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";

pub(crate) fn peer(name: &str, allowed: &str) -> String {
    wirekube_peer(&format!("{{publicKey: {KEY}, allowedIPs: {allowed}}}"))
        .replace("name: bad", &format!("name: {name}"))
}

/// A WireKubePeer of a node as its program writes it: the Node of the name owns it.
pub(crate) fn owned_peer(bed: &Bed, name: &str, allowed: &str) -> String {
    let node = bed.get(&["node", name]);
    let owner = serde_json::json!({ "apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"] });
    let allowed: Vec<&str> =
        allowed.trim_matches(['[', ']']).split(',').map(str::trim).filter(|it| !it.is_empty()).collect();
    serde_json::json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
        "metadata": { "name": name, "ownerReferences": [owner] },
        "spec": { "publicKey": KEY, "allowedIPs": allowed },
    })
    .to_string()
}

pub(crate) fn request(name: &str, node: &str) -> String {
    format!(
        "{{apiVersion: coil.cybozu.com/v2, kind: BlockRequest, metadata: {{name: {name}}}, spec: {{nodeName: {node}, poolName: default}}}}"
    )
}
