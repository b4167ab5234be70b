//! Custom resources: what users write, what programs tell each other, and where `deploy/crds` comes from.
//!
//! Names, groups and shapes are those of Coil v2, WireKube and Kilo, so that existing manifests keep working.
//! Everything the API server can check is checked there (schema and CEL rules, with messages for people);
//! the typed accessors here parse again, because a program must not trust what an older schema let in.
//!
//! The `///` comments of fields are what `kubectl explain` shows; [`not_implemented`] lists what nothing acts on yet.
//! [`definitions`] gives the manifests;
//! `cargo run -p fairlead-api --features resources --example generate_crds` writes them.

#![expect(unreachable_pub, reason = "the schema derive repeats each public struct inside a function")]
#![expect(clippy::duplicated_attributes, reason = "printer columns of the same type are not duplicates")]

mod address_block;
mod address_pool;
mod block_request;
mod definitions;
mod discovery;
mod egress;
mod kilo_peer;
mod location;
mod node_annotations;
pub mod not_implemented;
mod relay;
mod rules;
mod wirekube_mesh;
mod wirekube_peer;

pub use address_block::{AddressBlock, AddressBlockFields};
pub use address_pool::{
    AddressPool, AddressPoolSpec, AddressPoolStatus, InvalidSubnet, MAX_LISTED_NODES, NodeBlocks, SubnetSet,
};
pub use block_request::{
    BlockRequest, BlockRequestCondition, BlockRequestConditionType, BlockRequestOutcome, BlockRequestSpec,
    BlockRequestStatus, ConditionStatus, InvalidName,
};
pub use definitions::definitions;
pub use discovery::Discovery;
pub use egress::{
    DEFAULT_DRAIN_SECONDS, Egress, EgressDisruptionBudget, EgressHealthCheck, EgressPodMetadata,
    EgressPodTemplate, EgressSelector, EgressSourceAddress, EgressSpec, EgressStatus, SessionAffinity,
};
pub use kilo_peer::{DnsOrIp, KiloPeer, KiloPeerSpec, PeerEndpoint, PresharedKeyRef};
pub use location::{Encapsulation, Granularity, InvalidAnnotation, NodeLocation, Topology};
pub use node_annotations::NodeFilters;
pub use relay::{
    ExternalRelay, ManagedRelay, Relay, RelayMode, RelayProvider, RelayResources, RelayServiceType,
    RelayTransport, SecretRef,
};
pub use wirekube_mesh::{
    AutoAllowedIps, BirthdayAttack, DeletedPeer, GRANULARITY_IN_USE, Grant, KeptMeshIp, LocalSubnetPolicy,
    MAX_DELETED_PEERS, NatTraversal, RevokedPeer, Routing, Toggle, WireKubeMesh, WireKubeMeshSpec,
    WireKubeMeshStatus,
};
pub use wirekube_peer::{
    CandidateType, EndpointDiscoveryMethod, EntryTerm, IceCandidate, MAX_ENTRY_TERM, NatType, NodeFacts,
    ObservedEndpoint, PeerCounts, PeerTransport, PortPrediction, TransportMode, WireGuardImplementation,
    WireKubePeer, WireKubePeerSpec, WireKubePeerStatus,
};

#[cfg(test)]
mod tests;
