//! The control plane from a user's own etcd and kube-apiserver (`KUBEBUILDER_ASSETS`).
//!
//! Nothing here makes certificates: the API server signs one for itself, its key also signs
//! ServiceAccount tokens, and the administrator has a static token.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use testbed_cache::free_port;

use crate::programs::Programs;
use crate::supervised::Supervised;
use crate::{Options, kubeconfig, kubectl};

const READY_TIMEOUT: Duration = Duration::from_secs(180);

pub(crate) struct Assets {
    // Dropped in this order: an API server whose etcd went first does not end by itself.
    apiserver: Option<Supervised>,
    _etcd: Supervised,
    directory: PathBuf,
    etcd_url: String,
    address: SocketAddr,
    admin_token: String,
}

impl Assets {
    pub(crate) fn start(programs: &Programs, options: &Options, directory: &Path) -> anyhow::Result<Self> {
        let etcd_url = format!("http://127.0.0.1:{}", free_port()?);
        let port = options.port.map_or_else(free_port, Ok)?;
        let mut etcd = programs.direct("etcd");
        etcd.arg(format!("--data-dir={}", directory.join("etcd").display()));
        etcd.args(["listen-client-urls", "advertise-client-urls"].map(|flag| format!("--{flag}={etcd_url}")));
        etcd.arg(format!("--listen-peer-urls=http://127.0.0.1:{}", free_port()?));
        etcd.arg("--unsafe-no-fsync=true");
        let mut assets = Self {
            apiserver: None,
            _etcd: Supervised::start(&etcd, options, directory, "etcd")?,
            directory: directory.to_owned(),
            etcd_url,
            address: SocketAddr::new(options.first_address(), port),
            admin_token: random_token(),
        };
        let tokens = format!("{},admin,admin,\"system:masters\"\n", assets.admin_token);
        fs::write(directory.join("tokens.csv"), tokens).context("cannot write the token file")?;
        assets.start_apiserver(programs, options)?;
        Ok(assets)
    }

    pub(crate) fn stop_apiserver(&mut self) -> anyhow::Result<()> {
        self.apiserver.take().map(drop).context("the API server is not running")
    }

    pub(crate) fn start_apiserver(&mut self, programs: &Programs, options: &Options) -> anyhow::Result<()> {
        if self.apiserver.is_some() {
            bail!("the API server is running already");
        }
        let mut command = programs.direct("kube-apiserver");
        command.args(self.apiserver_arguments()).args(&options.apiserver_args);
        let server = Supervised::start(&command, options, &self.directory, "kube-apiserver")?;
        self.apiserver = Some(server);
        let deadline = Instant::now() + READY_TIMEOUT;
        while !self.ready(programs, options) {
            if let Some(server) = self.apiserver.as_mut() {
                server.check_alive("kube-apiserver")?;
            }
            if Instant::now() > deadline {
                bail!("kube-apiserver at {} not ready after {} s", self.address, READY_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn apiserver_arguments(&self) -> Vec<String> {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let ip = self.address.ip();
        // Its first service range must have the family of the address it advertises.
        let services =
            if ip.is_ipv4() { "10.96.0.0/16,fd00:10:96::/112" } else { "fd00:10:96::/112,10.96.0.0/16" };
        let mut arguments = vec![
            format!("--etcd-servers={}", self.etcd_url),
            format!("--bind-address={ip}"),
            format!("--advertise-address={ip}"),
            format!("--secure-port={}", self.address.port()),
            format!("--cert-dir={}", self.directory.display()),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
            format!("--service-account-key-file={}", file("apiserver.key")),
            format!("--service-account-signing-key-file={}", file("apiserver.key")),
            format!("--service-cluster-ip-range={services}"),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--allow-privileged=true".to_owned(),
            // There is no controller that makes the ServiceAccounts it asks for.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
        ];
        if ip.is_loopback() {
            arguments.push("--endpoint-reconciler-type=none".to_owned());
        }
        arguments
    }

    /// Whether the API server answers; makes the kubeconfig as soon as there is a certificate to put in it.
    fn ready(&self, programs: &Programs, options: &Options) -> bool {
        let Ok(certificate) = fs::read(self.directory.join("apiserver.crt")) else { return false };
        let server = format!("https://{}", self.address);
        let config = kubeconfig::for_token(&server, &STANDARD.encode(&certificate), &self.admin_token);
        kubeconfig::write(&self.directory.join("admin.kubeconfig"), &config).is_ok()
            && kubectl::run(programs, options, &self.directory, &["get", "--raw", "/readyz"], "").is_ok()
    }
}

fn random_token() -> String {
    format!("{:032x}", rand::random::<u128>())
}
