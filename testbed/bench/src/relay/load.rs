//! Load for `fairlead relay`, by Fairlead's own client.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use fairlead_keys::PrivateKey;
use fairlead_relay::client::{Endpoint, LinkQueue, LinkStatus, Settings, keep_connected, trust};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::sync::watch;
use tokio::time::timeout;

use super::flow::{self, Arrivals, Pair};
use super::subject::TOKEN;
use super::udp;

/// Clients that connect at once.
const CONNECTING: usize = 32;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Follows the orders on standard input until it ends: see [`flow`].
pub(crate) fn run(address: &str, pairs: usize, is_udp: bool) -> Result<()> {
    tokio::runtime::Runtime::new().context("cannot start a runtime")?.block_on(serve(address, pairs, is_udp))
}

async fn serve(address: &str, pairs: usize, is_udp: bool) -> Result<()> {
    let path = std::env::var("SSL_CERT_FILE").context("SSL_CERT_FILE is not set")?;
    let bundle = std::fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    let roots = Arc::new(trust(&bundle)?);
    let endpoint: Endpoint = format!("tcp://{address}").parse()?;
    let settings = |number: u64| {
        let mut key = [0x40; 32];
        key.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, part)| *byte = part);
        Settings {
            endpoint: endpoint.clone(),
            server_name: None,
            proxy: None,
            roots: Arc::clone(&roots),
            private_key: PrivateKey(key),
            instance: number.to_le_bytes(),
            token: TOKEN.into(),
            mark: 0,
            nat64: None,
        }
    };
    // The lowest bits of a private key do not count.
    let connect = |number: u64| {
        let (sender, receiver) = (settings(number << 8), settings(number << 8 | 1 << 7));
        async move {
            match is_udp {
                true => udp::connect_pair(sender, receiver).await,
                false => connect_pair(sender, receiver).await,
            }
        }
    };
    let numbers = stream::iter(0..u64::try_from(pairs)?);
    let pairs: Vec<Pair> = numbers.map(connect).buffer_unordered(CONNECTING).try_collect().await?;
    let mut lines = std::io::stdin().lines();
    flow::follow(pairs, || lines.next()?.ok()).await
}

async fn connect_pair(sender: Settings, receiver: Settings) -> Result<Pair> {
    let arrivals = Arc::new(Arrivals::default());
    let destination = receiver.private_key.public_key();
    let taken = Arc::clone(&arrivals);
    connect(receiver, Arc::new(move |_, packet: &[u8]| taken.receive(packet))).await?;
    let queue = connect(sender, Arc::new(|_, _: &[u8]| {})).await?;
    let send = move |packet: &[u8]| queue.send(&destination, false, packet);
    Ok(Pair { send: Box::new(send), arrivals })
}

/// A client that stays connected until the program ends.
pub(super) async fn connect(
    settings: Settings,
    receive: Arc<fairlead_relay::client::Receive>,
) -> Result<LinkQueue> {
    let queue = LinkQueue::default();
    let (status, mut changes) = watch::channel(LinkStatus::default());
    tokio::spawn(keep_connected(settings, queue.clone(), receive, status));
    let up = timeout(CONNECT_TIMEOUT, changes.wait_for(|status| status.is_up)).await;
    up.context("the relay does not answer")?.context("the client ended")?;
    Ok(queue)
}
