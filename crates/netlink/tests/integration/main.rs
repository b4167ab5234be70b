//! Netlink against this machine's kernel, and the corpora of its parsers.
#![cfg(test)]

mod corpus;
mod nft;
mod route;
