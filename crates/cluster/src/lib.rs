//! Foundation of long-running Fairlead programs: watch caches, Events, metrics, health and supervised tasks.
//!
//! * [`cached_by_name!`]: what is kept instead of an object, found by the name of that.
//! * [`caches`]: objects as last seen, with a signal for every change. An unreachable API server stops nothing.
//! * [`events`]: Kubernetes Events, published without delaying the caller.
//! * [`http`]: `/healthz`, `/readyz` and `/metrics`, on servers with limits.
//! * [`local_api`]: what takes the place of the API server on a node without Kubernetes.
//! * [`metrics`]: what the metrics of all programs share.
//! * [`naming`]: names in messages for operators.
//! * [`network_policies`]: whether NetworkPolicies are enforced.
//! * [`nodes`]: Nodes reduced to addresses.
//! * [`pods`]: pods reduced to what addresses need.
//! * [`process`]: metrics of the process itself.
//! * [`requests`]: requests to the API server, counted.
//! * [`resumption`]: watches that list again after etcd was restored from a backup.
//! * [`subsystem`]: the tasks of a program by name, their health, and the order in which they stop.
//!
//! It decides nothing; the node program and the controller do. Objects come from the API server's watches and go to the
//! holders of the caches.

mod cached_by_name;
pub mod caches;
pub mod events;
pub mod http;
pub mod lean;
pub mod local_api;
pub mod metrics;
pub mod naming;
pub mod network_policies;
pub mod nodes;
pub mod pods;
pub mod process;
pub mod requests;
pub mod resumption;
pub mod subsystem;
pub mod writes;
