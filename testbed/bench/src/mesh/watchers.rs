//! Watches of all members over few or many connections, and what they see.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::load::Load;
use super::streams::Connection;

/// Watches that are told all affiliates at a time.
pub(super) const OPENING: usize = 16;
const BUFFER: usize = 1 << 16;
/// Reads of one connection before another's turn.
const READS: usize = 8;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

thread_local! {
    static READ: RefCell<Vec<u8>> = RefCell::new(vec![0; BUFFER]);
}

/// Sums of all watches.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    /// Changes of an affiliate that a watch saw.
    pub(super) changes: u64,
    pub(super) messages: u64,
    pub(super) bytes: u64,
}

/// Open watches.
pub(super) struct Watchers {
    connections: Vec<Arc<Mutex<Connection>>>,
    tasks: JoinSet<Result<()>>,
}

impl Watchers {
    /// Opens all watches of a load: each has been told of all affiliates then. Times are since `start`.
    pub(super) async fn open(load: &Load, start: Instant) -> Result<Self> {
        let opening = Arc::new(Semaphore::new(OPENING));
        let mut watchers = Self { connections: Vec::new(), tasks: JoinSet::new() };
        let watches = load.clusters.saturating_mul(load.watches);
        for number in 0..load.connections {
            // Watches take turns on connections, clusters on watches of all.
            let clusters = (number..watches).step_by(load.connections.max(1));
            let clusters = clusters.map(|watch| watch / load.watches.max(1));
            let connection = Arc::new(Mutex::new(Connection::new(clusters, load.affiliates)));
            let stream = TcpStream::connect(&load.address).await;
            let stream = stream.with_context(|| format!("cannot connect to {}", load.address))?;
            stream.set_nodelay(true)?;
            watchers.connections.push(Arc::clone(&connection));
            watchers.tasks.spawn(serve(
                connection,
                stream,
                Arc::clone(&opening),
                load.address.clone(),
                start,
            ));
        }
        while !watchers.all().all(|connection| connection.is_open() && !connection.is_opening()) {
            watchers.wait().await?;
        }
        Ok(watchers)
    }

    /// A short time; an error if a watch has ended.
    pub(super) async fn wait(&mut self) -> Result<()> {
        sleep(POLL_INTERVAL).await;
        match self.tasks.try_join_next() {
            None => Ok(()),
            Some(ended) => match ended.context("the task of a connection failed")? {
                Ok(()) => bail!("a connection ended"),
                Err(error) => Err(error),
            },
        }
    }

    fn all(&self) -> impl Iterator<Item = MutexGuard<'_, Connection>> {
        self.connections.iter().map(|connection| lock(connection))
    }

    pub(super) fn record(&self, is_recording: bool) {
        self.all().for_each(|mut connection| connection.is_recording = is_recording);
    }

    /// When changes were made and seen, since it was called last.
    pub(super) fn samples(&self) -> Vec<(u64, u64)> {
        self.all().flat_map(|mut connection| std::mem::take(&mut connection.samples)).collect()
    }

    pub(super) fn sums(&self) -> Sums {
        self.all().fold(Sums::default(), |sums, connection| Sums {
            changes: sums.changes + connection.streams.iter().map(|stream| stream.changes).sum::<u64>(),
            messages: sums.messages + connection.messages,
            bytes: sums.bytes + connection.bytes,
        })
    }

    /// Changes that each watch has seen.
    pub(super) fn changes(&self) -> Vec<(usize, u64)> {
        self.streams(|stream| (stream.cluster, stream.changes))
    }

    /// Watches that have not seen a change of their cluster, by the times at which these were made.
    pub(super) fn behind(&self, made: &HashMap<usize, u64>) -> usize {
        let latest = self.streams(|stream| (stream.cluster, stream.latest));
        latest.iter().filter(|(cluster, latest)| made.get(cluster).is_some_and(|made| latest < made)).count()
    }

    fn streams<T>(&self, of: impl Fn(&super::streams::Stream) -> T) -> Vec<T> {
        self.all().flat_map(|connection| connection.streams.iter().map(&of).collect::<Vec<_>>()).collect()
    }
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the watches of a connection one after the other, and reads for as long as the server sends.
async fn serve(
    connection: Arc<Mutex<Connection>>,
    mut stream: TcpStream,
    opening: Arc<Semaphore>,
    authority: String,
    start: Instant,
) -> Result<()> {
    let mut permit = None;
    loop {
        let has_more = permit.is_none() && !lock(&connection).is_open();
        tokio::select! {
            granted = Arc::clone(&opening).acquire_owned(), if has_more => {
                lock(&connection).open_next(&authority);
                permit = Some(granted.context("no turn to open a watch")?);
            }
            ready = stream.readable() => {
                ready.context("cannot read from the server")?;
                read(&stream, &connection, start)?;
            }
        }
        let output = {
            let mut connection = lock(&connection);
            if !connection.is_opening() {
                permit = None;
            }
            std::mem::take(&mut connection.output)
        };
        stream.write_all(&output).await.context("cannot write to the server")?;
    }
}

/// Reads what there is.
fn read(stream: &TcpStream, connection: &Mutex<Connection>, start: Instant) -> Result<()> {
    READ.with_borrow_mut(|buffer| {
        for _ in 0..READS {
            let length = match stream.try_read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                length => length.context("cannot read from the server")?,
            };
            ensure!(length > 0, "the server closed a connection");
            let now = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let bytes = buffer.get(..length).context("more was read than there is room for")?;
            lock(connection).receive(bytes, now)?;
            if length < BUFFER {
                break;
            }
        }
        Ok(())
    })
}
