//! Refusals of gateways.

/// Longest reason and message of a refusal that are kept: a gateway writes them.
const MAX_REASON: usize = 64;
const MAX_MESSAGE: usize = 512;

/// Reason why a gateway does not take a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Reason as one CamelCase word, at most 64 characters; `Refused` if the gateway gives none.
    pub(crate) reason: String,
    /// Message for an operator: what can be done about it, at most 512 characters.
    pub(crate) message: String,
}

impl Refusal {
    /// Refusal in the words of a gateway, without characters that could confuse a log.
    pub(super) fn new(reason: &str, message: &str) -> Self {
        let reason: String = reason.chars().filter(char::is_ascii_alphanumeric).take(MAX_REASON).collect();
        let reason = if reason.is_empty() { "Refused".to_owned() } else { reason };
        let message = message.chars().filter(|it| !it.is_control()).take(MAX_MESSAGE).collect();
        Self { reason, message }
    }
}
