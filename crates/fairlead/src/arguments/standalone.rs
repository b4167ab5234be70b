//! Arguments of a node without Kubernetes.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use fairlead_api::resources::{Discovery, WireKubeMesh, WireKubeMeshSpec};
use fairlead_node::Standalone;

#[derive(Debug, Args)]
pub(crate) struct StandaloneArguments {
    /// Run without Kubernetes: members come from --peers and from discovery services
    #[arg(long)]
    pub(crate) standalone: bool,
    /// Settings of the mesh: a manifest of a WireKubeMesh (YAML or JSON). Without the file its defaults
    #[arg(long, value_name = "FILE", requires = "standalone")]
    pub(crate) mesh: Option<PathBuf>,
    /// Address of this node that others reach through the mesh; may be repeated [default: those that it uses for other hosts]
    #[arg(long, value_name = "ADDRESS", requires = "standalone")]
    pub(crate) node_ip: Vec<IpAddr>,
    /// URL of a discovery service, such as https://discovery.example.com:3000; may be repeated
    #[arg(long, value_name = "URL", requires_all = ["standalone", "cluster_id_file", "cluster_secret_file"])]
    pub(crate) discovery_endpoint: Vec<String>,
    /// PEM certificates of the authorities that certify discovery services, beside those that this host trusts
    #[arg(long, value_name = "FILE", requires = "discovery_endpoint")]
    pub(crate) discovery_ca_file: Option<PathBuf>,
    /// File with the identifier of the cluster at discovery services
    #[arg(long, value_name = "FILE", requires_all = ["standalone", "cluster_secret_file"])]
    pub(crate) cluster_id_file: Option<PathBuf>,
    /// File with the secret of the cluster for discovery services: 32 bytes in base64
    #[arg(long, value_name = "FILE", requires_all = ["standalone", "cluster_id_file"])]
    pub(crate) cluster_secret_file: Option<PathBuf>,
}

impl StandaloneArguments {
    /// `None` where there is Kubernetes.
    ///
    /// # Errors
    /// A file cannot be read or parsed.
    pub(crate) fn settings(self) -> anyhow::Result<Option<Standalone>> {
        if !self.standalone {
            return Ok(None);
        }
        let mut mesh = match &self.mesh {
            Some(path) => {
                let what = || format!("cannot use file {} of --mesh", path.display());
                let text = std::fs::read_to_string(path).with_context(what)?;
                serde_saphyr::from_str::<WireKubeMesh>(&text).with_context(what)?
            }
            None => WireKubeMesh::new("standalone", WireKubeMeshSpec::default()),
        };
        if !self.discovery_endpoint.is_empty() {
            let bundle = self.discovery_ca_file.map(|path| {
                let what = || format!("cannot read file {} of --discovery-ca-file", path.display());
                std::fs::read(&path).with_context(what).map(|pem| STANDARD.encode(pem))
            });
            let known = mesh.spec.discovery.take();
            mesh.spec.discovery = Some(Discovery {
                endpoints: self.discovery_endpoint,
                ca_bundle: bundle.transpose()?.or(known.as_ref().and_then(|known| known.ca_bundle.clone())),
                allowed_prefixes: known.map(|known| known.allowed_prefixes).unwrap_or_default(),
                secret_ref: None,
            });
        }
        let credentials = self.cluster_id_file.zip(self.cluster_secret_file);
        anyhow::ensure!(
            mesh.spec.discovery.is_none() || credentials.is_some(),
            "spec.discovery of --mesh needs --cluster-id-file and --cluster-secret-file"
        );
        Ok(Some(Standalone { mesh, credentials, addresses: self.node_ip }))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser as _;
    use k8s_openapi::api::core::v1::Pod;

    use crate::arguments::{Arguments, Command};

    fn example(name: &str) -> String {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/examples/standalone");
        std::fs::read_to_string(directory.join(name)).unwrap()
    }

    /// Whether these are arguments of a node without Kubernetes that finds others by discovery.
    fn assert_runs_a_node(arguments: &[String], source: &str) {
        let program = ["fairlead".to_owned()];
        let parsed = Arguments::try_parse_from(program.iter().chain(arguments));
        let Command::Node(node) = parsed.unwrap_or_else(|error| panic!("{source}: {error}")).command else {
            panic!("{source} runs another command")
        };
        let settings = node.standalone.settings().unwrap().unwrap();
        assert_eq!(settings.mesh.spec.discovery.unwrap().endpoints.len(), 1, "{source}");
        assert!(settings.credentials.is_some(), "{source}");
    }

    #[test]
    fn the_examples_of_a_node_without_kubernetes_are_arguments_of_this_program() {
        let unit = example("fairlead-node.service").replace("\\\n", " ");
        let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let mut words = line.split_whitespace();
        assert_eq!(words.next(), Some("/usr/local/bin/fairlead"));
        // systemd replaces %l by the host name.
        let words: Vec<String> = words.map(|word| word.replace("%l", "edge-1")).collect();
        assert!(!words.iter().any(|word| word.contains('%')), "{words:?}");
        assert_runs_a_node(&words, "fairlead-node.service");
        let files = words.iter().filter(|word| word.contains("=/etc/fairlead/")).count();
        assert_eq!((unit.matches("StateDirectory=fairlead\n").count(), files), (1, 2));

        let pod: Pod = serde_saphyr::from_str(&example("static-pod.yaml")).unwrap();
        let spec = pod.spec.unwrap();
        let [container] = &spec.containers[..] else { panic!("{:?}", spec.containers) };
        assert_runs_a_node(container.args.as_ref().unwrap(), "static-pod.yaml");
        // What the program reads and keeps outlives the container.
        let mounts = container.volume_mounts.iter().flatten().map(|mount| mount.mount_path.as_str());
        assert_eq!(mounts.collect::<Vec<_>>(), ["/etc/fairlead", "/run", "/var/lib/fairlead"]);
    }
}
