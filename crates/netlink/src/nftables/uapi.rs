//! Numbers of `linux/netfilter/nf_tables.h` and `linux/netfilter.h`.

/// `NF_ACCEPT`
pub(super) const NF_ACCEPT: u32 = 1;
/// `NFPROTO_INET`: both address families in one table.
pub(super) const NFPROTO_INET: u8 = 1;
/// `NFT_SET_INTERVAL`
pub(super) const SET_INTERVAL: u32 = 4;
/// `NFT_SET_EVAL`: rules add elements.
pub(super) const SET_DYNAMIC: u32 = 0x20;
/// `NFT_SET_MAP`
pub(super) const SET_MAP: u32 = 8;
/// `NFT_SET_TIMEOUT`
pub(super) const SET_TIMEOUT: u32 = 16;
/// `NFT_SET_ELEM_INTERVAL_END`
pub(super) const ELEMENT_INTERVAL_END: u32 = 1;

/// `NFTA_TABLE_*`
pub(super) mod table {
    pub(in crate::nftables) const NAME: u16 = 1;
    pub(in crate::nftables) const FLAGS: u16 = 2;
    pub(in crate::nftables) const HANDLE: u16 = 4;
}

/// `NFTA_CHAIN_*` and `NFTA_HOOK_*`
pub(super) mod chain {
    pub(in crate::nftables) const TABLE: u16 = 1;
    pub(in crate::nftables) const NAME: u16 = 3;
    pub(in crate::nftables) const HOOK: u16 = 4;
    pub(in crate::nftables) const POLICY: u16 = 5;
    pub(in crate::nftables) const TYPE: u16 = 7;
    pub(in crate::nftables) const HOOK_NUMBER: u16 = 1;
    pub(in crate::nftables) const HOOK_PRIORITY: u16 = 2;
}

/// `NFTA_RULE_*`
pub(super) mod rule {
    pub(in crate::nftables) const TABLE: u16 = 1;
    pub(in crate::nftables) const CHAIN: u16 = 2;
    pub(in crate::nftables) const EXPRESSIONS: u16 = 4;
    pub(in crate::nftables) const USERDATA: u16 = 7;
    /// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`
    pub(in crate::nftables) const EXPRESSION_NAME: u16 = 1;
    pub(in crate::nftables) const EXPRESSION_DATA: u16 = 2;
    /// `NFTA_COUNTER_BYTES`, `NFTA_COUNTER_PACKETS`
    pub(in crate::nftables) const COUNTER_BYTES: u16 = 1;
    pub(in crate::nftables) const COUNTER_PACKETS: u16 = 2;
    /// Type of our own entry in the user data (type, length, value, a byte each but the value). `nft` knows 0, the
    /// comment, and 1 and passes over all others.
    pub(in crate::nftables) const USERDATA_FINGERPRINT: u8 = 0xfa;
}

/// `NFTA_SET_*`
pub(super) mod set {
    pub(in crate::nftables) const TABLE: u16 = 1;
    pub(in crate::nftables) const NAME: u16 = 2;
    pub(in crate::nftables) const FLAGS: u16 = 3;
    pub(in crate::nftables) const KEY_TYPE: u16 = 4;
    pub(in crate::nftables) const KEY_LENGTH: u16 = 5;
    pub(in crate::nftables) const DATA_TYPE: u16 = 6;
    pub(in crate::nftables) const DATA_LENGTH: u16 = 7;
    pub(in crate::nftables) const DESCRIPTION: u16 = 9;
    /// In a description: `NFTA_SET_DESC_SIZE`
    pub(in crate::nftables) const SIZE: u16 = 1;
    pub(in crate::nftables) const ID: u16 = 10;
}

/// `NFTA_SET_ELEM_LIST_*` and `NFTA_SET_ELEM_*`
pub(super) mod element {
    pub(in crate::nftables) const LIST_TABLE: u16 = 1;
    pub(in crate::nftables) const LIST_SET: u16 = 2;
    pub(in crate::nftables) const LIST_ELEMENTS: u16 = 3;
    pub(in crate::nftables) const LIST_ELEMENT: u16 = 1;
    pub(in crate::nftables) const KEY: u16 = 1;
    pub(in crate::nftables) const DATA: u16 = 2;
    pub(in crate::nftables) const FLAGS: u16 = 3;
    /// In milliseconds: how long an element stays in all, and from now on.
    pub(in crate::nftables) const TIMEOUT: u16 = 4;
    pub(in crate::nftables) const EXPIRATION: u16 = 5;
    pub(in crate::nftables) const DATA_VALUE: u16 = 1;
}
