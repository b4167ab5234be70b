//! `fairlead peer`: Peers outside of the cluster, the configurations of their machines, and nodes that are removed for good.

mod add;
mod cluster;
pub(crate) mod configuration;
mod list;
mod machine;
mod revoke;
mod secret;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_api::resources::KiloPeer;
use fairlead_members::preshared_keys;
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject};

use crate::arguments::peer::PeerCommand;
use crate::arguments::peers::{PeerRemove, PeerShow};
use crate::query::current_thread;

pub use self::add::{RANGE, clamped, first_free, new_private_key, taken};
pub use self::cluster::Cluster;
pub(crate) use self::cluster::{configuration_of, endpoints};
pub use self::machine::private_key_of;

/// Runs a subcommand.
///
/// # Errors
/// The API server refuses or does not answer, there is no such object, or arguments contradict what there is.
pub fn run(command: &PeerCommand) -> anyhow::Result<ExitCode> {
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
    let private_key = machine::read_private_key(machine)?;
    let cluster = Cluster::read(&machine.api.client().await?).await?;
    machine::print(&cluster, name, through.as_deref(), private_key.as_ref(), machine)
}
