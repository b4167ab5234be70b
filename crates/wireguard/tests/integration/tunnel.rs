//! Two tunnels against each other.

mod corpus;
mod crossing;
mod handshakes;
mod loss;
mod operations;
mod support;
mod timers;
mod world;
