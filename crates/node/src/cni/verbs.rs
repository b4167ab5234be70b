//! The verbs as gRPC serves them. Each leaves one line in the log and one count, whatever becomes of it.

use std::time::Instant;

use fairlead_wire::cni::cni_server::Cni;
use fairlead_wire::cni::{AddResponse, CniArgs, ErrorCode, error_of};
use fairlead_wire::network::network_server::Network;
use fairlead_wire::network::{GcRequest, GcResponse, StatusRequest};
use tonic::{Request, Response, Status};

use super::Service;
use super::args::{attachment, key, network, refuse};
use super::chained::{is_chained, pass_on};

impl Service {
    async fn add_one(&self, args: &CniArgs) -> Result<Vec<u8>, Status> {
        if !self.gives_addresses {
            let key = key(args)?;
            let _guard = self.locks.lock(&key.container_id).await;
            self.enter_in_records(&key, None)?;
            return pass_on(args);
        }
        if is_chained(args) {
            return Err(refuse(
                ErrorCode::InvalidNetworkConfig,
                // In Coil's words, which administrators search for.
                "coil must be called as the first plugin when IPAM related features are enabled",
                "put it before the plugins that change an interface (portmap, bandwidth, tuning)",
            ));
        }
        let attachment = attachment(args)?;
        let _guard = self.locks.lock(&attachment.key.container_id).await;
        self.enter_in_records(&attachment.key, network(&args.stdin_data))?;
        self.attach(&attachment).await
    }

    async fn del_one(&self, args: &CniArgs) -> Result<(), Status> {
        let key = key(args)?;
        let _guard = self.locks.lock(&key.container_id).await;
        // Without addresses to give there usually is nothing; what an earlier life of the node made still goes.
        self.detach(&key).await.map(drop)
    }

    async fn check_one(&self, args: &CniArgs) -> Result<(), Status> {
        let key = key(args)?;
        let _guard = self.locks.lock(&key.container_id).await;
        if self.gives_addresses {
            self.inspect(args, &key).await
        } else {
            self.inspect_chained(args, &key).await
        }
    }

    fn conclude<T>(
        &self,
        verb: &'static str,
        args: &CniArgs,
        start: Instant,
        outcome: Result<T, Status>,
    ) -> Result<Response<T>, Status> {
        let took = start.elapsed();
        self.metrics.cni.operation(verb, took, outcome.is_ok());
        self.metrics.cni.grpc_call(verb, outcome.as_ref().err().map_or(tonic::Code::Ok, Status::code));
        let of_pod = |name: &str| args.args.get(name).map(String::as_str).unwrap_or_default();
        let (namespace, pod) = (of_pod("K8S_POD_NAMESPACE"), of_pod("K8S_POD_NAME"));
        let (container, ifname, elapsed_ms) = (&args.container_id, &args.ifname, milliseconds(took));
        match &outcome {
            Ok(_) => {
                tracing::info!(verb, pod, namespace, container, ifname, elapsed_ms, outcome = "ok", "CNI");
            }
            Err(status) => {
                let (code, error) = (cni_code(status), status.message());
                tracing::warn!(
                    verb,
                    pod,
                    namespace,
                    container,
                    ifname,
                    elapsed_ms,
                    outcome = "error",
                    code,
                    error,
                    "CNI"
                );
            }
        }
        outcome.map(Response::new)
    }

    fn conclude_network<T>(
        &self,
        verb: &'static str,
        network: &str,
        start: Instant,
        outcome: Result<T, Status>,
    ) -> Result<Response<T>, Status> {
        let took = start.elapsed();
        self.metrics.cni.operation(verb, took, outcome.is_ok());
        let elapsed_ms = milliseconds(took);
        match &outcome {
            // Runtimes ask every few seconds.
            Ok(_) if verb == "STATUS" => tracing::debug!(verb, elapsed_ms, outcome = "ok", "CNI"),
            Ok(_) => tracing::info!(verb, network, elapsed_ms, outcome = "ok", "CNI"),
            Err(status) => {
                let (code, error) = (cni_code(status), status.message());
                tracing::warn!(verb, network, elapsed_ms, outcome = "error", code, error, "CNI");
            }
        }
        outcome.map(Response::new)
    }
}

/// To a hundredth: a verb takes some milliseconds.
fn milliseconds(took: std::time::Duration) -> f64 {
    (took.as_secs_f64() * 100_000.0).round() / 100.0
}

fn cni_code(status: &Status) -> i32 {
    error_of(status).map_or(0, |error| error.code)
}

#[tonic::async_trait]
impl Cni for Service {
    async fn add(&self, request: Request<CniArgs>) -> Result<Response<AddResponse>, Status> {
        let (args, start) = (request.into_inner(), Instant::now());
        let outcome = self.add_one(&args).await.map(|result| AddResponse { result });
        self.conclude("ADD", &args, start, outcome)
    }

    async fn del(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let (args, start) = (request.into_inner(), Instant::now());
        let outcome = self.del_one(&args).await;
        self.conclude("DEL", &args, start, outcome)
    }

    async fn check(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let (args, start) = (request.into_inner(), Instant::now());
        let outcome = self.check_one(&args).await;
        self.conclude("CHECK", &args, start, outcome)
    }
}

#[tonic::async_trait]
impl Network for Service {
    async fn gc(&self, request: Request<GcRequest>) -> Result<Response<GcResponse>, Status> {
        let (request, start) = (request.into_inner(), Instant::now());
        let network = request.network.clone();
        let outcome = self.collect(request).await;
        self.conclude_network("GC", &network, start, outcome)
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<()>, Status> {
        let start = Instant::now();
        let outcome = self.readiness().await;
        self.conclude_network("STATUS", "", start, outcome)
    }
}
