//! Sets of addresses.

/// Addresses that no new block may have.
pub use fairlead_address::PrefixSet as AddressSet;
