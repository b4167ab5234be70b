//! The CNI operations as gRPC serves them: each runs to completion, is counted, and leaves one line in the log.

use std::sync::Arc;
use std::time::Instant;

use fairlead_dataplane::pods;
use fairlead_ipam::Key;
use fairlead_wire::cni::cni_server::Cni;
use fairlead_wire::cni::{AddResponse, CniArgs};
use fairlead_wire::network::network_server::Network;
use fairlead_wire::network::{GcRequest, GcResponse, StatusRequest};
use tonic::{Request, Response, Status};

use super::attach::CheckContext;
use super::attachment::{AddRequest, key, netns};
use super::check::Previous;
use super::failure::{Failure, Reason, blocking};
use super::mesh;
use super::metrics::{CniMetrics, Operation};
use super::service::{CniDeps, CniHandle, Service};

impl Service {
    async fn add(&self, args: CniArgs) -> Result<AddResponse, Failure> {
        let add = AddRequest::parse(args)?;
        let CniDeps { locks, meshes, mesh, records, .. } = &self.deps;
        let was_attached = records.was_attached();
        let waits = || mesh::is_awaited(meshes, mesh.as_ref(), was_attached);
        let _guard = mesh::lock_once_settled(locks, &add.key.container_id, waits).await?;
        records.note_attached();
        let repeated = self.deps.ipam.allocated(&add.key).is_some();
        Ok(AddResponse { result: self.stages.attach(&add, repeated).await? })
    }

    async fn del(&self, args: CniArgs) -> Result<(), Failure> {
        let key = key(&args)?;
        let _guard = self.deps.locks.lock(&key.container_id).await;
        self.detach(&key).await
    }

    async fn check(&self, args: CniArgs) -> Result<(), Failure> {
        let key = key(&args)?;
        let netns = netns(&args)?;
        let _guard = self.deps.locks.lock(&key.container_id).await;
        let previous = Previous::of_configuration(&args.stdin_data).map_err(|error| {
            Failure::new(Reason::InvalidNetworkConfig, "prevResult cannot be decoded").details(error)
        })?;
        let inspect = {
            let numbers = self.deps.ipam.numbers();
            let file = netns.clone();
            let tables = Previous::tables(previous.as_ref());
            let Key { container_id, ifname } = key.clone();
            move || pods::inspect(numbers, (&container_id, &ifname), &file, &tables)
        };
        let kernel = blocking("reading the pod's link", inspect).await??;
        let differences = self.stages.check(&CheckContext { key, netns, previous, kernel }).await?;
        if differences.is_empty() {
            return Ok(());
        }
        let details = "it was changed after ADD; the runtime must recreate the sandbox";
        Err(Failure::new(Reason::AttachmentChanged, differences.join("; ")).details(details))
    }
}

/// Subject of an operation, for its line in the log.
#[derive(Debug, Default)]
struct Subject {
    namespace: Option<String>,
    pod: Option<String>,
    container: Option<String>,
    ifname: Option<String>,
    network: Option<String>,
}

impl From<&CniArgs> for Subject {
    fn from(args: &CniArgs) -> Self {
        Self {
            namespace: args.args.get("K8S_POD_NAMESPACE").cloned(),
            pod: args.args.get("K8S_POD_NAME").cloned(),
            container: Some(args.container_id.clone()),
            ifname: Some(args.ifname.clone()),
            network: None,
        }
    }
}

/// Runs one operation on a task of its own, to completion also when its caller goes away. A call whose plugin was killed is
/// dropped where it waits: its guard would end while its link is still being made, a DEL could overtake it, and the
/// address would be allocated to another pod while this one gets its link.
async fn serve<T: Send + 'static>(
    metrics: &CniMetrics,
    operation: Operation,
    subject: Subject,
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<Response<T>, Status> {
    let call = metrics.grpc_call(operation);
    let metrics = metrics.clone();
    let measured = async move {
        let start = Instant::now();
        let outcome = work.await;
        let took = start.elapsed();
        metrics.served(operation, took, outcome.as_ref().err().map(|failure| failure.reason));
        // To a hundredth: an operation takes some milliseconds.
        let elapsed_ms = (took.as_secs_f64() * 100_000.0).round() / 100.0;
        log(operation, &subject, elapsed_ms, outcome.as_ref().err());
        let outcome = outcome.map_err(Status::from);
        call.answered(outcome.as_ref().err().map_or(tonic::Code::Ok, Status::code));
        outcome
    };
    let panicked =
        |error| Failure::new(Reason::Internal, format!("{operation} did not finish")).details(error);
    tokio::spawn(measured).await.map_err(panicked)?.map(Response::new)
}

fn log(operation: Operation, subject: &Subject, elapsed_ms: f64, failure: Option<&Failure>) {
    let Subject { namespace, pod, container, ifname, network } = subject;
    let namespace = namespace.as_deref();
    let pod = pod.as_deref();
    let network = network.as_deref();
    let container = container.as_deref();
    let ifname = ifname.as_deref();
    let name = operation.as_str();
    macro_rules! line {
        ($level:ident, $($fields:tt)*) => {
            tracing::$level!(operation = name, pod, namespace, container, ifname, network, elapsed_ms, $($fields)*, "CNI")
        };
    }
    match failure {
        // Runtimes ask every few seconds.
        None if operation == Operation::Status => {
            tracing::debug!(operation = name, elapsed_ms, outcome = "ok", "CNI");
        }
        None => line!(info, outcome = "ok"),
        Some(Failure { reason, code, message, .. }) => {
            let code = i32::from(*code);
            let reason = reason.as_str();
            line!(warn, outcome = "error", reason, code, error = message);
        }
    }
}

