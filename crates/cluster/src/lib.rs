//! What every long-running Fairlead program needs of Kubernetes and gives to its kubelet.
//!
//! * [`caches`]: objects as last seen, with a signal for every change. The API server's absence stops nothing.
//! * [`http`]: `/healthz`, `/readyz` and `/metrics`.
//! * [`pods`]: pods reduced to what addresses need.
//! * [`requests`]: how often the API server is asked, and for what.
//!
//! It decides nothing; the node program and the controller do. Objects come from the API server's watches and go to
//! whoever holds the cache.

pub mod caches;
pub mod http;
pub mod lean;
pub mod pods;
pub mod requests;
