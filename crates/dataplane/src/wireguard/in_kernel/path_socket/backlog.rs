//! Datagrams that arrived while the way past WireGuard was tested or changed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::super::super::PathDatagram;

/// Most datagrams that wait; more are lost, as the network may lose them.
const MAX_WAITING: usize = 256;

/// Queue of datagrams with a descriptor that is readable while any wait.
pub(super) struct Backlog {
    waiting: VecDeque<PathDatagram>,
    readable: EventFd,
}

impl Backlog {
    pub(super) fn new() -> io::Result<Self> {
        let readable = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { waiting: VecDeque::new(), readable })
    }

    pub(super) fn extend(&mut self, datagrams: Vec<PathDatagram>) {
        let room = MAX_WAITING.saturating_sub(self.waiting.len());
        if !datagrams.is_empty() && self.waiting.is_empty() {
            let _ = self.readable.write(1);
        }
        self.waiting.extend(datagrams.into_iter().take(room));
    }

    pub(super) fn pop(&mut self) -> Option<PathDatagram> {
        let next = self.waiting.pop_front()?;
        if self.waiting.is_empty() {
            let _ = self.readable.read();
        }
        Some(next)
    }
}

impl AsFd for Backlog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}
