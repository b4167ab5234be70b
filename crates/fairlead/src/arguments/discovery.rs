//! Arguments of `fairlead discovery`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use fairlead_cli::arguments::value_parsers::{duration, listen_address};
use fairlead_discovery::server::EtcdEndpoint;
use ipnet::IpNet;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct DiscoveryArguments {
    /// Action in place of serving clients
    #[command(subcommand)]
    pub(crate) command: Option<DiscoveryCommand>,
    /// Serve clients on this TCP address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:3000", value_parser = listen_address)]
    pub(crate) addr: SocketAddr,
    /// Certificate chain in PEM; read again when it changes. Without it: HTTP/2 without TLS, for a proxy that terminates TLS
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    pub(crate) tls_cert_file: Option<PathBuf>,
    /// Private key of the certificate in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub(crate) tls_private_key_file: Option<PathBuf>,
    /// Take a caller's address from X-Real-IP or X-Forwarded-For if the request comes from this prefix; repeat it for several
    #[arg(long, value_name = "PREFIX")]
    pub(crate) trusted_proxy: Vec<IpNet>,
    /// Do not tell clients their address
    #[arg(long)]
    pub(crate) no_client_ip: bool,
    /// Tell clients to use the server at this address instead
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) redirect_endpoint: Option<String>,
    /// Accept only what this file lists: the IDs of a cluster and of an affiliate in a line, or * for all of its affiliates; read
    /// again when it changes [default: all]
    #[arg(long, value_name = "FILE")]
    pub(crate) admission_file: Option<PathBuf>,
    /// Keep what clients published in this file over a restart [default: in memory only]
    #[arg(long, value_name = "FILE")]
    pub(crate) snapshot_path: Option<PathBuf>,
    /// Interval at which that file is written, besides on shutdown
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration, requires = "snapshot_path")]
    pub(crate) snapshot_interval: Duration,
    /// Client URLs of the members of an etcd through which replicas of this server share what clients published; separate several
    /// by commas. Then there are no snapshots
    #[arg(long, value_name = "URL,…", value_delimiter = ',', conflicts_with = "snapshot_path")]
    pub(crate) etcd_endpoints: Vec<EtcdEndpoint>,
    /// Authorities for etcd's certificates in PEM; read again for each connection [default: those that this host trusts]
    #[arg(long, value_name = "FILE", requires = "etcd_endpoints")]
    pub(crate) etcd_ca_file: Option<PathBuf>,
    /// Certificate in PEM to present to etcd; read again for each connection
    #[arg(long, value_name = "FILE", requires_all = ["etcd_endpoints", "etcd_key_file"])]
    pub(crate) etcd_cert_file: Option<PathBuf>,
    /// Private key of that certificate in PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert_file")]
    pub(crate) etcd_key_file: Option<PathBuf>,
    /// Prefix of the keys in etcd; the same for all replicas
    #[arg(long, value_name = "PREFIX", default_value = "/fairlead/discovery", requires = "etcd_endpoints")]
    pub(crate) etcd_prefix: String,
    /// Number of clusters
    #[arg(long, value_name = "NUMBER", default_value = "10000")]
    pub(crate) max_clusters: usize,
    /// Number of affiliates of a cluster
    #[arg(long, value_name = "NUMBER", default_value = "1024")]
    pub(crate) max_affiliates: usize,
    /// Number of affiliates of all clusters; each takes 4 KiB of memory at most
    #[arg(long, value_name = "NUMBER", default_value = "200000")]
    pub(crate) max_affiliates_in_all: usize,
    /// Number of affiliates that one address may create; of IPv6 the first 64 bits count
    #[arg(long, value_name = "NUMBER", default_value = "4096")]
    pub(crate) max_affiliates_per_address: usize,
    /// Number of watches
    #[arg(long, value_name = "NUMBER", default_value = "20000")]
    pub(crate) max_watches: usize,
    /// Number of connections, and of watches, of one address
    #[arg(long, value_name = "NUMBER", default_value = "4096")]
    pub(crate) max_connections_per_address: usize,
    /// Requests that one address may make in a second; more wait, up to 5 seconds. 0 for no limit
    #[arg(long, value_name = "NUMBER", default_value = "15")]
    pub(crate) address_rate: u32,
    /// Requests that one address may make at once after a pause
    #[arg(long, value_name = "NUMBER", default_value = "60")]
    pub(crate) address_burst: u32,
    /// Serve Prometheus metrics on this address; port 0 serves none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9390", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9391", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DiscoveryCommand {
    /// Print the lines of --admission-file that accept nodes of Fairlead
    #[command(
        after_help = "The files have what the Secret kube-system/fairlead-discovery has, as those of `fairlead node --standalone`. A \
        node has the same affiliate ID as long as its name and the secret of the cluster are the same; `fairlead status` on it shows \
        the ID, too."
    )]
    Id(DiscoveryIdArguments),
}

#[derive(Debug, Args)]
pub(crate) struct DiscoveryIdArguments {
    /// File with the identifier of the cluster at discovery services
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_id_file: PathBuf,
    /// File with the secret of the cluster for discovery services: 32 bytes in base64
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_secret_file: PathBuf,
    /// Names of the nodes
    #[arg(value_name = "NODE", required = true)]
    pub(crate) nodes: Vec<String>,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::arguments::Arguments;

    fn parse(words: &str) -> Result<(), String> {
        let words = format!("fairlead discovery {words}");
        Arguments::try_parse_from(words.split_whitespace()).map(|_| ()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_server_needs_no_arguments_and_a_certificate_its_key() {
        assert_eq!(parse(""), Ok(()));
        assert_eq!(parse("--trusted-proxy 192.0.2.0/24 --trusted-proxy 2001:db8::/32"), Ok(()));
        assert!(parse("--trusted-proxy all").is_err());
        assert!(parse("--tls-cert-file c").unwrap_err().contains("--tls-private-key-file"));
        assert_eq!(parse("--snapshot-path s --snapshot-interval 1m"), Ok(()));
        assert!(parse("--snapshot-interval 1m").unwrap_err().contains("--snapshot-path"));
    }

    #[test]
    fn affiliate_ids_need_what_the_cluster_shares_and_names() {
        let files = "id --cluster-id-file i --cluster-secret-file s";
        assert_eq!(parse(&format!("{files} edge-1 edge-2")), Ok(()));
        assert!(parse(files).unwrap_err().contains("<NODE>"));
        assert!(parse("id --cluster-id-file i edge-1").unwrap_err().contains("--cluster-secret-file"));
        assert!(parse(&format!("--no-client-ip {files} edge-1")).is_err());
    }

    #[test]
    fn replicas_need_etcd_and_keep_no_snapshots() {
        assert_eq!(
            parse("--etcd-endpoints http://127.0.0.1:2379,http://127.0.0.1:22379 --etcd-prefix /a"),
            Ok(())
        );
        assert_eq!(
            parse("--etcd-endpoints https://etcd --etcd-ca-file a --etcd-cert-file c --etcd-key-file k"),
            Ok(())
        );
        assert!(parse("--etcd-endpoints 127.0.0.1:2379").unwrap_err().contains("client URL of etcd"));
        for (words, missing) in [
            ("--etcd-prefix /a", "--etcd-endpoints"),
            ("--etcd-ca-file a", "--etcd-endpoints"),
            ("--etcd-endpoints https://etcd --etcd-cert-file c", "--etcd-key-file"),
            ("--etcd-endpoints https://etcd --snapshot-path s", "--snapshot-path"),
        ] {
            assert!(parse(words).unwrap_err().contains(missing), "{words}");
        }
    }
}
