//! Port mapping against miniupnpd, a fake metadata service of EC2, and gateways that lie.
#![cfg(test)]

mod common;
mod ec2;
mod lies;
mod miniupnpd;
