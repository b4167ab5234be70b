//! A fake node program with a test's answers, and the plugin as a child process.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use fairlead_wire::cni::cni_server::{Cni, CniServer};
use fairlead_wire::cni::{AddResponse, CniArgs};
use fairlead_wire::network::network_server::{Network, NetworkServer};
use fairlead_wire::network::{GcRequest, GcResponse, StatusRequest};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

type Answer = dyn Fn(&CniArgs) -> Result<Vec<u8>, Status> + Send + Sync;
type Collect = dyn Fn(&GcRequest) -> Result<GcResponse, Status> + Send + Sync;

/// A call that the fake received.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) method: &'static str,
    pub(crate) args: CniArgs,
    /// The header `grpc-timeout`.
    pub(crate) timeout: Option<String>,
}

/// Serves the real contract on a real socket, with a test's answers.
pub(crate) struct FakeNode {
    socket: String,
    calls: Arc<Mutex<Vec<Call>>>,
    server: tokio::task::JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl FakeNode {
    pub(crate) fn start(
        answer: impl Fn(&CniArgs) -> Result<Vec<u8>, Status> + Send + Sync + 'static,
    ) -> Self {
        let uncalled = || Status::unimplemented("this test calls neither GC nor STATUS");
        Self::serve(answer, move |_| Err(uncalled()), move || Err(uncalled()))
    }

    /// One that answers GC and STATUS only.
    pub(crate) fn of_network(
        collect: impl Fn(&GcRequest) -> Result<GcResponse, Status> + Send + Sync + 'static,
        ready: impl Fn() -> Result<(), Status> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(|_| Err(Status::unimplemented("this test calls GC and STATUS only")), collect, ready)
    }

    fn serve(
        answer: impl Fn(&CniArgs) -> Result<Vec<u8>, Status> + Send + Sync + 'static,
        collect: impl Fn(&GcRequest) -> Result<GcResponse, Status> + Send + Sync + 'static,
        ready: impl Fn() -> Result<(), Status> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let calls = Arc::<Mutex<Vec<Call>>>::default();
        let service = Service { calls: calls.clone(), answer: Box::new(answer) };
        let network =
            NetworkServer::new(NetworkService { collect: Box::new(collect), ready: Box::new(ready) });
        let server = tokio::spawn(async move {
            let router =
                tonic::transport::Server::builder().add_service(CniServer::new(service)).add_service(network);
            router.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
        });
        Self { socket: path.to_str().unwrap().to_owned(), calls, server, _directory: directory }
    }

    /// A network configuration that names this fake's socket.
    pub(crate) fn conf(&self, version: &str) -> Value {
        json!({"cniVersion": version, "name": "k8s-pod-network", "type": "coil", "socket": self.socket})
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Service {
    calls: Arc<Mutex<Vec<Call>>>,
    answer: Box<Answer>,
}

impl Service {
    fn answer(&self, method: &'static str, request: Request<CniArgs>) -> Result<Vec<u8>, Status> {
        let timeout = request.metadata().get("grpc-timeout").map(|value| value.to_str().unwrap().to_owned());
        let args = request.into_inner();
        let answer = (self.answer)(&args);
        self.calls.lock().unwrap().push(Call { method, args, timeout });
        answer
    }
}

#[tonic::async_trait]
impl Cni for Service {
    async fn add(&self, request: Request<CniArgs>) -> Result<Response<AddResponse>, Status> {
        self.answer("Add", request).map(|result| Response::new(AddResponse { result }))
    }

    async fn del(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        self.answer("Del", request).map(|_| Response::new(()))
    }

    async fn check(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        self.answer("Check", request).map(|_| Response::new(()))
    }
}

struct NetworkService {
    collect: Box<Collect>,
    ready: Box<dyn Fn() -> Result<(), Status> + Send + Sync>,
}

#[tonic::async_trait]
impl Network for NetworkService {
    async fn gc(&self, request: Request<GcRequest>) -> Result<Response<GcResponse>, Status> {
        (self.collect)(request.get_ref()).map(Response::new)
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<()>, Status> {
        (self.ready)().map(Response::new)
    }
}

/// One run of the executable, with an environment of its own.
#[derive(Debug, Default)]
pub(crate) struct Plugin {
    env: BTreeMap<&'static str, String>,
    stdin: Vec<u8>,
}

impl Plugin {
    /// No environment at all.
    pub(crate) fn bare() -> Self {
        Self::default()
    }

    /// A complete environment. The namespace does not exist: the plugin itself never enters it.
    pub(crate) fn new(command: &str) -> Self {
        Self::bare()
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", "c0ffee")
            .env("CNI_NETNS", "/nonexistent/netns")
            .env("CNI_IFNAME", "eth0")
    }

    pub(crate) fn env(mut self, name: &'static str, value: &str) -> Self {
        self.env.insert(name, value.to_owned());
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.env.remove(name);
        self
    }

    pub(crate) fn conf(self, conf: &Value) -> Self {
        self.stdin(conf.to_string().as_bytes())
    }

    pub(crate) fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = bytes.to_vec();
        self
    }

    pub(crate) async fn run(self) -> Output {
        let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_fairlead-cni"))
            .env_clear()
            .envs(self.env)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        // A plugin that does not read its input closes the pipe.
        let _ = child.stdin.take().unwrap().write_all(&self.stdin).await;
        let output = child.wait_with_output().await.unwrap();
        Output {
            success: output.status.success(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) success: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}
