//! Real nodes with `deploy/` applied.
#![cfg(test)]

mod bed;
mod chained;
mod egress;
mod mesh;
mod outages;
mod router;
