//! Keeps the Secret of certificates in order, serves what it holds, and tells the API server whom to trust.
//!
//! All copies do this at the same time. Whoever writes first wins: every write names the version that was read, the
//! others see the result by their watch and go on from there.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::{SYSTEM_NAMESPACE, WEBHOOK_MUTATING, WEBHOOK_SECRET, WEBHOOK_VALIDATING};
use fairlead_cluster::caches::{self, Cache};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::certificates::{Decision, Material, Policy, carry_out, decide};
use super::issue;
use super::server::Served;

/// How often certificates are looked at when nothing changes, and failed writes are tried again.
const LOOK: Duration = Duration::from_secs(10);

/// Why something was not written.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot write Secret {SYSTEM_NAMESPACE}/{WEBHOOK_SECRET} (deploy/webhook has an empty one): {0}")]
    Secret(#[source] Box<kube::Error>),
    #[error("cannot write caBundle of {0}: {1}")]
    Configuration(String, #[source] Box<kube::Error>),
    #[error(transparent)]
    Issue(#[from] issue::Error),
}

struct Keeper {
    client: Client,
    policy: Policy,
    served: Arc<Served>,
    secrets: Store<Secret>,
    mutating: Store<MutatingWebhookConfiguration>,
    validating: Store<ValidatingWebhookConfiguration>,
}

/// Starts keeping on `tasks`.
pub(super) fn spawn(tasks: &mut JoinSet<()>, client: &Client, policy: Policy, served: Arc<Served>) {
    let secrets: Cache<Secret> = caches::spawn(
        tasks,
        "the webhook's Secret",
        watcher(Api::namespaced(client.clone(), SYSTEM_NAMESPACE), named(WEBHOOK_SECRET)),
    );
    let mutating = caches::spawn(
        tasks,
        "the MutatingWebhookConfiguration",
        watcher(Api::all(client.clone()), named(WEBHOOK_MUTATING)),
    );
    let validating = caches::spawn(
        tasks,
        "the ValidatingWebhookConfiguration",
        watcher(Api::all(client.clone()), named(WEBHOOK_VALIDATING)),
    );
    let changes = [secrets.subscribe(), mutating.subscribe(), validating.subscribe()];
    let keeper = Keeper {
        client: client.clone(),
        policy,
        served,
        secrets: secrets.store,
        mutating: mutating.store,
        validating: validating.store,
    };
    tasks.spawn(keeper.run(changes));
}

/// One object; RBAC by name allows a watch that asks for that name.
fn named(name: &str) -> watcher::Config {
    caches::config().fields(&format!("metadata.name={name}"))
}

impl Keeper {
    async fn run(self, [mut secrets, mut mutating, mut validating]: [watch::Receiver<u64>; 3]) {
        // An absent Secret and one that was not seen yet must not look alike.
        if self.secrets.wait_until_ready().await.is_err() {
            return;
        }
        loop {
            if let Err(error) = self.look(Timestamp::now()).await {
                tracing::warn!(%error, "the webhook's certificates are not in order; will try again");
            }
            let changed = async {
                tokio::select! {
                    _ = secrets.changed() => {}
                    _ = mutating.changed() => {}
                    _ = validating.changed() => {}
                }
            };
            let _ = tokio::time::timeout(LOOK, changed).await;
        }
    }

    async fn look(&self, now: Timestamp) -> Result<(), Error> {
        let secret = self.secrets.get(&ObjectRef::new(WEBHOOK_SECRET).within(SYSTEM_NAMESPACE));
        let data = secret.as_ref().and_then(|secret| secret.data.as_ref()).filter(|data| !data.is_empty());
        let material = data.and_then(|data| {
            let parsed = Material::from_secret(data);
            parsed.inspect_err(|error| tracing::warn!(%error, "the webhook's Secret cannot be used")).ok()
        });
        let published = match &material {
            Some(material) => {
                let _ = self.served.replace(&material.serving);
                self.publish(&material.bundle()).await?
            }
            None => false,
        };
        let decision = decide(material.as_ref(), published, self.policy, now);
        if decision == Decision::Keep {
            return Ok(());
        }
        let fresh = || issue::generation(self.policy, now);
        match carry_out(decision, material, now, fresh)? {
            Some(material) => self.write(secret.as_deref(), &material, decision).await,
            None => Ok(()),
        }
    }

    async fn write(
        &self,
        present: Option<&Secret>,
        material: &Material,
        decision: Decision,
    ) -> Result<(), Error> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let data = Some(material.to_secret());
        let parameters = PostParams::default();
        let written = match present {
            // With its resourceVersion, so that it is refused if another copy was quicker.
            Some(present) => {
                secrets.replace(WEBHOOK_SECRET, &parameters, &Secret { data, ..present.clone() }).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(WEBHOOK_SECRET.to_owned()), ..ObjectMeta::default() };
                secrets.create(&parameters, &Secret { data, metadata, ..Secret::default() }).await
            }
        };
        match written {
            Ok(_) => {
                tracing::info!(?decision, until = %material.serving.ends, "wrote the webhook's certificates");
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(Error::Secret(Box::new(error))),
        }
    }

    /// Whether both configurations carry the bundle already, as far as there are any. Writes it where they do not.
    async fn publish(&self, bundle: &[u8]) -> Result<bool, Error> {
        let mutating = publish(&self.client, &self.mutating.state(), bundle).await?;
        let validating = publish(&self.client, &self.validating.state(), bundle).await?;
        Ok(mutating && validating)
    }
}

/// A kind of webhook configuration.
trait Configuration: Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope> {
    /// Its webhooks, by name.
    fn webhooks(&self) -> Vec<(&str, &WebhookClientConfig)>;
}

impl Configuration for MutatingWebhookConfiguration {
    fn webhooks(&self) -> Vec<(&str, &WebhookClientConfig)> {
        let webhooks = self.webhooks.iter().flatten();
        webhooks.map(|webhook| (webhook.name.as_str(), &webhook.client_config)).collect()
    }
}

impl Configuration for ValidatingWebhookConfiguration {
    fn webhooks(&self) -> Vec<(&str, &WebhookClientConfig)> {
        let webhooks = self.webhooks.iter().flatten();
        webhooks.map(|webhook| (webhook.name.as_str(), &webhook.client_config)).collect()
    }
}

async fn publish<K>(client: &Client, present: &[Arc<K>], bundle: &[u8]) -> Result<bool, Error>
where
    K: Configuration + Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut published = true;
    for configuration in present {
        let differs = |(_, client): &(&str, &WebhookClientConfig)| {
            client.ca_bundle.as_ref().is_none_or(|present| present.0 != bundle)
        };
        let webhooks: Vec<serde_json::Value> = configuration
            .webhooks()
            .into_iter()
            .filter(differs)
            .map(|(name, _)| json!({ "name": name, "clientConfig": { "caBundle": ByteString(bundle.to_vec()) } }))
            .collect();
        if webhooks.is_empty() {
            continue;
        }
        published = false;
        // The list is merged by name, so nothing but this field changes.
        let metadata = json!({ "resourceVersion": configuration.resource_version() });
        let patch = Patch::Strategic(json!({ "metadata": metadata, "webhooks": webhooks }));
        let name = configuration.name_any();
        match Api::<K>::all(client.clone()).patch(&name, &PatchParams::default(), &patch).await {
            Ok(_) => tracing::info!(name, "wrote caBundle"),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(Error::Configuration(name, Box::new(error))),
        }
    }
    Ok(published)
}
