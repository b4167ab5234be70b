//! Foo-over-UDP tunnels in network namespaces: ours, the kernel's and Coil's.
#![cfg(test)]

mod bed;
mod coil_peer;
mod kernel_peer;
mod origins;
mod tunnels;
