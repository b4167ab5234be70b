//! Counts and latencies of CNI operations.

use std::fmt;
use std::time::Duration;

use fairlead_cluster::metrics::{declare, register_with_unit, result};
use fairlead_wire::cni::cni_server;
use fairlead_wire::network::network_server;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::failure::Reason;
use super::grpc_metrics::{GrpcCall, GrpcMethod, GrpcMetrics};
use crate::ipam::metrics::LATENCY_BUCKETS;

/// An operation of the CNI specification that the node program serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Attach a container.
    Add,
    /// Compare an attachment with what ADD made.
    Check,
    /// Detach a container.
    Del,
    /// Remove attachments that are not valid any more.
    Gc,
    /// Could ADD succeed now?
    Status,
}

impl Operation {
    const ALL: [Self; 5] = [Self::Add, Self::Check, Self::Del, Self::Gc, Self::Status];

    /// As in `CNI_COMMAND`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
            Self::Gc => "GC",
            Self::Status => "STATUS",
        }
    }

    /// GC and STATUS are in a service of our own beside Coil's.
    fn grpc_method(self) -> GrpcMethod {
        let (grpc_service, grpc_method) = match self {
            Self::Add => (cni_server::SERVICE_NAME, "Add"),
            Self::Check => (cni_server::SERVICE_NAME, "Check"),
            Self::Del => (cni_server::SERVICE_NAME, "Del"),
            Self::Gc => (network_server::SERVICE_NAME, "Gc"),
            Self::Status => (network_server::SERVICE_NAME, "Status"),
        };
        GrpcMethod { grpc_type: "unary", grpc_service, grpc_method }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    operation: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    operation: &'static str,
    reason: &'static str,
}

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub struct CniMetrics {
    operations: Family<Outcome, Counter>,
    failures: Family<Cause, Counter>,
    add_seconds: Histogram,
    del_seconds: Histogram,
    grpc: GrpcMetrics,
}

impl CniMetrics {
    /// Declares them in `all`.
    pub fn register(all: &mut Registry) -> Self {
        let grpc = GrpcMetrics::register(all, Operation::ALL.map(Operation::grpc_method));
        let ours = all.sub_registry_with_prefix("fairlead_cni");
        let mut duration =
            |name, help| register_with_unit(ours, name, help, Unit::Seconds, Histogram::new(LATENCY_BUCKETS));
        Self {
            add_seconds: duration("add_duration", "Time one ADD took"),
            del_seconds: duration("del_duration", "Time one DEL took"),
            operations: declare(ours, "operations", "CNI operations served, by result"),
            failures: declare(ours, "failures", "CNI operations that failed, by reason"),
            grpc,
        }
    }

    /// An operation ended.
    pub fn served(&self, operation: Operation, took: Duration, failure: Option<Reason>) {
        let name = operation.as_str();
        let result = result(failure.is_none());
        self.operations.get_or_create(&Outcome { operation: name, result }).inc();
        if let Some(reason) = failure {
            self.failures.get_or_create(&Cause { operation: name, reason: reason.as_str() }).inc();
        }
        match operation {
            Operation::Add => self.add_seconds.observe(took.as_secs_f64()),
            Operation::Del => self.del_seconds.observe(took.as_secs_f64()),
            Operation::Check | Operation::Gc | Operation::Status => {}
        }
    }

    /// A call of an operation's method arrived.
    pub fn grpc_call(&self, operation: Operation) -> GrpcCall {
        self.grpc.started(operation.grpc_method())
    }
}
