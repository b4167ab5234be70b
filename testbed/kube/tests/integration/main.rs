//! A real API server, and what it says of `deploy/`.
#![cfg(test)]

mod control_plane;
mod crds;
mod egress;
