//! Status of discovery services, for users.

use std::time::{Duration, Instant};

use fairlead_discovery::client::{ServerEndpoint, View};

use super::connections::{Clients, Service};
use crate::SourceProblem;
use crate::provenance::{DiscoveryStatus, ServiceStatus};
use crate::settings::DiscoverySettings;

/// Longest outage of a service that is no problem yet: each problem is written to the API server by every node.
const OUTAGE: Duration = Duration::from_secs(30);

/// The status when no service can be used.
pub(super) fn of_failure(settings: &DiscoverySettings, error: &str) -> DiscoveryStatus {
    let service = |server: &ServerEndpoint| ServiceStatus {
        server: server.to_string(),
        is_connected: false,
        is_published: false,
        members: 0,
        error: error.to_owned(),
    };
    DiscoveryStatus { services: settings.servers.iter().map(service).collect(), ..DiscoveryStatus::default() }
}

/// The status of the clients with the present secret, which come first. What those with the one before tell counts for users, too.
pub(super) fn of_clients(all: &[Clients]) -> DiscoveryStatus {
    let current = all.first();
    let services = current.map(|it| it.services.as_slice()).unwrap_or_default();
    let views = all.iter().flat_map(|clients| &clients.services);
    DiscoveryStatus {
        affiliate_id: current.map(|it| it.own_id.clone()).unwrap_or_default(),
        services: services.iter().map(|service| service.status(&service.view.borrow())).collect(),
        views: views.map(|service| (service.server.to_string(), service.view.clone())).collect(),
    }
}

impl Clients {
    /// Problems of its services.
    pub(super) fn problems(&self) -> Vec<SourceProblem> {
        self.services.iter().flat_map(|service| service.problems(&service.view.borrow())).collect()
    }
}

impl Service {
    /// Notes whether there is a connection.
    pub(super) fn observe(&mut self, now: Instant) {
        match self.view.borrow_and_update().connected {
            Some(_) => self.down_since = None,
            None => drop(self.down_since.get_or_insert(now)),
        }
    }

    fn status(&self, view: &View) -> ServiceStatus {
        let is_connected = view.connected.is_some();
        ServiceStatus {
            server: self.server.to_string(),
            is_connected,
            is_published: is_connected && view.published.is_some() && view.publication_error.is_none(),
            members: view.members.iter().count(),
            error: error(view).unwrap_or_default().to_owned(),
        }
    }

    /// Problems of the service; that it is away for a moment, as when it is restarted, is none.
    fn problems(&self, view: &View) -> Vec<SourceProblem> {
        let is_long = self.down_since.is_none_or(|at| at.elapsed() >= OUTAGE);
        let unavailable = error(view).filter(|_| is_long).map(|error| SourceProblem::DiscoveryUnavailable {
            server: self.server.to_string(),
            error: error.to_owned(),
        });
        let omissions =
            view.omissions.iter().map(|omission| SourceProblem::DiscoveryOmission(omission.to_string()));
        unavailable.into_iter().chain(omissions).collect()
    }
}

fn error(view: &View) -> Option<&str> {
    let publication = || view.publication_error.as_deref();
    if view.connected.is_none() {
        view.connection_error.as_deref().or_else(publication)
    } else {
        publication()
    }
}
