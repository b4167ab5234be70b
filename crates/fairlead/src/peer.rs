//! `fairlead peer`: Peers outside of the cluster, the configurations of their machines, and nodes that are removed for good.

mod add;
mod cluster;
mod list;
mod machine;
mod revoke;
mod secret;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_api::resources::KiloPeer;
use fairlead_keys::PrivateKey;
use fairlead_members::preshared_keys;
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject};

use self::machine::Machine;
use crate::arguments::{MachineArguments, PeerCommand, PeerRemove, PeerShow};
use crate::logging;
use crate::status::current_thread;

pub(crate) use self::add::{RANGE, clamped, first_free, new_private_key, taken};
pub(crate) use self::cluster::{Cluster, configuration_of, endpoints};

/// Runs one of the commands.
pub(crate) fn run(command: &PeerCommand) -> anyhow::Result<ExitCode> {
    match command {
        PeerCommand::Add(arguments) => current_thread(add::run(arguments)),
        PeerCommand::List(arguments) => current_thread(list::run(arguments)),
        PeerCommand::Remove(arguments) => current_thread(remove(arguments)),
        PeerCommand::Revoke(arguments) => current_thread(revoke::revoke(arguments)).map(done),
        PeerCommand::Show(arguments) => current_thread(show(arguments)),
        PeerCommand::Unrevoke(arguments) => current_thread(revoke::unrevoke(arguments)).map(done),
    }
}

fn done(text: String) -> ExitCode {
    // A closed pipe is not a failure.
    drop(writeln!(std::io::stdout(), "{text}"));
    ExitCode::SUCCESS
}

async fn remove(arguments: &PeerRemove) -> anyhow::Result<ExitCode> {
    let client = arguments.api.client().await?;
    let kilo = ApiResource::erase::<KiloPeer>(&());
    let peers = Api::<DynamicObject>::all_with(client.clone(), &kilo);
    let peer = peers.get_opt(&arguments.name).await;
    let peer = peer.with_context(|| format!("cannot read Peer '{}'", arguments.name))?;
    let deleted = peers.delete(&arguments.name, &DeleteParams::default()).await;
    deleted.with_context(|| format!("cannot delete Peer '{}'", arguments.name))?;
    // That of its name is its own. Under another one an administrator may have a key for several.
    let key = peer.as_ref().and_then(preshared_keys::reference).filter(|key| *key == arguments.name);
    if let Some(key) = key {
        secret::remove(&client, key).await?;
    }
    // A closed pipe is not a failure.
    drop(writeln!(std::io::stdout(), "Peer {} is deleted", arguments.name));
    Ok(ExitCode::SUCCESS)
}

async fn show(arguments: &PeerShow) -> anyhow::Result<ExitCode> {
    let PeerShow { name, through, machine } = arguments;
    let private_key = read_private_key(machine)?;
    let cluster = Cluster::read(&machine.api.client().await?).await?;
    print(&cluster, name, through.as_deref(), private_key.as_ref(), machine)
}

/// The private key of the file that the user named.
fn read_private_key(machine: &MachineArguments) -> anyhow::Result<Option<PrivateKey>> {
    machine.private_key_file.as_deref().map(private_key_of).transpose()
}

/// The private key in a file.
pub(crate) fn private_key_of(path: &Path) -> anyhow::Result<PrivateKey> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read private key file {}", path.display()))?;
    text.trim().parse().with_context(|| format!("cannot use private key file {}", path.display()))
}

/// Prints the configuration of the Peer's machine; what is left out goes to standard error.
fn print(
    cluster: &Cluster,
    peer: &str,
    through: Option<&str>,
    private_key: Option<&PrivateKey>,
    arguments: &MachineArguments,
) -> anyhow::Result<ExitCode> {
    let configuration = cluster.configuration(peer, through, &arguments.allowed_ips)?;
    for problem in &configuration.problems {
        logging::error(problem);
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
    // A closed pipe (`| head`) is not a failure.
    drop(std::io::stdout().write_all(text.as_bytes()));
    Ok(ExitCode::SUCCESS)
}
