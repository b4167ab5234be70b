//! Metrics of CNI operations.

use std::time::Duration;

use fairlead_cluster::metrics::{register, register_with_unit, result};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::metrics::LATENCY_BUCKETS;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    verb: &'static str,
    result: &'static str,
}

/// As Go's `go-grpc-prometheus` has them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GrpcCall {
    grpc_type: &'static str,
    grpc_service: &'static str,
    grpc_method: &'static str,
    grpc_code: String,
}

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub struct CniMetrics {
    requests: Family<Operation, Counter>,
    add_seconds: Histogram,
    del_seconds: Histogram,
    grpc_calls: Family<GrpcCall, Counter>,
}

impl CniMetrics {
    /// Declares them in `all`.
    pub fn register(all: &mut Registry) -> Self {
        // As Coil's coild has them.
        let grpc = all.sub_registry_with_prefix("grpc_server");
        let grpc_calls = register(grpc, "handled", "RPCs completed, by method and code", Family::default());
        let ours = all.sub_registry_with_prefix("fairlead_cni");
        let mut duration =
            |name, help| register_with_unit(ours, name, help, Unit::Seconds, Histogram::new(LATENCY_BUCKETS));
        Self {
            add_seconds: duration("add_duration", "Time one ADD took"),
            del_seconds: duration("del_duration", "Time one DEL took"),
            requests: register(ours, "requests", "CNI operations served, by result", Family::default()),
            grpc_calls,
        }
    }

    /// A CNI operation ended.
    pub fn operation(&self, verb: &'static str, took: Duration, ok: bool) {
        self.requests.get_or_create(&Operation { verb, result: result(ok) }).inc();
        match verb {
            "ADD" => self.add_seconds.observe(took.as_secs_f64()),
            "DEL" => self.del_seconds.observe(took.as_secs_f64()),
            _ => {}
        }
    }

    /// A call of Coil's gRPC service was answered. Codes are named as Go names them (`google.golang.org/grpc/codes`).
    pub fn grpc_call(&self, verb: &str, code: tonic::Code) {
        let grpc_method = match verb {
            "ADD" => "Add",
            "DEL" => "Del",
            _ => "Check",
        };
        let grpc_code = match code {
            tonic::Code::Ok => "OK".to_owned(),
            tonic::Code::Cancelled => "Canceled".to_owned(),
            other => format!("{other:?}"),
        };
        let call = GrpcCall { grpc_type: "unary", grpc_service: "pkg.cnirpc.CNI", grpc_method, grpc_code };
        self.grpc_calls.get_or_create(&call).inc();
    }
}
