//! The error that the runtime gets: the error object of the CNI specification.

use std::error::Error;

use fairlead_wire::cni;
use serde::Serialize;

use crate::version::{SpecVersion, to_json};

/// Error codes. Below 100 they are the specification's, from 100 on ours.
pub mod code {
    /// `cniVersion` is a version that is not supported.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// The container does not exist, so that nothing is left to be removed.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// An environment variable is missing or invalid.
    pub const ENVIRONMENT: u32 = 4;
    /// Standard input or output failed.
    pub const IO: u32 = 5;
    /// Content cannot be decoded: not JSON, or of another shape.
    pub const DECODING: u32 = 6;
    /// The network configuration is invalid.
    pub const NETWORK_CONFIG: u32 = 7;
    /// `CNI_NETNS` is the plugin's own network namespace.
    pub const NETWORK_NAMESPACE: u32 = 8;
    /// The node program does not answer, or is busy; the same call may succeed later.
    pub const TRY_AGAIN_LATER: u32 = 11;
    /// STATUS: the plugin cannot serve ADD now.
    pub const NOT_AVAILABLE: u32 = 50;
    /// Everything else.
    pub const INTERNAL: u32 = 999;
}

/// The error object of a failed call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{msg}")]
pub struct Failure {
    /// One of [`code`], or the node program's.
    pub code: u32,
    /// Operation that failed, with its object.
    pub msg: String,
    /// Advice for the user; may be empty.
    pub details: String,
    /// `cniVersion` of the error.
    pub version: SpecVersion,
}

impl Failure {
    /// An error in the newest version; [`Failure::in_version`] once the configuration's is known.
    pub fn new(code: u32, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: details.into(), version: SpecVersion::NEWEST }
    }

    /// The same error in the version that the configuration requests.
    pub fn in_version(self, version: SpecVersion) -> Self {
        Self { version, ..self }
    }

    /// The error object.
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct ErrorObject<'a> {
            cni_version: &'static str,
            code: u32,
            msg: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            details: &'a str,
        }
        to_json(&ErrorObject {
            cni_version: self.version.as_str(),
            code: self.code,
            msg: &self.msg,
            details: &self.details,
        })
    }

    /// The node program cannot be reached at `socket`.
    pub fn unreachable(socket: &str, reason: &str) -> Self {
        Self::new(
            code::TRY_AGAIN_LATER,
            format!("the node program does not answer on {socket}: {reason}"),
            format!(
                "check that `fairlead node` runs on this node and listens on {socket} (its flag --socket), and that \
                 \"socket\" in the network configuration names the same path"
            ),
        )
    }

    /// The error in a gRPC status of the node program, or of the connection to it.
    ///
    /// A CNI error in the status details is passed on unchanged. Without one, a broken connection, a timeout and
    /// `UNAVAILABLE` become code 11, so that the runtime tries again; anything else is internal.
    pub fn of_status(status: &tonic::Status, socket: &str) -> Self {
        if let Some(error) = cni::error_of(status) {
            return Self::of_error(error, status);
        }
        // Only a status made on this side has a source: no answer was received.
        let broken = status.source().map(reasons);
        let reason = broken.as_deref().unwrap_or(status.message());
        match status.code() {
            tonic::Code::Unavailable => Self::unreachable(socket, reason),
            _ if broken.is_some() => Self::unreachable(socket, reason),
            tonic::Code::DeadlineExceeded => Self::unreachable(socket, "the deadline has passed"),
            other => Self::new(
                code::INTERNAL,
                format!("the node program on {socket} returned an error: {reason}"),
                format!("gRPC status {other:?} ({other}); see the log of `fairlead node` on this node"),
            ),
        }
    }

    fn of_error(error: cni::CniError, status: &tonic::Status) -> Self {
        // Some runtimes would take code 0 for success.
        let code = u32::try_from(error.code).ok().filter(|code| *code != 0).unwrap_or(code::INTERNAL);
        let msg = if error.msg.is_empty() { status.message().to_owned() } else { error.msg };
        Self::new(code, msg, error.details)
    }
}

/// An error and all its causes in one line, without repetitions.
pub fn reasons(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use fairlead_wire::cni::CniError;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tonic::{Code, Status};

    use super::*;

    fn carried(code: i32, msg: &str, details: &str) -> Failure {
        let error = CniError { code, msg: msg.into(), details: details.into() };
        Failure::of_status(&cni::status_with_error(Code::Internal, error), "/s")
    }

    #[test]
    fn the_error_object_has_the_names_of_the_specification() {
        let failure = Failure::new(7, "no \"name\"", "add one").in_version(SpecVersion::V0_4_0);
        let object: Value = serde_json::from_str(&failure.to_json()).unwrap();
        assert_eq!(
            object,
            json!({"cniVersion": "0.4.0", "code": 7, "msg": "no \"name\"", "details": "add one"})
        );
        let object: Value = serde_json::from_str(&Failure::new(5, "m", "").to_json()).unwrap();
        assert_eq!(object, json!({"cniVersion": "1.1.0", "code": 5, "msg": "m"}));
    }

    #[test]
    fn a_cni_error_is_passed_on() {
        assert_eq!(carried(11, "no block", "pool x"), Failure::new(11, "no block", "pool x"));
        assert_eq!(carried(3, "gone", ""), Failure::new(3, "gone", ""));
        assert_eq!(carried(150, "own", ""), Failure::new(150, "own", ""), "unknown codes are kept");
    }

    #[test]
    fn an_invalid_code_becomes_internal() {
        for code in [0, -1, i32::MIN] {
            assert_eq!(carried(code, "m", "d"), Failure::new(code::INTERNAL, "m", "d"));
        }
    }

    #[test]
    fn without_a_cni_error_the_grpc_code_decides() {
        let cases = [
            (Code::Unavailable, code::TRY_AGAIN_LATER),
            (Code::DeadlineExceeded, code::TRY_AGAIN_LATER),
            (Code::Internal, code::INTERNAL),
            (Code::Unimplemented, code::INTERNAL),
            (Code::Unknown, code::INTERNAL),
        ];
        for (grpc, expected) in cases {
            let failure = Failure::of_status(&Status::new(grpc, "because"), "/run/x.sock");
            assert_eq!(failure.code, expected, "{grpc:?}");
            assert!(failure.msg.contains("/run/x.sock"), "{}", failure.msg);
        }
    }

    #[test]
    fn a_broken_connection_means_try_again_later() {
        let status = Status::from_error(Box::new(std::io::Error::other("reset")));
        let failure = Failure::of_status(&status, "/s");
        assert_eq!(failure.code, code::TRY_AGAIN_LATER);
        assert!(failure.msg.ends_with("reset"), "{}", failure.msg);
    }

    proptest! {
        #[test]
        fn any_status_becomes_an_error_object(grpc in 0..20i32, message: String, details: Vec<u8>) {
            let status = Status::with_details(Code::from(grpc), message, details.into());
            let object: Value = serde_json::from_str(&Failure::of_status(&status, "/s").to_json()).unwrap();
            prop_assert!(object["code"].as_u64().is_some_and(|code| code > 0));
        }
    }
}
