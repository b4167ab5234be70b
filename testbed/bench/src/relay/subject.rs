//! The relays, and how each and its load are started.

use std::fmt;
use std::path::Path;
use std::process::Command;

use super::peers::Peers;
use super::{LOAD_COMMAND, UDP};

/// Address where every relay listens, in a namespace that has it. Each relay has a port of its own.
pub(super) const RELAY_ADDRESS: &str = "192.0.2.1";
/// The name of the token that `fairlead relay` asks for.
pub(super) const TOKEN: &str = "benchmark";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    Fairlead,
    /// The same program; packets take UDP ports that it has for each pair.
    FairleadUdp,
    Derper,
    IrohRelay,
}

/// Files that relays read. Certificate and key are named as derper wants them: by the address.
pub(super) struct Files<'a> {
    pub(super) directory: &'a Path,
}

impl Files<'_> {
    pub(super) fn certificate(&self) -> std::path::PathBuf {
        self.directory.join(format!("{RELAY_ADDRESS}.crt"))
    }

    pub(super) fn key(&self) -> std::path::PathBuf {
        self.directory.join(format!("{RELAY_ADDRESS}.key"))
    }

    pub(super) fn tokens(&self) -> std::path::PathBuf {
        self.directory.join("tokens")
    }
}

impl Subject {
    pub(super) const ALL: [Self; 4] = [Self::Fairlead, Self::FairleadUdp, Self::Derper, Self::IrohRelay];
    pub(super) const OVER_TCP: [Self; 3] = [Self::Fairlead, Self::Derper, Self::IrohRelay];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Derper => "derper",
            Self::Fairlead => "fairlead",
            Self::FairleadUdp => "fairlead, UDP",
            Self::IrohRelay => "iroh-relay",
        }
    }

    pub(super) fn address(self) -> String {
        let port = match self {
            Self::Derper => 444,
            Self::Fairlead => 443,
            Self::IrohRelay => 445,
            Self::FairleadUdp => 446,
        };
        format!("{RELAY_ADDRESS}:{port}")
    }

    /// The relay, and the arguments of its command.
    pub(super) fn serve(self, peers: &Peers, files: &Files<'_>, clients: usize) -> Command {
        let mut command = match self {
            Self::Derper => Command::new(&peers.derper),
            Self::Fairlead | Self::FairleadUdp => Command::new(&peers.fairlead),
            Self::IrohRelay => Command::new(&peers.iroh_relay),
        };
        match self {
            Self::Derper => command
                .args(["-a", &self.address(), "-certmode", "manual", "-hostname", RELAY_ADDRESS])
                .args(["-http-port", "-1", "-stun=false", "-certdir"])
                .arg(files.directory)
                .arg("-c")
                .arg(files.directory.join("derper.json")),
            Self::Fairlead | Self::FairleadUdp => command
                .args([
                    "relay",
                    "--stun-addr",
                    &self.stun_address(),
                    "--metrics-addr",
                    "[::]:0",
                    "--health-addr",
                    "[::]:0",
                ])
                .args(["--addr", &self.address(), "--name", RELAY_ADDRESS, "--tls-cert-file"])
                .arg(files.certificate())
                .arg("--tls-private-key-file")
                .arg(files.key())
                .arg("--token-file")
                .arg(files.tokens())
                .args(["--max-clients", &clients.max(1).to_string()]),
            Self::IrohRelay => {
                command.args(["serve", &self.address()]).arg(files.certificate()).arg(files.key())
            }
        };
        command
    }

    /// Load for the relay, by its own client.
    pub(super) fn load(self, peers: &Peers, files: &Files<'_>, pairs: usize) -> Command {
        let mut command = match self {
            Self::Derper => Command::new(&peers.derper_load),
            Self::Fairlead | Self::FairleadUdp => Command::new(&peers.fairlead_load),
            Self::IrohRelay => Command::new(&peers.iroh_relay),
        };
        match self {
            Self::Derper => {}
            Self::Fairlead | Self::FairleadUdp => {
                command.arg(LOAD_COMMAND);
            }
            Self::IrohRelay => {
                command.arg("load");
            }
        }
        command.args([&self.address(), &pairs.to_string()]).env("SSL_CERT_FILE", files.certificate());
        if self == Self::FairleadUdp {
            command.arg(UDP);
        }
        command
    }

    /// Address and port where `fairlead relay` answers STUN requests; without one (port 0) it has no UDP ports.
    fn stun_address(self) -> String {
        let port = if self == Self::FairleadUdp { 3478 } else { 0 };
        format!("{RELAY_ADDRESS}:{port}")
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
