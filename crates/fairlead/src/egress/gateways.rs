//! What gateway pods say of themselves: JSON at their metrics port, asked through the API server with the rights of the user.

use anyhow::Context as _;
use fairlead_egress::objects::metrics_port;
use k8s_openapi::api::core::v1::Pod;
use kube::api::GetParams;
use kube::core::Request;
use kube::{Client, ResourceExt as _};
use serde::de::DeserializeOwned;

/// What a path of the metrics port of a pod answers. The user needs `get` on `pods/proxy`.
///
/// # Errors
/// The right is missing, the pod does not answer, or its answer is not what was expected.
pub(super) async fn ask<T: DeserializeOwned>(client: &Client, pod: &Pod, path: &str) -> anyhow::Result<T> {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let what = || format!("cannot ask gateway {namespace}/{name}");
    let url = format!("/api/v1/namespaces/{namespace}/pods");
    let mut request = Request::new(url.clone()).get(&name, &GetParams::default()).with_context(what)?;
    let address = format!("{url}/{name}:{}/proxy{path}", metrics_port(pod));
    *request.uri_mut() = address.parse().with_context(what)?;
    let text = client.request_text(request).await.with_context(what)?;
    serde_json::from_str(&text).with_context(what)
}
