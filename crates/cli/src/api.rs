//! Queries to the API server, for the command line.

use std::fmt::Debug;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;

use crate::proxy;

/// Page size of list requests.
const PAGE: u32 = 500;
/// Connect timeout of API server connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest one answer may take.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Arguments that select a cluster.
#[derive(Debug, Default, Args)]
pub struct ApiArguments {
    /// Use this kubeconfig file [default: KUBECONFIG, ~/.kube/config, or the ServiceAccount of the pod]
    #[arg(long, value_name = "PATH")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig file
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
}

impl ApiArguments {
    /// Whether the user chose a cluster.
    pub(crate) fn is_given(&self) -> bool {
        self.kubeconfig.is_some() || self.context.is_some()
    }

    /// Client of that cluster.
    ///
    /// # Errors
    /// The kubeconfig file cannot be read, has no such context, or names no usable cluster.
    pub async fn client(&self) -> anyhow::Result<Client> {
        let config = self.config(READ_TIMEOUT).await?;
        Client::try_from(config).context("cannot create a Kubernetes client")
    }

    /// Configuration of a client of that cluster: how it is reached, and how long one answer, or the silence of a watch, may take.
    ///
    /// # Errors
    /// The kubeconfig file cannot be read, has no such context, or names no usable cluster.
    pub async fn config(&self, read_timeout: Duration) -> anyhow::Result<Config> {
        let config = match (&self.kubeconfig, &self.context) {
            (None, None) => Config::infer().await.context(
                "no Kubernetes client configuration: use --kubeconfig, set KUBECONFIG, or run in a pod with a ServiceAccount",
            )?,
            (path, context) => {
                let options = KubeConfigOptions { context: context.clone(), ..KubeConfigOptions::default() };
                let loaded = match path {
                    Some(path) => Kubeconfig::read_from(path)
                        .with_context(|| format!("cannot read kubeconfig file {}", path.display()))?,
                    None => Kubeconfig::read().context("cannot read the kubeconfig file: use --kubeconfig")?,
                };
                let context = context.as_deref().or(loaded.current_context.as_deref()).unwrap_or_default().to_owned();
                Config::from_custom_kubeconfig(loaded, &options)
                    .await
                    .with_context(|| format!("cannot use context '{context}' of the kubeconfig file"))?
            }
        };
        let mut config = proxy::direct(config, |name| std::env::var(name).ok())?;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(read_timeout);
        Ok(config)
    }
}

/// Lists all objects that match, page by page. `what` names them in errors.
///
/// # Errors
/// The API server refuses or does not answer.
pub async fn list<K>(api: &Api<K>, what: &str, parameters: ListParams) -> anyhow::Result<Vec<K>>
where
    K: Clone + Debug + DeserializeOwned,
{
    list_pages(api, parameters).await.with_context(|| format!("cannot list {what}"))
}

/// Lists all objects of a kind; none if the API server does not serve the kind.
///
/// # Errors
/// As [`list`].
pub async fn list_if_served<K>(api: &Api<K>, what: &str) -> anyhow::Result<Vec<K>>
where
    K: Clone + Debug + DeserializeOwned,
{
    match list_pages(api, ListParams::default()).await {
        // Without the definition of the kind the answer is no Status, and so has no reason.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        listed => listed.with_context(|| format!("cannot list {what}")),
    }
}

/// Whether the user has not the right; the message of the API server names it.
pub fn is_forbidden(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if status.code == 403)
}

async fn list_pages<K>(api: &Api<K>, parameters: ListParams) -> kube::Result<Vec<K>>
where
    K: Clone + Debug + DeserializeOwned,
{
    let mut parameters = parameters.limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(found),
        }
    }
}

/// A selector of the pods of these programs, with Coil's labels.
pub(crate) fn programs(names: &[&str]) -> String {
    format!("app.kubernetes.io/name=coil,app.kubernetes.io/component in ({})", names.join(","))
}

/// Whether a pod has the condition `Ready`.
pub(crate) fn is_ready(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::http::Uri;
    use axum::routing::get;
    use fairlead_api::resources::{AddressBlock, AddressPool};
    use kube::ResourceExt;
    use serde_json::json;

    use super::*;

    /// Serves two pages of AddressBlocks, and no other kind.
    async fn blocks(uri: Uri) -> String {
        let second = uri.query().is_some_and(|query| query.contains("continue=token"));
        let (name, next) = if second { ("second", "") } else { ("first", "token") };
        let block = json!({ "metadata": { "name": name }, "index": 0 });
        let list = json!({ "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlockList",
            "metadata": { "continue": next }, "items": [block] });
        list.to_string()
    }

    #[tokio::test]
    async fn all_pages_are_listed_and_a_kind_that_is_not_served_has_no_objects() {
        let server = Router::new().route("/apis/coil.cybozu.com/v2/addressblocks", get(blocks));
        let client = Client::new(server, "default");
        let found = list_if_served(&Api::<AddressBlock>::all(client.clone()), "AddressBlocks").await.unwrap();
        assert_eq!(found.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["first", "second"]);
        let none = list_if_served(&Api::<AddressPool>::all(client.clone()), "AddressPools").await.unwrap();
        assert!(none.is_empty());
        let refused = list(&Api::<AddressPool>::all(client), "AddressPools", ListParams::default()).await;
        assert!(refused.unwrap_err().to_string().contains("cannot list AddressPools"));
    }
}
