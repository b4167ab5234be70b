//! The configuration of a Peer's machine: for `wg-quick`, for scripts, as a QR code.

use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_keys::PrivateKey;
use fairlead_members::configuration::Configuration;
use ipnet::IpNet;
use qrcode::QrCode;
use qrcode::render::unicode::Dense1x2;
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::configuration;
use crate::arguments::peers::MachineArguments;
use crate::arguments::queries::ConfigurationFormat;
use crate::output::{self, Output, render};

/// MTU in bytes, which every uplink carries that Fairlead supports: 1,460 bytes, without 80 of WireGuard over IPv6.
const MTU: u16 = 1380;

/// Everything a machine needs.
pub(super) struct Machine {
    /// Known only where it was made, or to who has it.
    pub(super) private_key: Option<String>,
    pub(super) addresses: Vec<IpNet>,
    pub(super) dns: Vec<IpAddr>,
    /// The domain of Services, for the resolver.
    pub(super) domain: String,
    pub(super) configuration: Configuration,
}

impl Machine {
    /// In a format.
    ///
    /// # Errors
    /// It cannot be written as YAML.
    pub(super) fn print(&self, format: ConfigurationFormat) -> anyhow::Result<String> {
        match format {
            ConfigurationFormat::Json => render(Output::Json, || self.data(), |_| String::new()),
            ConfigurationFormat::Wireguard => Ok(self.text()),
            ConfigurationFormat::Yaml => render(Output::Yaml, || self.data(), |_| String::new()),
        }
    }

    /// For the camera of a phone.
    ///
    /// # Errors
    /// It is too long.
    pub(super) fn qr(&self) -> anyhow::Result<String> {
        let code = QrCode::new(self.text())
            .context("the configuration is too long for a QR code: use entry nodes, or fewer prefixes")?;
        Ok(format!("{}\n", code.render::<Dense1x2>().build()))
    }

    fn text(&self) -> String {
        let mut text = String::from("[Interface]\n");
        match &self.private_key {
            Some(key) => text.push_str(&format!("PrivateKey = {key}\n")),
            None => text.push_str("# PrivateKey = (the private key of this machine)\n"),
        }
        for address in &self.addresses {
            text.push_str(&format!("Address = {address}\n"));
        }
        if !self.dns.is_empty() {
            let servers: Vec<String> = self.dns.iter().map(ToString::to_string).collect();
            text.push_str(&format!("DNS = {}, {}\n", servers.join(", "), self.domain));
        }
        text.push_str(&format!("MTU = {MTU}\n\n"));
        text.push_str(&configuration::text(&self.configuration));
        text
    }

    fn data(&self) -> Value {
        let mut data = configuration::data(&self.configuration);
        if let Some(data) = data.as_object_mut() {
            let interface = json!({
                "privateKey": self.private_key, "addresses": self.addresses, "dns": self.dns,
                "searchDomains": if self.dns.is_empty() { Vec::new() } else { vec![&self.domain] }, "mtu": MTU,
            });
            data.insert("interface".to_owned(), interface);
        }
        data
    }
}

/// The private key of the file that the user named.
pub(super) fn read_private_key(machine: &MachineArguments) -> anyhow::Result<Option<PrivateKey>> {
    machine.private_key_file.as_deref().map(private_key_of).transpose()
}

/// Private key in a file, as `wg genkey` prints it.
///
/// # Errors
/// The file cannot be read, or has no key.
pub fn private_key_of(path: &Path) -> anyhow::Result<PrivateKey> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read private key file {}", path.display()))?;
    text.trim().parse().with_context(|| format!("cannot use private key file {}", path.display()))
}

/// Prints the configuration of the Peer's machine; what is left out goes to standard error.
pub(super) fn print(
    cluster: &Cluster,
    peer: &str,
    through: Option<&str>,
    private_key: Option<&PrivateKey>,
    arguments: &MachineArguments,
) -> anyhow::Result<ExitCode> {
    let configuration = cluster.configuration(peer, through, &arguments.allowed_ips)?;
    for problem in &configuration.problems {
        output::error(problem);
    }
    if configuration.peers.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    let has_services = configuration.peers.iter().any(|peer| cluster.carries_services(peer));
    let dns = if arguments.no_dns || !has_services { Vec::new() } else { cluster.dns.clone() };
    let machine = Machine {
        private_key: private_key.map(PrivateKey::to_base64),
        addresses: cluster.addresses(peer),
        dns,
        domain: arguments.cluster_domain.clone(),
        configuration,
    };
    let text = if arguments.qr { machine.qr()? } else { machine.print(arguments.output)? };
    output::print(&text);
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use fairlead_keys::PublicKey;
    use fairlead_members::configuration::ConfiguredPeer;

    use super::*;

    fn machine() -> Machine {
        let peer = ConfiguredPeer {
            name: "gate".to_owned(),
            public_key: PublicKey([1; 32]),
            preshared_key: None,
            allowed_ips: vec!["10.64.0.0/16".parse().unwrap()],
            endpoint: Some("192.0.2.1:51820".to_owned()),
            persistent_keepalive: 25,
        };
        Machine {
            private_key: Some(PublicKey([7; 32]).to_string()),
            addresses: vec!["10.10.10.1/32".parse().unwrap()],
            dns: vec!["10.96.0.10".parse().unwrap()],
            domain: "cluster.local".to_owned(),
            configuration: Configuration { peers: vec![peer], problems: Vec::new() },
        }
    }

    #[test]
    fn a_configuration_is_complete() {
        let (private, public) = (PublicKey([7; 32]), PublicKey([1; 32]));
        assert_eq!(
            machine().text(),
            format!(
                "[Interface]\nPrivateKey = {private}\nAddress = 10.10.10.1/32\nDNS = 10.96.0.10, cluster.local\nMTU = 1380\n\n\
                 # gate\n[Peer]\nPublicKey = {public}\nAllowedIPs = 10.64.0.0/16\nEndpoint = 192.0.2.1:51820\nPersistentKeepalive = 25\n\n"
            )
        );
        let json: Value = serde_json::from_str(&machine().print(ConfigurationFormat::Json).unwrap()).unwrap();
        assert_eq!((&json["interface"]["mtu"], &json["peers"][0]["name"]), (&json!(1380), &json!("gate")));
    }

    #[test]
    fn a_private_key_that_is_not_known_is_left_to_the_user() {
        let without = Machine { private_key: None, dns: Vec::new(), ..machine() }.text();
        assert!(without.contains("# PrivateKey") && !without.contains("DNS"), "{without}");
    }

    #[test]
    fn a_qr_code_is_square_and_as_large_as_its_version() {
        let code = machine().qr().unwrap();
        let lines: Vec<&str> = code.trim_end_matches('\n').lines().collect();
        let width = lines[0].chars().count();
        assert!(lines.iter().all(|line| line.chars().count() == width));
        // Two modules in each character; a version has 17 and four for each number, and a quiet zone of four on each side.
        assert_eq!((width - 8 - 17) % 4, 0, "{width}");
        assert_eq!(lines.len(), width.div_ceil(2));
    }
}
