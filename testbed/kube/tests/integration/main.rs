//! A real API server, and what it says of `deploy/`.
#![cfg(test)]

mod control_plane;
mod controller;
mod controller_bed;
mod crds;
mod egress;
mod peer_facts;
mod reads;
