//! A Debian kernel in QEMU, and what runs only there.
#![cfg(test)]

mod dataplane;
mod vm;
