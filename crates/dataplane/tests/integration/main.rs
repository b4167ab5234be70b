//! The data plane against this machine's kernel, in network namespaces of each test.
#![cfg(test)]

mod beside;
mod beside_host;
mod bird;
mod cleanup;
mod corpus;
mod egress_client;
mod encapsulation;
mod forwarding;
mod kernel_wireguard;
mod masquerade;
mod mesh_common;
mod mesh_control_plane;
mod mesh_guard;
mod mesh_guard_routes;
mod mesh_guard_routes_bed;
mod mesh_idle;
mod mesh_numbers;
mod mesh_packets;
mod mesh_sources;
mod mesh_table;
mod no_ipv6;
mod pods;
mod pods_adopted;
mod pods_common;
mod pods_interfaces;
mod pods_source_check;
mod router;
mod routes;
mod routes_unchanged;
mod source_addresses;
mod uplink;
mod wireguard_common;
mod wireguard_embedded;
mod wireguard_marked;
mod wireguard_open;
