//! Rotates the certificates in the Secret, serves them, and publishes the CA bundle to the API server.
//!
//! All replicas do this at the same time with optimistic concurrency: every write names the resource version that was
//! read. The first one wins, and the others continue from its result when their watch shows it.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::{SYSTEM_NAMESPACE, WEBHOOK_MUTATING, WEBHOOK_SECRET, WEBHOOK_VALIDATING};
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_cluster::writes::is_stale;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::reflector::store::WriterDropped;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::watch;

use super::certificates::{Decision, Material, Policy, apply, decide};
use super::issue;
use super::server::Served;

/// Interval without a change, for expiry and for writes that failed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(10);

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

struct Rotator {
    client: Client,
    policy: Policy,
    served: Arc<Served>,
    secrets: Store<Secret>,
    mutating: Store<MutatingWebhookConfiguration>,
    validating: Store<ValidatingWebhookConfiguration>,
}

/// Starts the rotation.
pub(super) fn start(subsystem: &mut Subsystem, client: &Client, policy: Policy, served: Arc<Served>) {
    let secrets: Cache<Secret> = caches::start(
        subsystem,
        "the webhook's Secret",
        watcher(Api::namespaced(client.clone(), SYSTEM_NAMESPACE), named(WEBHOOK_SECRET)),
    );
    let mutating = caches::start(
        subsystem,
        "the MutatingWebhookConfiguration",
        watcher(Api::all(client.clone()), named(WEBHOOK_MUTATING)),
    );
    let validating = caches::start(
        subsystem,
        "the ValidatingWebhookConfiguration",
        watcher(Api::all(client.clone()), named(WEBHOOK_VALIDATING)),
    );
    let changes = [secrets.subscribe(), mutating.subscribe(), validating.subscribe()];
    let rotator = Rotator {
        client: client.clone(),
        policy,
        served,
        secrets: secrets.store,
        mutating: mutating.store,
        validating: validating.store,
    };
    subsystem.spawn("rotator", rotator.run(changes));
}

/// Selects one object: RBAC by name allows only a watch with this selector.
fn named(name: &str) -> watcher::Config {
    caches::config().fields(&format!("metadata.name={name}"))
}

impl Rotator {
    async fn run(
        self,
        [mut secrets, mut mutating, mut validating]: [watch::Receiver<u64>; 3],
    ) -> Result<(), WriterDropped> {
        // A Secret that was not listed yet must not be taken for an absent one.
        self.secrets.wait_until_ready().await?;
        loop {
            if let Err(error) = self.reconcile(Timestamp::now()).await {
                tracing::warn!(%error, "cannot rotate the webhook's certificates; retrying");
            }
            let changed = async {
                tokio::select! {
                    _ = secrets.changed() => {}
                    _ = mutating.changed() => {}
                    _ = validating.changed() => {}
                }
            };
            let _ = tokio::time::timeout(RESYNC_INTERVAL, changed).await;
        }
    }

    async fn reconcile(&self, now: Timestamp) -> Result<(), Error> {
        let secret = self.secrets.get(&ObjectRef::new(WEBHOOK_SECRET).within(SYSTEM_NAMESPACE));
        let data = secret.as_ref().and_then(|secret| secret.data.as_ref()).filter(|data| !data.is_empty());
        let material = data.and_then(|data| {
            let parsed = Material::from_secret(data);
            parsed.inspect_err(|error| tracing::warn!(%error, "the webhook's Secret is unusable")).ok()
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
        let generate = || issue::generation(self.policy, now);
        match apply(decision, material, now, generate)? {
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
            // With its resourceVersion, so that it is refused if another replica wrote first.
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
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            Err(error) if is_stale(&error) => Ok(()),
            Err(error) => Err(Error::Secret(Box::new(error))),
        }
    }

    /// Whether all existing webhook configurations carry the bundle. Writes it to those that do not.
    async fn publish(&self, bundle: &[u8]) -> Result<bool, Error> {
        let mutating = publish(&self.client, &self.mutating.state(), bundle).await?;
        let validating = publish(&self.client, &self.validating.state(), bundle).await?;
        Ok(mutating && validating)
    }
}

/// A webhook configuration.
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
        // A strategic merge patch merges the list by name, so only this field changes.
        let metadata = json!({ "resourceVersion": configuration.resource_version() });
        let patch = Patch::Strategic(json!({ "metadata": metadata, "webhooks": webhooks }));
        let name = configuration.name_any();
        match Api::<K>::all(client.clone()).patch(&name, &PatchParams::default(), &patch).await {
            Ok(_) => tracing::info!(name, "wrote caBundle"),
            Err(error) if is_stale(&error) => {}
            Err(error) => return Err(Error::Configuration(name, Box::new(error))),
        }
    }
    Ok(published)
}
