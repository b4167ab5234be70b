//! The plugin as a container runtime calls it, against a fake node program.
#![cfg(test)]

mod corpus;
mod fake;
mod plugin;
