//! The task of one gateway: connects, and does what its session says.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use fairlead_egress::registration::{PublicKeyHash, audience};
use fairlead_limits::{Rate, TokenBucket, part};
use fairlead_wire::egress::registration_client::RegistrationClient;
use fairlead_wire::egress::{RegisterRequest, RegisterResponse};
use futures::{StreamExt as _, TryFutureExt as _, TryStreamExt as _, stream};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant as Time, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use super::link::{self, Link};
use super::refusal::Refusal;
use super::registrations::Registrations;
use super::registry::{Gateway, GatewayId, Poll};
use super::session::{Ended, Heard, Step, Token};

/// Longest answer: the refusals of all pods of a node.
const MAX_ANSWER: usize = 1 << 20;
/// Most answers in a second that are read; more wait at the gateway.
const ANSWERS: Rate = Rate::per_second(100, 100);
/// Longest message of a gateway in logs, and longest UID.
const MAX_STATUS: usize = 256;
const MAX_UID: usize = 64;

/// Ends when the gateway is gone, or has no clients of this node.
pub(super) async fn run(shared: Arc<Registrations>, id: GatewayId) {
    let Some(wake) = shared.registry().gateway(&id).map(|gateway| gateway.wake()) else { return };
    loop {
        let now = Instant::now();
        let step = match shared.registry().poll(&id, now) {
            Poll::Gone => return,
            Poll::Step(step) => step,
        };
        match step {
            Step::Wait(until) => wait(&wake, until).await,
            Step::Connect => {
                let ended = connection(&shared, &id, &wake).await.err().unwrap_or(Ended::NoClients);
                shared.closed(&id, ended);
            }
            // Only while there is a connection.
            Step::Close(ended) => shared.closed(&id, ended),
            Step::RenewToken | Step::Send(_) => shared.closed(&id, Ended::NoAnswer),
        }
    }
}

async fn wait(wake: &Notify, until: Option<Instant>) {
    tokio::select! {
        () = wake.notified() => {}
        () = reached(until) => {}
    }
}

async fn reached(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(Time::from_std(until)).await,
        None => pending().await,
    }
}

/// One connection, from its beginning to its end. `Ok`: the gateway is gone.
async fn connection(shared: &Registrations, id: &GatewayId, wake: &Notify) -> Result<(), Ended> {
    let addresses = shared.registry().gateway(id).map(|gateway| gateway.endpoint.addresses);
    let Some(addresses) = addresses else { return Ok(()) };
    let linked = timeout(link::CONNECT, link::connect(addresses, shared.port)).await;
    let Link { channel, key } = linked.unwrap_or(Err(Ended::NoAnswer))?;
    let known = shared.registry().gateway(id).and_then(|gateway| gateway.session.token(&key, Instant::now()));
    let token = match known {
        Some(token) => token,
        None => shared.token(id, key).await?,
    };
    shared.registry().opened(id, token, Instant::now());
    let (sender, receiver) = mpsc::channel(1);
    let mut client = RegistrationClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let opening = client.register(ReceiverStream::new(receiver)).map_ok(tonic::Response::into_inner);
    let mut answers = pin!(stream::once(opening).try_flatten());
    let mut renewal = None;
    let mut pace = TokenBucket::full(ANSWERS, Instant::now());
    loop {
        let until = match shared.next(id, &sender)? {
            Next::Gone => return Ok(()),
            Next::Again => continue,
            Next::RenewToken => {
                renewal = Some(Box::pin(shared.token(id, key)));
                continue;
            }
            Next::Wait(until) => until,
        };
        tokio::select! {
            answer = answers.next() => {
                shared.answered(id, answer)?;
                sleep(pace.charge(Instant::now(), 1)).await;
            }
            token = async { match &mut renewal { Some(renewal) => renewal.await, None => pending().await } } => {
                renewal = None;
                shared.renewed(id, token);
            }
            () = wait(wake, until) => {}
        }
    }
}

/// Next action on a connection.
enum Next {
    /// Ask again.
    Again,
    Gone,
    RenewToken,
    Wait(Option<Instant>),
}

impl Registrations {
    /// Sends what is to be sent. The gateway has answered the message before, so there is room for one.
    fn next(&self, id: &GatewayId, sender: &mpsc::Sender<RegisterRequest>) -> Result<Next, Ended> {
        match self.registry().poll(id, Instant::now()) {
            Poll::Gone => Ok(Next::Gone),
            Poll::Step(Step::Close(ended)) => Err(ended),
            // Another connection cannot be asked for while there is this one.
            Poll::Step(Step::Connect) => Err(Ended::NoAnswer),
            Poll::Step(Step::RenewToken) => Ok(Next::RenewToken),
            Poll::Step(Step::Send(message)) => {
                sender.try_send(message).map(|()| Next::Again).map_err(|_| Ended::ByGateway)
            }
            Poll::Step(Step::Wait(until)) => Ok(Next::Wait(until)),
        }
    }

