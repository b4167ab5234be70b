//! Two tunnels against each other.
#![cfg(test)]

mod crossing;
mod handshakes;
mod loss;
mod support;
mod timers;
