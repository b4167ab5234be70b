//! The Internet in network namespaces itself: kinds of NAT, delays, faults and what is left of it.
#![cfg(test)]

mod common;
mod delay;
mod faults;
mod life;
mod nat64;
mod nat_kinds;
