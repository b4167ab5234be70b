//! The gateway program in network namespaces, with a fake API server.
#![cfg(test)]

mod bed;
mod coil_gateway;
mod corpus;
mod flow_copies;
mod flows;
mod gateway;
mod source_addresses;
mod uses;
