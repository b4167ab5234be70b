//! Errors that say what failed, on what, and what to do.

use std::error::Error as StdError;
use std::io;

use nix::libc;

/// Failure of an operation on the data path in the kernel.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused an operation on BPF programs or maps.
    #[error("cannot {what}: {reason}{}", behind(.advice))]
    Bpf {
        /// The operation and its object.
        what: String,
        /// The kernel's words, and those of its verifier.
        reason: String,
        /// Advice for the operator; may be empty.
        advice: &'static str,
        /// Positive errno, if the kernel answered with one.
        errno: Option<i32>,
    },
    /// The desired state cannot be expressed.
    #[error("cannot {what}: {reason}")]
    Invalid {
        /// The operation and its object.
        what: String,
        /// Reason why it cannot be expressed.
        reason: String,
    },
    /// The kernel refused a link or a filter.
    #[error("{source}{}", behind(.advice))]
    Netlink {
        /// The operation that failed, its object, and the kernel's answer.
        source: fairlead_netlink::Error,
        /// Advice for the operator; may be empty.
        advice: &'static str,
    },
}

/// A result of working with tunnels.
pub type Result<T> = std::result::Result<T, Error>;

fn behind(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("; {text}") }
}

/// The verifier's log can be megabytes; its last lines have the reason.
const MAX_REASON: usize = 2000;

impl Error {
    /// A failure of the loader. `without_privilege` is the advice if the kernel says that a privilege is missing.
    pub(crate) fn bpf(
        what: String,
        error: &(dyn StdError + 'static),
        without_privilege: &'static str,
    ) -> Self {
        let errno = chain(error).find_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error());
        let mut words: Vec<String> = chain(error).map(|error| tail(&error.to_string())).collect();
        // Transparent errors repeat what they contain.
        words.dedup();
        let advice = match errno {
            Some(libc::EPERM | libc::EACCES) => without_privilege,
            Some(libc::ENOSYS) => "the kernel lacks CONFIG_BPF_SYSCALL",
            _ => "",
        };
        Self::Bpf { what, reason: words.join(": "), advice, errno }
    }

    pub(crate) fn invalid(what: String, reason: impl Into<String>) -> Self {
        Self::Invalid { what, reason: reason.into() }
    }

    /// A refusal by netlink. `unsupported` is the advice if the kernel lacks the feature.
    pub(crate) fn netlink(source: fairlead_netlink::Error, unsupported: &'static str) -> Self {
        let advice = match source.errno() {
            Some(libc::EPERM) => "it needs the capability CAP_NET_ADMIN in the network namespace",
            _ if source.is_unsupported() => unsupported,
            _ => "",
        };
        Self::Netlink { source, advice }
    }

    /// The errno of a refusal.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Bpf { errno, .. } => *errno,
            Self::Invalid { .. } => None,
            Self::Netlink { source, .. } => source.errno(),
        }
    }
}

impl From<fairlead_netlink::Error> for Error {
    fn from(source: fairlead_netlink::Error) -> Self {
        Self::netlink(source, "")
    }
}

/// An error and what caused it.
fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

fn tail(text: &str) -> String {
    let characters = text.chars().count();
    text.trim().chars().skip(characters.saturating_sub(MAX_REASON)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot create the map")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_missing_privilege_is_named_with_the_operation() {
        let outer = Outer(io::Error::from_raw_os_error(libc::EPERM));
        let error = Error::bpf("load the programs".to_owned(), &outer, "it needs CAP_BPF");
        assert_eq!(
            error.to_string(),
            "cannot load the programs: cannot create the map: Operation not permitted (os error 1); it needs CAP_BPF"
        );
        assert_eq!(error.errno(), Some(libc::EPERM));
    }

    #[test]
    fn the_end_of_a_long_verifier_log_is_kept() {
        let text = format!("{}the reason", "instruction\n".repeat(10_000));
        assert!(tail(&text).ends_with("the reason"));
        assert!(tail(&text).len() <= MAX_REASON);
    }
}
