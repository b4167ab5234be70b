//! Desired kernel state: compared with what the kernel has, and applied as one batch of what differs.
//!
//! * [`routing_ids`]: table IDs, rule priority and protocol, where an administrator chose others.
//! * [`pods`]: the veth pair of a pod, its addresses and routes, and the kernel's state of pods that exist.
//! * [`routes`]: whole routing tables and rules (pods, export, mesh).
//! * [`source_addresses`]: source addresses of egress gateways on this node: routes to them, and answers for them on uplinks.
//! * [`uplink`]: the node's own links: MTU towards other nodes, sysctls of forwarding.
//! * [`masquerade`]: the nftables table that translates the sources of packets that leave the cluster to the node's address.
//! * [`mesh`]: the nftables table with its sets, the rule and table that lead into the WireGuard device.
//! * [`encapsulation`]: the IP tunnels inside of a location, and who may send to them.
//! * [`kernel_watch`]: changes of the kernel's network state, for all that reconcile a part of it.
//! * [`forwarding`]: rules in iptables' chain `FORWARD` where its policy is to drop.
//! * [`egress_client`]: rules and routes into the tunnels to egress gateways, in the namespace of a pod.
//! * [`egress_gateway`]: rules, routes and the nftables table of an egress gateway, in the namespace of its pod.
//! * [`nft_table`]: a whole nftables table, compared and changed in one transaction.
//! * [`wireguard`]: one trait over the kernel's WireGuard and the embedded one.
//!
//! It decides no policy: `ipam`, `topology` and `path` compute the desired state, the node program passes it here. The
//! kernel's dump is the truth, not our memory, so a restart adopts what is there; applying the same state twice
//! sends nothing (`fairlead_netlink::changes_sent` counts). Nothing is cleaned up on exit.

pub mod cleanup;
pub mod egress_client;
pub mod egress_gateway;
pub mod encapsulation;
pub mod forwarding;
pub mod kernel_tables;
pub mod kernel_watch;
pub mod masquerade;
pub mod mesh;
pub mod nft_table;
pub mod pods;
pub mod routes;
pub mod routing_ids;
pub mod source_addresses;
pub mod uplink;
pub mod wireguard;
