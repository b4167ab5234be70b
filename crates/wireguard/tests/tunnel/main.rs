//! Two tunnels against each other.
#![cfg(test)]

mod handshakes;
mod loss;
mod support;
mod timers;
