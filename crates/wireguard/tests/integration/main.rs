//! The protocol of WireGuard against itself and another implementation, with time and randomness of the test.
#![cfg(test)]

mod gotatun;
mod memory;
mod tunnel;
