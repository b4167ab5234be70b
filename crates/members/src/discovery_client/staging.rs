//! Clients for each secret in use: see [`super::secrets`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use futures::future::join_all;
use jiff::Timestamp;
use rustls::RootCertStore;

use super::connections::Clients;
use super::secrets::{Change, InUse, Shared};
use super::{DiscoveryTask, Known};
use crate::SourceProblem;
use crate::discovery::Told;
use crate::saved::discovery::{Credentials, Secrets};
use crate::settings::DiscoverySettings;

/// Progress of a change of the secret.
#[derive(Default)]
pub(super) struct Progress {
    /// Whether the secret of before is to be left.
    pub(super) is_done: bool,
    pub(super) problem: Option<SourceProblem>,
    /// Members that have not changed.
    pub(super) unchanged: Vec<String>,
    /// Identifiers under the secret of before, of this node and of members that have changed.
    pub(super) former: BTreeSet<String>,
}

impl DiscoveryTask {
    /// Takes the credentials that the Secret has. Returns those that are to be left at once.
    pub(super) fn change(
        &self,
        settings: &DiscoverySettings,
        read: Credentials,
        known: &mut Known,
    ) -> Option<Credentials> {
        let now = Timestamp::now();
        let at = Instant::now();
        let in_use = known
            .in_use
            .take()
            .or_else(|| self.file.saved_secrets().map(|secrets| InUse::resumed(secrets, now, at)));
        let first = || InUse::resumed(Secrets { current: read.clone(), previous: None }, now, at);
        let in_use = in_use.unwrap_or_else(first);
        let is_other = in_use.secrets.current != read;
        let (in_use, left) = in_use.changed(read, now, at);
        if is_other {
            tracing::info!(
                "the secret for discovery services has changed; the one before stays in use until all members have changed"
            );
            known.memory.change_secret();
            known.former.clear();
        }
        self.keep(settings, &in_use);
        known.in_use = Some(in_use);
        self.share(known);
        left
    }

    /// Saves the secrets in use, for starts without the API server.
    fn keep(&self, settings: &DiscoverySettings, in_use: &InUse) {
        let (namespace, name) = &settings.secret;
        if let Err(error) = self.file.write_secrets(&format!("{namespace}/{name}"), &in_use.secrets) {
            tracing::warn!(error = %format!("{error:#}"), "cannot save the secret for discovery services");
        }
    }

    /// Tells the mesh of the secrets in use.
    pub(super) fn share(&self, known: &Known) {
        let Some(InUse { secrets, .. }) = &known.in_use else { return };
        let previous = secrets.previous.as_ref();
        let previous = previous.map(|it| (it.credentials.secret, known.memory.changed_kubespan()));
        let shared = Some(Shared { current: secrets.current.clone(), previous });
        self.credentials.send_if_modified(|known| {
            let differs = *known != shared;
            *known = shared;
            differs
        });
    }

    /// Keeps clients for the secrets in use, beginning with the present one, and for no others.
    pub(super) async fn connect(
        &self,
        settings: &DiscoverySettings,
        roots: &Arc<RootCertStore>,
        known: &Known,
        clients: &mut Vec<Clients>,
        left: Option<Credentials>,
    ) {
        let Some(InUse { secrets, .. }) = &known.in_use else { return };
        let start = |credentials: &Credentials| {
            Clients::start(credentials.clone(), &self.node, settings, roots, self.mark)
        };
        let mut running = std::mem::take(clients);
        let previous = secrets.previous.as_ref().map(|previous| &previous.credentials);
        for credentials in std::iter::once(&secrets.current).chain(previous) {
            let found = running.iter().position(|it| it.credentials == *credentials);
            clients.push(found.map(|at| running.swap_remove(at)).unwrap_or_else(|| start(credentials)));
        }
        // After a restart none runs with that.
        let unknown = left.filter(|left| !running.iter().any(|it| it.credentials == *left));
        running.extend(unknown.as_ref().map(start));
        join_all(running.into_iter().map(Clients::leave)).await;
    }

    /// Leaves the secret of before.
    pub(super) async fn leave_previous(
        &self,
        settings: &DiscoverySettings,
        known: &mut Known,
        clients: &mut Vec<Clients>,
    ) {
        let Some(in_use) = &mut known.in_use else { return };
        let Some(previous) = in_use.leave_previous() else { return };
        while let Some(at) = clients.iter().position(|it| it.credentials == previous) {
            clients.remove(at).leave().await;
        }
        self.keep(settings, in_use);
        self.share(known);
    }
}

/// Compares what services tell under the present secret and under the one before.
pub(super) fn progress(
    known: &Known,
    (current, told): (&Clients, &Told),
    (previous, before): (Option<&Clients>, &Told),
) -> Progress {
    let (Some(in_use), Some(previous)) = (&known.in_use, previous) else { return Progress::default() };
    let names = |told| Told::members(told).map(|(name, _)| name).collect();
    let now = Instant::now();
    let change = Change {
        previous: names(before),
        current: names(told),
        has_answered: current.has_answered() && current.is_published() && previous.has_answered(),
        is_over: in_use.is_over(now),
    };
    let unchanged = change.unchanged();
    let left = before.members().filter(|(name, _)| change.current.contains(name)).map(|(_, id)| id);
    Progress {
        is_done: change.is_done(),
        problem: in_use.problem(&unchanged, now),
        former: left.chain([previous.own_id.as_str()]).map(str::to_owned).collect(),
        unchanged: unchanged.into_iter().map(str::to_owned).collect(),
    }
}