    async fn token(&self, id: &GatewayId, key: PublicKeyHash) -> Result<Token, Ended> {
        let issued = (self.request_token)(audience(&id.egress, &key)).await;
        self.metrics.requested_token(issued.is_ok());
        let issued = issued.map_err(|error| Ended::Token(error.to_string()))?;
        // At 80 % of its lifetime, or up to a tenth earlier: not all nodes at once.
        let usual = issued.lifetime.saturating_mul(4) / 5;
        let renew_after = usual.saturating_sub(part(issued.lifetime / 10, rand::random()));
        let now = Instant::now();
        let renew_at = now.checked_add(renew_after).unwrap_or(now);
        Ok(Token { text: issued.token, key, renew_at })
    }

    fn renewed(&self, id: &GatewayId, token: Result<Token, Ended>) {
        if let Err(error) = &token {
            tracing::warn!(egress = %id.egress, gateway = id.uid, %error, "cannot renew the token for an egress gateway");
        }
        self.registry().renewed(id, token.ok(), Instant::now(), rand::random());
    }

    fn answered(
        &self,
        id: &GatewayId,
        answer: Option<Result<RegisterResponse, Status>>,
    ) -> Result<(), Ended> {
        let answer = answer.ok_or(Ended::ByGateway)?.map_err(|status| ended(&status))?;
        let was_synced = self.is_synced(id);
        let first = answer.refused.first().map(|it| (uid(&it.uid), Refusal::new(&it.reason, &it.message)));
        let heard = self.registry().received(id, answer, Instant::now(), rand::random())?;
        let Heard { changed, confirmed, refused, held } = heard;
        // Only what gateways on this node hold is announced here.
        if held && self.registry().is_local(id) {
            self.holds.send_replace(());
        }
        self.metrics.registered(confirmed, refused);
        if let Some((pod, Refusal { reason, message })) = first.filter(|_| changed && refused > 0) {
            tracing::warn!(egress = %id.egress, gateway = id.uid, pods = refused, pod, reason, explanation = message, "the egress gateway refuses pods of this node");
        }
        let is_synced = self.is_synced(id);
        if is_synced && !was_synced {
            self.metrics.connected(true);
            tracing::info!(egress = %id.egress, gateway = id.uid, pods = confirmed, "registered at an egress gateway");
        }
        self.changed(changed || is_synced != was_synced);
        Ok(())
    }

    fn is_synced(&self, id: &GatewayId) -> bool {
        self.registry().gateway(id).is_some_and(|gateway| gateway.session.is_synced())
    }

    fn closed(&self, id: &GatewayId, ended: Ended) {
        let is_failure = ended != Ended::NoClients;
        let news = self.registry().closed(id, ended, Instant::now(), rand::random());
        // One of Coil's is tried again now and then.
        let is_coils = |gateway: &Gateway| gateway.session.does_not_register();
        if is_failure && !self.registry().gateway(id).is_some_and(is_coils) {
            self.metrics.connected(false);
        }
        match &news {
            Some(failure @ Ended::Refused(_)) => {
                tracing::info!(egress = %id.egress, gateway = id.uid, %failure, "not registered at an egress gateway");
            }
            Some(failure) => {
                tracing::warn!(egress = %id.egress, gateway = id.uid, %failure, "not registered at an egress gateway");
            }
            None => {}
        }
        self.changed(news.is_some());
        self.tasks.notify_one();
    }
}

/// A UID as it may be logged: a gateway says it.
fn uid(text: &str) -> String {
    text.chars().filter(|it| it.is_ascii_alphanumeric() || *it == '-').take(MAX_UID).collect()
}

fn ended(status: &Status) -> Ended {
    let message = status.message().chars().filter(|it| !it.is_control()).take(MAX_STATUS);
    let text = format!("{:?}: {}", status.code(), message.collect::<String>());
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => Ended::Rejected(text),
        _ => Ended::Status(text),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_flood_of_answers_is_read_slowly() {
        const SECOND: Duration = Duration::from_secs(1);
        let start = Instant::now();
        let (mut pace, mut now) = (TokenBucket::full(ANSWERS, start), start);
        for _ in 0..1000 {
            now += pace.charge(now, 1);
        }
        assert!(now - start >= 9 * SECOND && now - start <= 10 * SECOND, "{:?}", now - start);
        assert_eq!(pace.charge(now + SECOND, 1), Duration::ZERO);
    }
}
