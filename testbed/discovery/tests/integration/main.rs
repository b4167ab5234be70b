//! The discovery server, judged by the published client of the protocol.
#![cfg(test)]

mod judge;
mod replicas;
