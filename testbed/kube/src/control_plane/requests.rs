//! Objects of the API server, read and written without a kubectl for each of them.

use std::sync::{Arc, PoisonError};

use anyhow::Context;
use serde_json::{Value, json};

use super::{ControlPlane, logs};
use crate::proxy::{Proxy, Request};

impl ControlPlane {
    /// The object, or the list of objects, at a path of the API (with a query, if need be), as `kubectl get -o json` prints it.
    ///
    /// # Errors
    /// There is no such object, or the API server does not answer; its message is in the error.
    pub fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.send(&Request { method: "GET", target: path, content_type: "application/json", body: "" })
    }

    /// Creates or updates the object at a path of the API from a YAML or JSON text, as [`Self::apply`] does with the same text.
    ///
    /// # Errors
    /// The API server refuses; its message is in the error.
    pub fn apply_at(&self, path: &str, object: &str) -> anyhow::Result<Value> {
        let target = format!("{path}?fieldManager=kubectl&force=true&fieldValidation=Strict");
        let content_type = "application/apply-patch+yaml";
        self.send(&Request { method: "PATCH", target: &target, content_type, body: object })
    }

    /// Changes fields of the object, or of the subresource of one, at a path of the API, as `kubectl patch --type=merge` does.
    ///
    /// # Errors
    /// There is no such object, or the API server refuses; its message is in the error.
    pub fn merge(&self, path: &str, patch: &Value) -> anyhow::Result<Value> {
        let target = format!("{path}?fieldManager=kubectl-patch");
        let content_type = "application/merge-patch+json";
        self.send(&Request { method: "PATCH", target: &target, content_type, body: &patch.to_string() })
    }

    /// A token of an existing ServiceAccount, valid for an hour. With `node`, the name of an existing
    /// Node, it is bound to that node as a pod's token is, and admission sees the node's name in it.
    ///
    /// # Errors
    /// The ServiceAccount, namespace or Node does not exist.
    pub fn token(
        &self,
        service_account: &str,
        namespace: &str,
        node: Option<&str>,
    ) -> anyhow::Result<String> {
        let bound = node.map(|node| json!({ "kind": "Node", "apiVersion": "v1", "name": node }));
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": { "boundObjectRef": bound },
        });
        let target = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token");
        let content_type = "application/json";
        let body = request.to_string();
        let answer = self.send(&Request { method: "POST", target: &target, content_type, body: &body })?;
        let token = answer.pointer("/status/token").and_then(Value::as_str);
        token.map(str::to_owned).with_context(|| format!("no token of {service_account}: {answer}"))
    }

    fn send(&self, request: &Request<'_>) -> anyhow::Result<Value> {
        self.proxy().with_context(|| logs(self.directory.path()))?.send(request)
    }

    /// The proxy, started with the first request.
    fn proxy(&self) -> anyhow::Result<Arc<Proxy>> {
        // A panic of another test thread leaves it running, or not there.
        let mut proxy = self.proxy.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(proxy) = proxy.as_ref() {
            return Ok(Arc::clone(proxy));
        }
        let started = Arc::new(Proxy::start(&self.programs, &self.options, self.directory.path())?);
        *proxy = Some(Arc::clone(&started));
        Ok(started)
    }
}
