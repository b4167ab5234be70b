//! Refusals of gateways.

/// Longest reason and message of a refusal that are kept: a gateway writes them.
const MAX_REASON: usize = 64;
const MAX_MESSAGE: usize = 512;

/// Reason why a gateway does not take a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// One CamelCase word.
    pub(crate) reason: String,
    /// What an operator can do about it.
    pub(crate) message: String,
}

impl Refusal {
    /// What a gateway says, without what could confuse a log.
    pub(super) fn new(reason: &str, message: &str) -> Self {
        let reason: String = reason.chars().filter(char::is_ascii_alphanumeric).take(MAX_REASON).collect();
        let reason = if reason.is_empty() { "Refused".to_owned() } else { reason };
        let message = message.chars().filter(|it| !it.is_control()).take(MAX_MESSAGE).collect();
        Self { reason, message }
    }
}
