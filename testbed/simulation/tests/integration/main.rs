//! Agents and a relay in one process, on a clock of the test.
#![cfg(test)]

mod idle;
mod nats;
