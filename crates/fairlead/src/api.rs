//! Queries to the API server, for the command line.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::Context as _;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;

use crate::arguments::ApiArguments;

/// Page size of list requests.
const PAGE: u32 = 500;
/// Connect timeout of API server connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest one answer may take.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

impl ApiArguments {
    /// Whether the user chose a cluster.
    pub(crate) fn is_given(&self) -> bool {
        self.kubeconfig.is_some() || self.context.is_some()
    }

    /// A client of that cluster.
    ///
    /// # Errors
    /// The kubeconfig file cannot be read, has no such context, or names no usable cluster.
    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        let mut config = match (&self.kubeconfig, &self.context) {
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
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        Client::try_from(config).context("cannot make a Kubernetes client")
    }
}

/// All objects that match, page by page. `what` names them in errors.
///
/// # Errors
/// The API server refuses or does not answer.
pub(crate) async fn list<K>(api: &Api<K>, what: &str, parameters: ListParams) -> anyhow::Result<Vec<K>>
where
    K: Clone + Debug + DeserializeOwned,
{
    let mut parameters = parameters.limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = api.list(&parameters).await.with_context(|| format!("cannot list {what}"))?;
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(found),
        }
    }
}
