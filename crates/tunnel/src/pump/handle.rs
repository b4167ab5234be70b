//! Requests of other threads to the packet loop.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use fairlead_keys::{DeviceChange, DeviceState, PublicKey};
use ipnet::IpNet;

use crate::Error;

/// Requests that wait for the loop.
const MAX_COMMANDS: usize = 16;

/// A request to the loop, with the channel for its answer.
pub(super) enum Command {
    Accept(BTreeMap<PublicKey, Vec<IpNet>>, SyncSender<()>),
    Change(Box<DeviceChange>, SyncSender<Result<(), Error>>),
    Delete(SyncSender<Result<(), Error>>),
    SendError(PublicKey, SyncSender<Option<String>>),
    ServeHandover(PathBuf, SyncSender<Result<(), Error>>),
    State(SyncSender<DeviceState>),
    Stop,
}

/// A running packet loop.
#[derive(Clone)]
pub(crate) struct Handle {
    name: Arc<str>,
    commands: SyncSender<Command>,
    wake: Arc<UnixStream>,
}

/// The loop's end: the requests, and a descriptor that is readable when there are any.
pub(super) struct Inbox {
    pub(super) commands: Receiver<Command>,
    pub(super) woken: UnixStream,
}

impl Handle {
    /// A handle to the loop of device `name`, which has yet to be started.
    pub(super) fn new(name: &str) -> Result<(Self, Inbox), Error> {
        let (sender, commands) = sync_channel(MAX_COMMANDS);
        let (wake, woken) = UnixStream::pair().map_err(Error::Spawn)?;
        wake.set_nonblocking(true).map_err(Error::Spawn)?;
        woken.set_nonblocking(true).map_err(Error::Spawn)?;
        let handle = Self { name: name.into(), commands: sender, wake: Arc::new(wake) };
        Ok((handle, Inbox { commands, woken }))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn state(&self) -> Result<DeviceState, Error> {
        self.request(Command::State)
    }

    pub(crate) fn change(&self, change: DeviceChange) -> Result<(), Error> {
        self.request(|answer| Command::Change(Box::new(change), answer))?
    }

    pub(crate) fn accept(&self, prefixes: BTreeMap<PublicKey, Vec<IpNet>>) -> Result<(), Error> {
        self.request(|answer| Command::Accept(prefixes, answer))
    }

    pub(crate) fn send_error(&self, key: PublicKey) -> Result<Option<String>, Error> {
        self.request(|answer| Command::SendError(key, answer))
    }

    pub(crate) fn delete(&self) -> Result<(), Error> {
        self.request(Command::Delete)?
    }

    /// Listens at `path` for the process that takes over; the loop ends when that one has everything.
    pub(crate) fn serve_handover(&self, path: PathBuf) -> Result<(), Error> {
        self.request(|answer| Command::ServeHandover(path, answer))?
    }

    /// Ends the loop; it may have ended already.
    pub(crate) fn stop(&self) {
        let _ = self.send(Command::Stop);
    }

    fn request<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, Error> {
        let (sender, answer) = sync_channel(1);
        self.send(command(sender))?;
        answer.recv().map_err(|_| self.stopped())
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| self.stopped())?;
        // A full pipe already wakes the loop.
        let _ = (&*self.wake).write(&[0]);
        Ok(())
    }

    fn stopped(&self) -> Error {
        Error::Stopped(self.name.to_string())
    }
}
