//! The discovery server, judged by the published client of the protocol, and the client at the published server.
#![cfg(test)]

mod another_make;
mod judge;
mod replicas;
