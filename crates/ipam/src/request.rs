//! One BlockRequest, call by call: [`RequestFlow`] says which call of the API server comes next.

use crate::grant::RefusalReason;
use crate::state::RequestFailure;

/// A call of the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestCall {
    /// Wait until the request is answered or gone.
    AwaitAnswer,
    /// Create the request.
    Create,
    /// Delete the request of last time.
    Delete,
    /// Read the request that is there.
    Read,
    /// Read the granted block. This is the last call.
    ReadBlock {
        /// Its name.
        block: String,
        /// UID of the answered request: the block has it in its label, a later one of its name has another.
        request_uid: String,
    },
}

/// The result of a call. Errors other than these end the flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestReply {
    /// The request could not be created: there is one of its name.
    AlreadyExists,
    /// The request is deleted, or there was none.
    Deleted,
    /// The request as it was created, read or answered.
    Present(RequestOutcome),
    /// There is no such request.
    Absent,
}

/// What the status of a request says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestOutcome {
    /// A block was granted.
    Granted {
        /// Its name.
        block: String,
        /// UID of the request.
        request_uid: String,
    },
    /// There is no answer yet.
    Pending,
    /// No block was granted.
    Refused(RequestFailure),
}

impl RequestOutcome {
    /// A refusal by the condition that the controller wrote.
    pub fn refused(reason: &str, message: &str) -> Self {
        let reason = RefusalReason::from_condition(reason);
        Self::Refused(RequestFailure { reason, message: message.to_owned() })
    }
}

/// Why a flow ended without a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestEnd {
    /// The controller refused.
    Refused(RequestFailure),
    /// The request was deleted before it was answered, or another one is made again and again.
    Unanswered,
}

/// The state of one request. An answered request of last time is replaced; an unanswered one, made before a restart of the
/// node program, is used.
#[derive(Debug, Clone)]
pub struct RequestFlow {
    call: RequestCall,
    /// Whether an existing request was read already.
    read: bool,
}

impl RequestFlow {
    /// Begins. `replaces_answered` says that there is an answered request, so that it need not be read.
    pub fn new(replaces_answered: bool) -> Self {
        Self { call: if replaces_answered { RequestCall::Delete } else { RequestCall::Create }, read: false }
    }

    /// The call to make.
    pub fn call(&self) -> &RequestCall {
        &self.call
    }

    /// Goes on to the next call.
    ///
    /// # Errors
    /// There will be no block.
    pub fn advance(&mut self, reply: RequestReply) -> Result<(), RequestEnd> {
        let answers = self.call == RequestCall::AwaitAnswer;
        self.call = match reply {
            RequestReply::AlreadyExists if self.read => return Err(RequestEnd::Unanswered),
            RequestReply::AlreadyExists => RequestCall::Read,
            RequestReply::Absent if answers => return Err(RequestEnd::Unanswered),
            RequestReply::Absent | RequestReply::Deleted => RequestCall::Create,
            RequestReply::Present(RequestOutcome::Pending) => RequestCall::AwaitAnswer,
            RequestReply::Present(_) if !answers => RequestCall::Delete,
            RequestReply::Present(RequestOutcome::Refused(failure)) => {
                return Err(RequestEnd::Refused(failure));
            }
            RequestReply::Present(RequestOutcome::Granted { block, request_uid }) => {
                RequestCall::ReadBlock { block, request_uid }
            }
        };
        self.read |= self.call == RequestCall::Read;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted() -> RequestReply {
        RequestReply::Present(RequestOutcome::Granted { block: "a-0".into(), request_uid: "u".into() })
    }

    fn pending() -> RequestReply {
        RequestReply::Present(RequestOutcome::Pending)
    }

    /// The calls that follow the first one.
    fn calls(replaces_answered: bool, replies: Vec<RequestReply>) -> Vec<RequestCall> {
        let mut flow = RequestFlow::new(replaces_answered);
        let mut next = |reply| flow.advance(reply).map(|()| flow.call().clone()).unwrap();
        replies.into_iter().map(&mut next).collect()
    }

    #[test]
    fn a_new_request_is_created_awaited_and_its_block_read() {
        let block = RequestCall::ReadBlock { block: "a-0".into(), request_uid: "u".into() };
        let calls = calls(false, vec![pending(), granted()]);
        assert_eq!(calls, [RequestCall::AwaitAnswer, block]);
    }

    #[test]
    fn an_answered_request_is_replaced_and_an_unanswered_one_is_used() {
        use RequestCall::{AwaitAnswer, Create, Delete, Read};
        use RequestReply::{Absent, AlreadyExists, Deleted};
        assert_eq!(calls(true, vec![Deleted, pending()]), [Create, AwaitAnswer]);
        let replaced = calls(false, vec![AlreadyExists, granted(), Deleted, pending()]);
        assert_eq!(replaced, [Read, Delete, Create, AwaitAnswer]);
        assert_eq!(calls(false, vec![AlreadyExists, pending()]), [Read, AwaitAnswer]);
        assert_eq!(calls(false, vec![AlreadyExists, Absent]), [Read, Create]);
    }

    #[test]
    fn a_request_that_is_refused_deleted_or_always_there_ends_without_a_block() {
        let refused = RequestOutcome::refused("out of blocks", "none left");
        let failure =
            RequestFailure { reason: Some(RefusalReason::PoolExhausted), message: "none left".to_owned() };
        for (replies, end) in [
            (vec![pending(), RequestReply::Present(refused)], RequestEnd::Refused(failure)),
            (vec![pending(), RequestReply::Absent], RequestEnd::Unanswered),
            (
                vec![RequestReply::AlreadyExists, RequestReply::Absent, RequestReply::AlreadyExists],
                RequestEnd::Unanswered,
            ),
        ] {
            let mut flow = RequestFlow::new(false);
            let ends: Vec<_> = replies.into_iter().filter_map(|reply| flow.advance(reply).err()).collect();
            assert_eq!(ends, [end]);
        }
    }
}
