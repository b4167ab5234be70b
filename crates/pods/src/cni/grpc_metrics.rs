//! Counts of gRPC calls, as Go's `go-grpc-prometheus` names them and Coil's coild exposes them.

use std::time::Instant;

use fairlead_cluster::metrics::{declare, register_with_unit};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tonic::Code;

use crate::ipam::metrics::LATENCY_BUCKETS;

/// A method of a gRPC service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct GrpcMethod {
    /// `unary`, or how messages stream.
    pub(super) grpc_type: &'static str,
    /// Full name of the service, with its package.
    pub(super) grpc_service: &'static str,
    /// Name of the method in the service.
    pub(super) grpc_method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Handled {
    grpc_type: &'static str,
    grpc_service: &'static str,
    grpc_method: &'static str,
    grpc_code: String,
}

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub(super) struct GrpcMetrics {
    started: Family<GrpcMethod, Counter>,
    handled: Family<Handled, Counter>,
    received: Family<GrpcMethod, Counter>,
    sent: Family<GrpcMethod, Counter>,
    seconds: Family<GrpcMethod, Histogram, fn() -> Histogram>,
}

impl GrpcMetrics {
    /// Declares them in the registry of all metrics. Each of `methods` has a value from the start, so that the first call is
    /// an increase.
    pub(super) fn register<const N: usize>(all: &mut Registry, methods: [GrpcMethod; N]) -> Self {
        let grpc = all.sub_registry_with_prefix("grpc_server");
        let seconds = Family::new_with_constructor((|| Histogram::new(LATENCY_BUCKETS)) as fn() -> Histogram);
        let metrics = Self {
            started: declare(grpc, "started", "RPCs started, by method"),
            handled: declare(grpc, "handled", "RPCs completed, by method and code"),
            received: declare(grpc, "msg_received", "Messages received, by method"),
            sent: declare(grpc, "msg_sent", "Messages sent, by method"),
            seconds: register_with_unit(
                grpc,
                "handling",
                "Time one RPC took, by method",
                Unit::Seconds,
                seconds,
            ),
        };
        for method in methods {
            drop(metrics.started.get_or_create(&method));
            drop(metrics.received.get_or_create(&method));
            drop(metrics.sent.get_or_create(&method));
            drop(metrics.seconds.get_or_create(&method));
        }
        metrics
    }

    /// A unary call arrived with its message.
    pub(super) fn started(&self, method: GrpcMethod) -> GrpcCall {
        self.started.get_or_create(&method).inc();
        self.received.get_or_create(&method).inc();
        GrpcCall { metrics: self.clone(), method, start: Instant::now(), code: Code::Internal }
    }
}

/// A call that is being handled. It is counted as completed when it is dropped: with [`Code::Internal`] if it panicked.
#[derive(Debug)]
pub struct GrpcCall {
    metrics: GrpcMetrics,
    method: GrpcMethod,
    start: Instant,
    code: Code,
}

impl GrpcCall {
    /// The call is answered with this code.
    pub fn answered(mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for GrpcCall {
    fn drop(&mut self) {
        let Self { metrics, method, start, code } = self;
        let GrpcMethod { grpc_type, grpc_service, grpc_method } = *method;
        // As Go names them (`google.golang.org/grpc/codes`).
        let grpc_code = match *code {
            Code::Cancelled => "Canceled".to_owned(),
            Code::Ok => "OK".to_owned(),
            other => format!("{other:?}"),
        };
        metrics.handled.get_or_create(&Handled { grpc_type, grpc_service, grpc_method, grpc_code }).inc();
        // An error is a status without a message.
        if *code == Code::Ok {
            metrics.sent.get_or_create(method).inc();
        }
        metrics.seconds.get_or_create(method).observe(start.elapsed().as_secs_f64());
    }
}
