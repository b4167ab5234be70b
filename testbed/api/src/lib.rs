//! The Kubernetes API for tests that have no server.
//!
//! * [`fields`]: whether a program reads every field of a custom resource, or the API says that it does not.
//! * [`server`]: an API server that is a function, behind a client.
//!
//! Not for: rights, admission and watches. A real API server is in `testbed-kube`. Everything panics instead of returning
//! errors, as a test would.
#![expect(clippy::indexing_slicing, clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

pub mod fields;
pub mod server;
