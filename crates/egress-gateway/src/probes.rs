//! Probes what `spec.healthCheck` names, from the pod and with its own address.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use fairlead_tunnel::EchoSockets;
use futures::future::join_all;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use crate::condition::Conditions;
use crate::health::{Health, Outcome, connect_timeout, next};
use crate::metrics::Metrics;
use fairlead_egress::options::{HealthCheck, Options, Target};

/// Reason of a gateway that is unhealthy, in logs and metrics.
pub(crate) const NO_TARGET_ANSWERS: &str = "NoTargetAnswers";

/// Never ends. A change of the Egress counts at once.
pub(crate) async fn run(
    mut options: watch::Receiver<Arc<Options>>,
    conditions: Arc<Conditions>,
    metrics: Metrics,
) -> std::convert::Infallible {
    let mut health = Health::default();
    let mut known = None;
    let mut sockets = EchoSockets::unprivileged(rand::random());
    let mut is_possible = true;
    loop {
        let check = options.borrow_and_update().health.clone();
        if known != check {
            health.restart(check.as_ref());
            known.clone_from(&check);
        }
        say(&conditions, &metrics, &health, check.is_some());
        let Some(check) = check else {
            if options.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            continue;
        };
        let started = Instant::now();
        let outcome = tokio::select! {
            outcome = probe(&mut sockets, &check, started) => outcome,
            Ok(()) = options.changed() => continue,
        };
        metrics.probed(outcome);
        warn_impossible(outcome, &sockets, &mut is_possible);
        if health.observe(&check, started.elapsed(), outcome) {
            report(&check, health.is_healthy());
        }
    }
}

fn say(conditions: &Conditions, metrics: &Metrics, health: &Health, is_checked: bool) {
    conditions.set_healthy(health.is_healthy());
    metrics.health(is_checked.then_some(health.is_healthy()));
}

fn report(check: &HealthCheck, is_healthy: bool) {
    let targets: Vec<String> = check.targets.iter().map(ToString::to_string).collect();
    let targets = targets.join(" ");
    if is_healthy {
        tracing::info!(
            targets,
            "targets of spec.healthCheck answer again; this gateway takes new connections"
        );
    } else {
        tracing::warn!(
            reason = NO_TARGET_ANSWERS,
            targets,
            probes = check.threshold,
            "no target of spec.healthCheck answers; new connections go to other gateways, if one does better"
        );
    }
}

/// Says once that nothing could be probed.
fn warn_impossible(outcome: Outcome, sockets: &EchoSockets, is_possible: &mut bool) {
    let was_possible = std::mem::replace(is_possible, outcome != Outcome::Impossible);
    if outcome == Outcome::Impossible && was_possible {
        let error = sockets.refusal().map_or_else(String::new, ToString::to_string);
        tracing::warn!(
            reason = "ProbesImpossible",
            error,
            "cannot send ICMP echo requests; the node program sets net.ipv4.ping_group_range for gateway pods. Until then, nothing is known of the targets"
        );
    }
}

/// Asks all targets, and takes what has come until the next probe is due.
async fn probe(sockets: &mut EchoSockets, check: &HealthCheck, started: Instant) -> Outcome {
    let mut echo = BTreeSet::<IpAddr>::new();
    let mut connect = Vec::<SocketAddr>::new();
    for target in &check.targets {
        match target {
            Target::Echo(address) => drop(echo.insert(*address)),
            Target::Connect(address) => connect.push(*address),
        }
    }
    // Replies that came late are answers, too.
    let late = sockets.exchange(&echo);
    let is_refused = sockets.refusal().is_some();
    let limit = connect_timeout(check);
    let attempts = connect.iter().map(|address| async move {
        let attempt: Result<io::Result<TcpStream>, _> = timeout(limit, TcpStream::connect(address)).await;
        attempt.is_ok_and(|connected| connected.is_ok())
    });
    let connected = join_all(attempts).await.contains(&true);
    sleep_until(next(started.into_std(), check).into()).await;
    let replied = sockets.exchange(&BTreeSet::new());
    // Of targets that are none any more.
    let is_target = |address: &IpAddr| echo.contains(address);
    if connected || late.iter().chain(&replied).any(is_target) {
        Outcome::Answered
    } else if is_refused && connect.is_empty() {
        Outcome::Impossible
    } else {
        Outcome::Silent
    }
}
