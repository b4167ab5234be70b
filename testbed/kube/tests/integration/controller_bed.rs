//! A real API server with everything of `deploy/`, and the controller with the rights of its ServiceAccount. The controllers of Kubernetes do not
//! run, and with them no garbage collection.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::Result;
use serde_json::Value;
use tempfile::TempDir;
use testbed_kube::{ControlPlane, Options};
use testbed_lab::executable;

use crate::reads;

pub(crate) struct Bed {
    pub(crate) plane: ControlPlane,
    controller: Child,
    _directory: TempDir,
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.controller.kill();
        let _ = self.controller.wait();
    }
}

impl Bed {
    /// The object is there before the controller.
    pub(crate) fn start(object: &Value) -> Self {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        let plane = ControlPlane::start(Options { installed: Some(deploy), ..Options::default() }).unwrap();
        plane.apply(&object.to_string()).unwrap();
        let directory = TempDir::new().unwrap();
        let kubeconfig = directory.path().join("kubeconfig");
        let token = plane.token("fairlead-controller", "kube-system", None).unwrap();
        plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
        let controller = Command::new(executable("fairlead").unwrap())
            .args(["controller", "--identity=controller-0"])
            .args(["--metrics-addr=127.0.0.1:0", "--health-addr=127.0.0.1:0"])
            .env("KUBECONFIG", kubeconfig)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { plane, controller, _directory: directory }
    }

    pub(crate) fn get(&self, arguments: &[&str]) -> Result<Value> {
        reads::get(&self.plane, arguments)
    }
}
