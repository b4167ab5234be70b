//! Host names given as endpoints, looked up beside everything else: a name that does not resolve delays no other peer.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::Endpoint;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// How long a resolved host name is used before it is looked up again, and how long one look-up may take.
const TTL: Duration = Duration::from_secs(30);

/// Names and their last known addresses.
pub(super) struct Names {
    known: BTreeMap<Endpoint, Option<SocketAddr>>,
    lookups: JoinSet<(Endpoint, Option<SocketAddr>)>,
    refresh_at: Instant,
}

impl Default for Names {
    fn default() -> Self {
        Self { known: BTreeMap::new(), lookups: JoinSet::new(), refresh_at: Instant::now() + TTL }
    }
}

impl Names {
    /// What is known of the names among these endpoints now, and of no others from now on. Those that are new are being
    /// looked up when this returns.
    pub(super) fn resolve<'a>(
        &mut self,
        endpoints: impl Iterator<Item = &'a Endpoint>,
    ) -> BTreeMap<Endpoint, SocketAddr> {
        let mut before = std::mem::take(&mut self.known);
        for name in endpoints.filter(|endpoint| endpoint.address().is_none()) {
            let known = before.remove(name).unwrap_or_else(|| {
                self.lookups.spawn(look_up(name.clone()));
                None
            });
            self.known.insert(name.clone(), known);
        }
        self.known.iter().filter_map(|(name, address)| Some((name.clone(), (*address)?))).collect()
    }

    /// Resolves when the address of a name has changed. Names are looked up again meanwhile.
    pub(super) async fn changed(&mut self) {
        loop {
            tokio::select! {
                Some(done) = self.lookups.join_next() => {
                    // A failed look-up leaves the last known address in use.
                    if let Ok((name, Some(address))) = done
                        && let Some(known) = self.known.get_mut(&name)
                        && known.replace(address) != Some(address)
                    {
                        return;
                    }
                }
                () = sleep_until(self.refresh_at) => {
                    self.refresh_at = Instant::now() + TTL;
                    for name in self.known.keys() {
                        self.lookups.spawn(look_up(name.clone()));
                    }
                }
            }
        }
    }
}

async fn look_up(name: Endpoint) -> (Endpoint, Option<SocketAddr>) {
    let address = match timeout(TTL, tokio::net::lookup_host(name.to_string())).await {
        Ok(Ok(mut addresses)) => addresses.next(),
        Ok(Err(error)) => {
            tracing::warn!(%name, %error, "cannot resolve a peer's endpoint");
            None
        }
        Err(_) => {
            tracing::warn!(%name, "a peer's endpoint did not resolve in {} s", TTL.as_secs());
            None
        }
    };
    (name, address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_is_looked_up_once_and_forgotten_when_it_is_not_asked_for() {
        let (mut names, wanted) = (Names::default(), "localhost:7".parse().unwrap());
        assert!(names.resolve([&wanted].into_iter()).is_empty());
        names.changed().await;
        let found = names.resolve([&wanted].into_iter());
        assert!(found[&wanted].ip().is_loopback() && found[&wanted].port() == 7, "{found:?}");
        assert!(names.lookups.is_empty());
        assert!(names.resolve(std::iter::empty()).is_empty() && names.known.is_empty());
    }
}
