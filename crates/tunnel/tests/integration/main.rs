//! The embedded WireGuard device against itself, wireguard-go and the kernel's.
#![cfg(test)]

mod common;
mod corpus;
mod device;
mod faults;
mod handover;
mod kernel_judge;
mod offload;
mod path_socket;
mod wireguard_go;
mod wireguard_go_faults;