#[tonic::async_trait]
impl Cni for CniHandle {
    async fn add(&self, request: Request<CniArgs>) -> Result<Response<AddResponse>, Status> {
        let service = Arc::clone(&self.0);
        let args = request.into_inner();
        let subject = Subject::from(&args);
        serve(&self.0.deps.metrics, Operation::Add, subject, async move { service.add(args).await }).await
    }

    async fn del(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let service = Arc::clone(&self.0);
        let args = request.into_inner();
        let subject = Subject::from(&args);
        serve(&self.0.deps.metrics, Operation::Del, subject, async move { service.del(args).await }).await
    }

    async fn check(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let service = Arc::clone(&self.0);
        let args = request.into_inner();
        let subject = Subject::from(&args);
        serve(&self.0.deps.metrics, Operation::Check, subject, async move { service.check(args).await }).await
    }
}

#[tonic::async_trait]
impl Network for CniHandle {
    async fn gc(&self, request: Request<GcRequest>) -> Result<Response<GcResponse>, Status> {
        let service = Arc::clone(&self.0);
        let request = request.into_inner();
        let subject = Subject { network: Some(request.network.clone()), ..Subject::default() };
        serve(&self.0.deps.metrics, Operation::Gc, subject, async move { service.gc(request).await }).await
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<()>, Status> {
        let service = Arc::clone(&self.0);
        let work = async move { service.status().await };
        serve(&self.0.deps.metrics, Operation::Status, Subject::default(), work).await
    }
}

#[cfg(test)]
mod tests {
    use fairlead_cluster::metrics::Exposition;
    use prometheus_client::registry::Registry;
    use tokio::sync::watch;

    use super::*;

    fn metrics() -> (CniMetrics, Registry) {
        let mut registry = Registry::default();
        (CniMetrics::register(&mut registry), registry)
    }

    #[tokio::test]
    async fn an_operation_whose_caller_is_gone_runs_to_completion() {
        let (go, mut go_ahead) = watch::channel(false);
        let (began, mut has_begun) = watch::channel(false);
        let (ended, mut has_ended) = watch::channel(false);
        let operation = async move {
            began.send_replace(true);
            let _ = go_ahead.wait_for(|go| *go).await;
            ended.send_replace(true);
            Ok(())
        };
        let (metrics, _registry) = metrics();
        let call =
            tokio::spawn(async move { serve(&metrics, Operation::Add, Subject::default(), operation).await });
        has_begun.wait_for(|yes| *yes).await.unwrap();
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        go.send_replace(true);
        has_ended.wait_for(|yes| *yes).await.unwrap();
    }

    #[tokio::test]
    async fn answers_failures_and_panics_reach_the_caller_and_are_counted() {
        let (metrics, registry) = metrics();
        let subject = Subject::default;
        let added = serve(&metrics, Operation::Add, subject(), async { Ok("result") }).await;
        assert_eq!(added.unwrap().into_inner(), "result");
        let failure = Failure::new(Reason::NotAttached, "no address");
        let refused = serve(&metrics, Operation::Check, subject(), async { Err::<(), _>(failure) }).await;
        assert_eq!(refused.unwrap_err().message(), "no address");
        let panicked = serve::<()>(&metrics, Operation::Del, subject(), async { panic!("bug") }).await;
        assert_eq!(panicked.unwrap_err().message(), "DEL did not finish");
        let text = fairlead_cluster::metrics::text(&registry, Exposition::Text);
        for line in [
            r#"fairlead_cni_operations_total{operation="ADD",result="ok"} 1"#,
            r#"fairlead_cni_operations_total{operation="CHECK",result="error"} 1"#,
            r#"fairlead_cni_failures_total{operation="CHECK",reason="NotAttached"} 1"#,
            r#"grpc_server_started_total{grpc_type="unary",grpc_service="pkg.cnirpc.CNI",grpc_method="Del"} 1"#,
            r#"grpc_server_msg_received_total{grpc_type="unary",grpc_service="pkg.cnirpc.CNI",grpc_method="Check"} 1"#,
            r#"grpc_server_msg_sent_total{grpc_type="unary",grpc_service="pkg.cnirpc.CNI",grpc_method="Add"} 1"#,
            r#"grpc_server_msg_sent_total{grpc_type="unary",grpc_service="pkg.cnirpc.CNI",grpc_method="Check"} 0"#,
            r#"grpc_server_started_total{grpc_type="unary",grpc_service="fairlead.cni.v1.Network",grpc_method="Gc"} 0"#,
            r#"grpc_server_handled_total{grpc_type="unary",grpc_service="pkg.cnirpc.CNI",grpc_method="Del",grpc_code="Internal"} 1"#,
            r#"grpc_server_handling_seconds_count{grpc_type="unary",grpc_service="pkg.cnirpc.CNI",grpc_method="Add"} 1"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
    }
}
