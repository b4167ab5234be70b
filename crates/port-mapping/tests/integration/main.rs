//! Port mapping against miniupnpd, a fake metadata service of EC2, and gateways that lie; and what fuzz targets keep.
#![cfg(test)]

mod common;
mod corpus;
mod ec2;
mod lies;
mod miniupnpd;
