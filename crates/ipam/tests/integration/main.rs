//! Addresses and blocks: random failures of a whole cluster, and known defects of Coil.
#![cfg(test)]

mod coil_defects;
mod model;
