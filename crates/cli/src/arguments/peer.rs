//! Arguments of `fairlead peer`.

use clap::{Args, Subcommand};
use fairlead_keys::PublicKey;

use super::peers::{PeerAdd, PeerList, PeerRemove, PeerShow};
use crate::api::ApiArguments;

/// Subcommands of `fairlead peer`.
#[derive(Debug, Subcommand)]
pub enum PeerCommand {
    /// Make keys, create a Peer and print the WireGuard configuration of its machine
    #[command(
        after_help = "The private key is made here and printed once; the cluster gets the public key. For a phone: --qr. With --entry-node \
        the machine has a tunnel with that node alone and reaches pods, Services and nodes through it. Given several times, the first is \
        printed; `fairlead peer show NAME --through NODE` prints the configuration for another one.\n\nExit codes: 0 created, 1 failed, 2 \
        invalid arguments."
    )]
    Add(PeerAdd),
    /// List Peers, where they enter the cluster, and what is left out of them
    #[command(after_help = "Exit codes: 0 listed, 1 query failed, 2 invalid arguments.")]
    List(PeerList),
    /// Delete a Peer: all nodes close its tunnel
    #[command(
        after_help = "Exit codes: 0 deleted, 1 there is no such Peer or the request failed, 2 invalid arguments."
    )]
    Remove(PeerRemove),
    /// Print the WireGuard configuration of a Peer's machine again, for this entry node or another one
    #[command(
        after_help = "The cluster does not know the private key: it is printed only if --private-key-file names it.\n\nExit codes: 0 printed, \
        1 there is no such Peer or it is left out, 2 invalid arguments."
    )]
    Show(PeerShow),
    /// Remove a node from the mesh for good: no node accepts its name or its key any more
    #[command(
        after_help = "Adds the node to spec.revokedPeers of the WireKubeMesh and deletes its WireKubePeer. All nodes end the tunnel to it \
        within seconds, refuse its key also under another name, and refuse its name with another key, whatever tells of it: the API \
        server, a discovery service, a file. The node keeps its AddressBlocks until its Node is deleted.\n\nExit codes: 0 revoked, \
        1 failed, 2 invalid arguments."
    )]
    Revoke(RevokeArguments),
    /// Take a node back that was revoked
    Unrevoke(RevokeArguments),
}

/// Arguments of `fairlead peer revoke` and `unrevoke`.
#[derive(Debug, Args)]
pub struct RevokeArguments {
    #[command(flatten)]
    pub(crate) api: ApiArguments,
    /// Name of the node
    #[arg(value_name = "NODE")]
    pub(crate) name: String,
    /// WireGuard public key of a node that has no WireKubePeer (discovery, --peers)
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<PublicKey>,
}
