//! A relay and its clients over sockets of the loopback interface.
#![cfg(test)]

mod bed;
mod corpus;
mod judge;
mod server;
