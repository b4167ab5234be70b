//! Switches of egress, which flags of the node program set.

/// Flags of the node program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EgressSwitches {
    /// Egress gateways are set up for pods (`--enable-egress`). Otherwise a pod that asks for them does not start.
    pub enabled: bool,
    /// Default of `spec.originatingOnly` for Egresses that do not set it (`--enable-originating-only`).
    pub originating_only: bool,
}

impl Default for EgressSwitches {
    fn default() -> Self {
        Self { enabled: true, originating_only: false }
    }
}
