//! Arguments of `fairlead relay`. Names that WireKube's relay has, too, are its.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args};
use fairlead_cli::arguments::value_parsers::{duration, listen_address};

/// UDP ports, first and last; `None` for none.
pub(crate) type PortRange = Option<(u16, u16)>;

/// As `20000-29999`.
fn ports(text: &str) -> Result<PortRange, String> {
    if text == "0" {
        return Ok(None);
    }
    let range =
        text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    let range = range.filter(|(first, last)| *first > 0 && first <= last);
    range.map(Some).ok_or_else(|| format!("{text:?} is not FIRST-LAST, such as 20000-29999, or 0"))
}

/// A name or an address, with a port.
fn host_and_port(text: &str) -> Result<String, String> {
    let is_valid = text
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse().is_ok_and(|port: u16| port > 0));
    if is_valid { Ok(text.to_owned()) } else { Err(format!("{text:?} is not HOST:PORT")) }
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("access").args(["allowed_keys", "allow_wirekube_peers", "token_file"]).required(true).multiple(true))]
pub(crate) struct RelayArguments {
    /// Serve clients on this TCP address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:3478", value_parser = listen_address)]
    pub(crate) addr: SocketAddr,
    /// Answer STUN requests on this UDP address, and from the port after it test how NATs filter; port 0 answers none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:3478", value_parser = listen_address)]
    pub(crate) stun_addr: SocketAddr,
    /// UDP ports through which nodes reach each other by way of this relay, one for a pair of them; 0 for none
    #[arg(long, value_name = "FIRST-LAST", default_value = "20000-29999", value_parser = ports)]
    pub(crate) udp_ports: PortRange,
    /// Certificate chain in PEM; read again when it changes. Without it: WebSocket without TLS, for a proxy that terminates
    /// TLS
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    pub(crate) tls_cert_file: Option<PathBuf>,
    /// Private key of the certificate in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub(crate) tls_private_key_file: Option<PathBuf>,
    /// Pass datagrams on to the other replicas of this relay at this address; repeat it for several. The name may have the
    /// addresses of several replicas, and that of this one. It is resolved again every two seconds
    #[arg(long, value_name = "HOST:PORT", requires_all = ["replica_name", "replica_ca_file", "tls_cert_file"], value_parser = host_and_port)]
    pub(crate) replica: Vec<String>,
    /// Serve other replicas on this TCP address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:3480", value_parser = listen_address)]
    pub(crate) replica_addr: SocketAddr,
    /// Name in the certificate of this relay, which other replicas have to present
    #[arg(long, value_name = "NAME", requires = "replica")]
    pub(crate) replica_name: Option<String>,
    /// Authorities that certify this relay, in PEM; read again when they change
    #[arg(long, value_name = "FILE", requires = "replica")]
    pub(crate) replica_ca_file: Option<PathBuf>,
    /// Name or address of this relay in its clients' endpoint; repeat it for several. Required without a certificate
    #[arg(long, value_name = "NAME", required_unless_present = "tls_cert_file")]
    pub(crate) name: Vec<String>,
    /// WireGuard public keys of the nodes that may use this relay, one in a line; read again when they change
    #[arg(long, value_name = "FILE")]
    pub(crate) allowed_keys: Option<PathBuf>,
    /// Let in the public keys of all WireKubePeers of the cluster, by a watch; in a pod with its ServiceAccount, elsewhere with
    /// KUBECONFIG
    #[arg(long, conflicts_with_all = ["allowed_keys", "token_file"])]
    pub(crate) allow_wirekube_peers: bool,
    /// Tokens that let a node use this relay, one in a line; read again when they change
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Number of connected nodes
    #[arg(long, value_name = "NUMBER", default_value = "10000")]
    pub(crate) max_clients: usize,
    /// Bytes that a node may send in a second; what is beyond that is dropped [default: no limit]
    #[arg(long, value_name = "BYTES")]
    pub(crate) client_rate: Option<NonZeroU64>,
    /// On shutdown, serve connected nodes for this long while they connect elsewhere
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) drain: Duration,
    /// Serve Prometheus metrics on this address; port 0 serves none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9388", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9389", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::arguments::Arguments;

    fn parse(words: &str) -> Result<(), String> {
        let words = format!("fairlead relay {words}");
        Arguments::try_parse_from(words.split_whitespace()).map(|_| ()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_relay_for_everyone_is_refused() {
        let error = parse("--name relay.example").unwrap_err();
        assert!(error.contains("--allowed-keys") && error.contains("--token-file"), "{error}");
        assert_eq!(parse("--name relay.example --allowed-keys keys --token-file tokens"), Ok(()));
        assert_eq!(parse("--name relay.example --allow-wirekube-peers"), Ok(()));
        for other in ["--allowed-keys=keys", "--token-file=tokens"] {
            let both = parse(&format!("--name relay.example --allow-wirekube-peers {other}"));
            assert!(both.unwrap_err().contains("cannot be used with"));
        }
    }

    #[test]
    fn replicas_need_to_know_each_other() {
        let with = |more: &str| {
            parse(&format!("--token-file t --tls-cert-file c --tls-private-key-file k --replica {more}"))
        };
        let known = "--replica-name relay.example --replica-ca-file ca";
        assert_eq!(with(&format!("b.example:3480 --replica [2001:db8::1]:3480 {known}")), Ok(()));
        assert!(with("b.example:3480 --replica-name a").unwrap_err().contains("--replica-ca-file"));
        assert!(with(&format!("b.example {known}")).unwrap_err().contains("HOST:PORT"));
        let plain = parse(&format!("--token-file t --name a --replica b:1 {known}"));
        assert!(plain.unwrap_err().contains("--tls-cert-file"));
    }

    #[test]
    fn a_relay_without_a_certificate_needs_a_name_and_a_certificate_its_key() {
        assert!(parse("--token-file t").unwrap_err().contains("--name"));
        assert!(parse("--token-file t --tls-cert-file c").unwrap_err().contains("--tls-private-key-file"));
        assert_eq!(parse("--token-file t --tls-cert-file c --tls-private-key-file k"), Ok(()));
    }
}
