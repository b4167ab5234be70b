//! The messages of what is in front of a host, without I/O: bytes come from the caller and go back to the caller.
//!
//! [`nat_pmp`], [`pcp`] and [`upnp`] are spoken with gateways, [`imds`] with the metadata service of EC2.

pub mod imds;
pub mod nat_pmp;
pub mod pcp;
pub mod upnp;
