//! The socket itself: one thread, a few connections, bounded requests.

use std::fs::{self, DirBuilder};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::Type;

use super::request::{Request, parse};
use super::response::{describe, outcome};
use crate::Error;
use crate::pump::Handle;
use crate::unix;

/// Clients at once; others wait in the backlog.
const MAX_CONNECTIONS: usize = 8;
/// A `setconf` of several thousand peers.
const MAX_REQUEST_LENGTH: usize = 2 << 20;
/// A client that sends nothing, or does not read its answer, is disconnected after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The running control socket. Dropping it ends its thread and removes the socket.
pub(crate) struct Server {
    stop: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Opens `NAME.sock` in `directory` and serves it.
    pub(crate) fn start(directory: &Path, handle: Handle) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let path = directory.join(format!("{}.sock", handle.name()));
        let listener = UnixListener::from(OwnedFd::from(unix::listen(&path, Type::STREAM)?));
        let (stop, stopped) = UnixStream::pair()?;
        let service = Service { path, listener, stopped, handle, connections: Vec::new() };
        let thread = thread::Builder::new()
            .name("wg-control".to_owned())
            .stack_size(256 << 10)
            .spawn(move || service.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.write(&[0]);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Connection {
    stream: UnixStream,
    received: Vec<u8>,
    last_read: Instant,
}

struct Service {
    path: PathBuf,
    listener: UnixListener,
    stopped: UnixStream,
    handle: Handle,
    connections: Vec<Connection>,
}

impl Service {
    fn run(mut self) {
        while let Some(ready) = self.wait() {
            let mut index = 0;
            let now = Instant::now();
            let handle = &self.handle;
            self.connections.retain_mut(|connection| {
                let is_ready = ready.get(index).copied().unwrap_or_default();
                index += 1;
                if is_ready {
                    return serve(connection, handle, now).unwrap_or(false);
                }
                now.saturating_duration_since(connection.last_read) < IDLE_TIMEOUT
            });
            self.accept(now);
        }
        // Here, because the thread that drops the device may be in another mount namespace.
        let _ = fs::remove_file(&self.path);
    }

    /// Waits for new connections and for data. The result says of each connection whether there is something to read; `None` to end.
    fn wait(&self) -> Option<Vec<bool>> {
        let new =
            if self.connections.len() < MAX_CONNECTIONS { PollFlags::POLLIN } else { PollFlags::empty() };
        let mut descriptors = vec![
            PollFd::new(self.stopped.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.listener.as_fd(), new),
        ];
        let streams = self.connections.iter().map(|connection| connection.stream.as_fd());
        descriptors.extend(streams.map(|stream| PollFd::new(stream, PollFlags::POLLIN)));
        let timeout =
            if self.connections.is_empty() { PollTimeout::NONE } else { PollTimeout::from(1_000_u16) };
        match poll(&mut descriptors, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => {
                tracing::error!(interface = self.handle.name(), %errno, "the WireGuard control socket ends");
                return None;
            }
        }
        let mut ready = descriptors.iter().map(|found| found.any().unwrap_or_default());
        if ready.next().unwrap_or_default() {
            return None;
        }
        Some(ready.skip(1).collect())
    }

    fn accept(&mut self, now: Instant) {
        while self.connections.len() < MAX_CONNECTIONS {
            let Ok((stream, _)) = self.listener.accept() else { return };
            let prepared = stream
                .set_read_timeout(Some(IDLE_TIMEOUT))
                .and_then(|()| stream.set_write_timeout(Some(IDLE_TIMEOUT)));
            if prepared.is_ok() {
                self.connections.push(Connection { stream, received: Vec::new(), last_read: now });
            }
        }
    }
}

/// Reads what is there and answers complete requests; false when the connection is over.
fn serve(connection: &mut Connection, handle: &Handle, now: Instant) -> io::Result<bool> {
    let mut buffer = [0; 4096];
    let length = connection.stream.read(&mut buffer)?;
    if length == 0 {
        return Ok(false);
    }
    connection.last_read = now;
    connection.received.extend_from_slice(buffer.get(..length).unwrap_or_default());
    while let Some(request) = take_request(&mut connection.received) {
        let answer = answer(&request, handle);
        connection.stream.write_all(answer.as_bytes())?;
    }
    Ok(connection.received.len() <= MAX_REQUEST_LENGTH)
}

/// Removes the first request, which ends with an empty line.
fn take_request(received: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = received.windows(2).position(|pair| pair == b"\n\n")?;
    let rest = received.split_off(end.saturating_add(2));
    Some(std::mem::replace(received, rest))
}

fn answer(request: &[u8], handle: &Handle) -> String {
    let parsed = str::from_utf8(request).map_err(|error| error.to_string());
    let parsed =
        parsed.and_then(|text| parse(text.trim_end_matches('\n')).map_err(|error| error.to_string()));
    let result = match parsed {
        Ok(Request::Get) => {
            return handle.state().map_or_else(|error| refuse(&error), |state| describe(&state));
        }
        Ok(Request::Set(set)) => handle.state().and_then(|state| handle.change(set.change(&state))),
        Err(error) => {
            tracing::debug!(interface = handle.name(), error, "control request refused");
            return outcome(Errno::EINVAL as i32);
        }
    };
    result.map_or_else(|error| refuse(&error), |()| outcome(0))
}

/// The protocol has only a number for the error; the message goes to the log.
fn refuse(error: &Error) -> String {
    tracing::warn!(%error, "control request failed");
    let errno = match error {
        Error::OwnKey(_) | Error::NoPrivateKey => Errno::EINVAL as i32,
        Error::Listen { source, .. } | Error::Mark { source, .. } | Error::Interface { source, .. } => {
            source.raw_os_error().unwrap_or(Errno::EIO as i32)
        }
        Error::InterfaceName(_)
        | Error::Mtu { .. }
        | Error::OpenTun(_)
        | Error::AttachTun { .. }
        | Error::Handover { .. }
        | Error::Spawn(_)
        | Error::Stopped(_) => Errno::EIO as i32,
    };
    outcome(errno)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_are_cut_at_empty_lines(chunks in prop::collection::vec("[a-z=\n]{0,10}", 0..10)) {
            let mut received = chunks.concat().into_bytes();
            let whole = received.clone();
            let mut taken = Vec::new();
            while let Some(request) = take_request(&mut received) {
                prop_assert!(request.ends_with(b"\n\n"));
                taken.extend(request);
            }
            taken.extend(&received);
            prop_assert_eq!(taken, whole);
        }
    }
}
