//! Ways of clients to their Egresses.

/// Destination of the packets of a client to an Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// To these gateways, at which the client is registered (may be empty: then nothing leaves; an unreachable route answers). Of both
    /// families; at most [`fairlead_fou::MAX_GATEWAYS`] of each.
    Gateways(Vec<fairlead_fou::Gateway>),
    /// To the Service's address: the gateways are Coil's, which register clients themselves (they watch pods) and refuse connections to
    /// [`fairlead_api::names::EGRESS_REGISTRATION_PORT`].
    Service,
    /// Not known yet since the program started: gateways are being asked, or the API server does not answer. What the kernel has from
    /// before stays. Only clients of [`super::Registrar::set_clients`] have this, for at most 10 s once EndpointSlices are known.
    Unknown,
}
