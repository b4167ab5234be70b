//! Real nodes with `deploy/` applied.
#![cfg(test)]

mod bed;
mod chained;
mod control_plane;
mod egress;
mod mesh;
mod outages;
mod router;
