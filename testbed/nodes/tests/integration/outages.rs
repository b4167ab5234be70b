//! Outages that real nodes in a mesh survive: power cuts, deleted Nodes, etcd restored from a backup, Fairlead uninstalled and installed
//! again. The cluster is the one of `tests/mesh`.

use crate::bed;

mod nodes;
mod restore;
mod uninstall;

static BED: bed::Bed = bed::Bed::new(bed::three_nodes_in_a_mesh);
