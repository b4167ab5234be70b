//! Arguments of `fairlead connect`.

use std::path::PathBuf;

use clap::Args;
use fairlead_api::names::{CONNECT_INTERFACE, is_object_name};
use fairlead_cli::api::ApiArguments;
use fairlead_cli::arguments::peers;
use ipnet::IpNet;

use super::node::WireGuard;

/// Names of files have 255 bytes at most, and the key is in a file of the Peer's name.
const MAX_NAME: usize = 200;

#[derive(Debug, Args)]
pub(crate) struct ConnectArguments {
    /// Name of the Peer of this machine [default: the host name]
    #[arg(value_parser = peer_name)]
    pub(crate) name: Option<String>,
    /// Address of this machine inside of the mesh; may be repeated [default: the first free one of 10.10.10.0/24]
    #[arg(short = 'a', long = "allowed-ip", value_name = "ADDRESS[/LENGTH]", value_parser = peers::prefix)]
    pub(crate) addresses: Vec<IpNet>,
    /// Send packets to this prefix into the tunnel, too; may be repeated
    #[arg(long = "allowed-ips", value_name = "CIDR", value_delimiter = ',')]
    pub(crate) allowed_ips: Vec<IpNet>,
    /// Node that has a tunnel with this machine and forwards for all others; may be repeated: another one is used when the one in use
    /// does not answer [default: up to three nodes with an endpoint that can be reached]
    #[arg(long = "entry-node", value_name = "NODE")]
    pub(crate) entry_nodes: Vec<String>,
    /// File with the private key, as `wg genkey` prints it [default: peers/NAME.key of the state directory, which is made]
    #[arg(long, value_name = "PATH")]
    pub(crate) private_key: Option<PathBuf>,
    /// Directory of the private keys that are made
    #[arg(long, value_name = "PATH", default_value = "/var/lib/fairlead")]
    pub(crate) state_dir: PathBuf,
    /// Keep the Peer when the connection ends, and with it the address
    #[arg(long)]
    pub(crate) keep: bool,
    /// Name of the WireGuard device
    #[arg(short, long, value_name = "NAME", default_value = CONNECT_INTERFACE)]
    pub(crate) interface: String,
    /// UDP port of the WireGuard device [default: one above 61000 that follows from the key]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) listen_port: Option<u16>,
    /// MTU of the WireGuard device in bytes
    #[arg(long, value_name = "BYTES", default_value = "1380", value_parser = clap::value_parser!(u32).range(1280..=65_535))]
    pub(crate) mtu: u32,
    /// Seconds between keepalives in both directions; 0 sends none
    #[arg(long, value_name = "SECONDS", default_value = "10")]
    pub(crate) persistent_keepalive: u16,
    /// WireGuard implementation
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) wireguard: WireGuard,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// It becomes part of a path.
pub(crate) fn peer_name(text: &str) -> Result<String, String> {
    if is_object_name(text) && text.len() <= MAX_NAME {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "'{text}' is not the name of a Peer: lower-case letters, digits, '-' and '.', at most {MAX_NAME}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_no_other_directory() {
        assert_eq!(peer_name("laptop.example"), Ok("laptop.example".to_owned()));
        for text in ["", "..", "a/b", "Laptop", &"a".repeat(201)] {
            assert!(peer_name(text).is_err(), "{text}");
        }
    }
}
