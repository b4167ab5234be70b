//! Host names given as endpoints, looked up beside everything else: a name that does not resolve delays no other peer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::Endpoint;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// Time for which a resolved host name is used before it is looked up again, and longest time of one look-up. Another address is
/// in use within 30 s of the change.
const TTL: Duration = Duration::from_secs(20);

/// Names and their last known addresses.
pub struct Names {
    known: BTreeMap<Endpoint, Known>,
    lookups: JoinSet<(Endpoint, Result<Vec<SocketAddr>, String>)>,
    refresh_at: Instant,
}

#[derive(Default)]
struct Known {
    /// Addresses in the resolver's order of preference (RFC 6724); empty before the first answer.
    addresses: Vec<SocketAddr>,
    /// Whether the last look-up failed. Said once, not every time.
    is_failing: bool,
}

impl Default for Names {
    fn default() -> Self {
        Self { known: BTreeMap::new(), lookups: JoinSet::new(), refresh_at: Instant::now() + TTL }
    }
}

impl Names {
    /// Addresses that are known of the names among these endpoints now, and of no others from now on. Those that are new are being
    /// looked up when this returns.
    pub fn resolve<'a>(
        &mut self,
        endpoints: impl Iterator<Item = &'a Endpoint>,
    ) -> BTreeMap<Endpoint, Vec<SocketAddr>> {
        let mut before = std::mem::take(&mut self.known);
        for name in endpoints.filter(|endpoint| endpoint.address().is_none()) {
            if self.known.contains_key(name) {
                continue;
            }
            let known = before.remove(name).unwrap_or_else(|| {
                self.lookups.spawn(look_up(name.clone()));
                Known::default()
            });
            self.known.insert(name.clone(), known);
        }
        let known = self.known.iter().filter(|(_, known)| !known.addresses.is_empty());
        known.map(|(name, known)| (name.clone(), known.addresses.clone())).collect()
    }

    /// Resolves when the addresses of a name have changed. Names are looked up again meanwhile.
    pub async fn changed(&mut self) {
        loop {
            tokio::select! {
                Some(done) = self.lookups.join_next() => {
                    if let Ok((name, outcome)) = done
                        && let Some(known) = self.known.get_mut(&name)
                        && known.update(&name, outcome)
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

impl Known {
    /// Whether the addresses are others than before. Servers that rotate the order of their answers change nothing, and a
    /// failed look-up leaves the last known addresses in use.
    fn update(&mut self, name: &Endpoint, outcome: Result<Vec<SocketAddr>, String>) -> bool {
        let was_failing = std::mem::replace(&mut self.is_failing, outcome.is_err());
        match outcome {
            Ok(addresses) => {
                let set = |addresses: &[SocketAddr]| addresses.iter().copied().collect::<BTreeSet<_>>();
                let differs = set(&addresses) != set(&self.addresses);
                if differs {
                    self.addresses = addresses;
                }
                differs
            }
            Err(error) => {
                if !was_failing {
                    tracing::warn!(%name, %error, "cannot resolve the name of an endpoint");
                }
                false
            }
        }
    }
}

async fn look_up(name: Endpoint) -> (Endpoint, Result<Vec<SocketAddr>, String>) {
    let outcome = match timeout(TTL, tokio::net::lookup_host(name.to_string())).await {
        Ok(Ok(addresses)) => Ok(addresses.collect()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer in {} s", TTL.as_secs())),
    };
    (name, outcome)
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
        let is_loopback = |address: &SocketAddr| address.ip().is_loopback() && address.port() == 7;
        assert!(found[&wanted].iter().all(is_loopback), "{found:?}");
        assert!(names.lookups.is_empty());
        assert!(names.resolve(std::iter::empty()).is_empty() && names.known.is_empty());
    }

    #[test]
    fn another_order_is_no_change_and_a_failure_loses_nothing() {
        let (name, mut known) = ("a.example.com:7".parse().unwrap(), Known::default());
        let addresses = |texts: [&str; 2]| texts.map(|text| text.parse().unwrap()).to_vec();
        assert!(known.update(&name, Ok(addresses(["192.0.2.1:7", "[2001:db8::1]:7"]))));
        assert!(!known.update(&name, Ok(addresses(["[2001:db8::1]:7", "192.0.2.1:7"]))));
        assert!(!known.update(&name, Err("refused".to_owned())));
        assert_eq!(known.addresses, addresses(["192.0.2.1:7", "[2001:db8::1]:7"]));
        assert!(known.update(&name, Ok(addresses(["192.0.2.2:7", "[2001:db8::1]:7"]))));
    }
}
