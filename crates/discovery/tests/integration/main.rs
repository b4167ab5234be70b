//! The discovery server and its client over loopback.
#![cfg(test)]

mod bed;
mod client;
mod corpus;
mod server;
