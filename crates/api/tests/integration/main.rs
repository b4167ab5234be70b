//! Custom resources as users write them, and the corpora of their parsers.
#![cfg(test)]

mod corpus;
mod resources;
