//! Types that all of the mesh uses: what it is decided from, and what does not work.

pub mod inputs;
pub mod nat64;
pub mod problem;
