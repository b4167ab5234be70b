//! Dumps: requests for a whole table of the kernel.

use nix::libc;

use super::{Message, NLM_F_REQUEST, Reply, Socket, frame, parse_done, parse_error, take_frame};
use crate::nftables::attributes::{Parsed, explain};
use crate::{Error, Result};

/// Most attempts at a dump that changes interrupt.
const MAX_ATTEMPTS: usize = 8;
const NLM_F_DUMP: u16 = libc::NLM_F_DUMP as u16;

impl Socket {
    /// Dumps a kernel table; repeats when it changed meanwhile (`NLM_F_DUMP_INTR`).
    ///
    /// # Errors
    /// The kernel's refusal, a failure of the socket, or a table that changed during every attempt.
    pub fn dump(&mut self, message: &Message) -> Result<Vec<Reply>> {
        self.dump_each(message, Vec::new, |replies: &mut Vec<Reply>, reply| {
            replies.push(reply);
            Ok(())
        })
    }

    /// Dumps a kernel table as [`Self::dump`] does, without holding all of it: `take` gets each reply as it comes, and puts what is kept of it into what
    /// `start` makes for each attempt.
    ///
    /// # Errors
    /// As [`Self::dump`], and the first one of `take`: what comes after it is read and dropped.
    pub(crate) fn dump_each<T>(
        &mut self,
        message: &Message,
        start: impl Fn() -> T,
        take: impl Fn(&mut T, Reply) -> Parsed<()>,
    ) -> Result<T> {
        for _ in 0..MAX_ATTEMPTS {
            self.sequence = self.sequence.wrapping_add(1);
            let mut bytes = Vec::new();
            frame(&mut bytes, message, NLM_F_REQUEST | NLM_F_DUMP, self.sequence);
            self.send(&bytes)?;
            let mut taken = start();
            if self.dump_replies(&message.what, |reply| take(&mut taken, reply))? {
                return Ok(taken);
            }
        }
        Err(Error::Malformed {
            what: message.what.clone(),
            reason: format!("the table changed during each of {MAX_ATTEMPTS} dumps"),
        })
    }

    /// Reads one dump to its end. Returns whether the table stayed the same meanwhile.
    fn dump_replies(&mut self, what: &str, mut take: impl FnMut(Reply) -> Parsed<()>) -> Result<bool> {
        let mut outcome = Ok(());
        let mut interrupted = false;
        loop {
            let received = self.receive()?;
            let mut rest = self.buffer.get(..received).unwrap_or_default();
            while let Some(parsed) = take_frame(&mut rest) {
                if parsed.sequence != self.sequence {
                    continue;
                }
                interrupted |= parsed.flags & libc::NLM_F_DUMP_INTR as u16 != 0;
                match i32::from(parsed.kind) {
                    // A dump that fails midway reports it in its last message (since Linux 4.20).
                    libc::NLMSG_DONE => {
                        parse_done(&parsed, what)?;
                        return if interrupted { Ok(false) } else { explain(what, outcome).map(|()| true) };
                    }
                    libc::NLMSG_ERROR => parse_error(&parsed, what)?,
                    _ if outcome.is_ok() => {
                        outcome = take(Reply { kind: parsed.kind, payload: parsed.payload.to_vec() });
                    }
                    _ => {}
                }
            }
        }
    }
}
