//! Fairlead on real nodes: two on one network, the third behind a NAT router, joined by the mesh; IPv4 and IPv6.
//!
//! Real: kubelet, containerd, runc, kube-proxy (nftables), the API server with its controllers and scheduler, CoreDNS, and
//! everything of `deploy/`. Shared: one kernel, which has no WireGuard, so tunnels run inside the node programs.
//!
//! All tests share one cluster. Those that break something run alone; those that take whole nodes, etcd or Fairlead away
//! are in `tests/outages`.

use crate::bed;

mod kernel;
mod membership;
mod operators;
mod pools;
mod relay;
mod restarts;
mod services;
mod upgrade;
mod workloads;

static BED: bed::Bed = bed::Bed::new(bed::three_nodes_in_a_mesh);
