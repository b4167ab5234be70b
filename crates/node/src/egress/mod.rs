//! Egress NAT: the pods of this node that use the gateways of Egresses.

#[expect(dead_code, reason = "nothing starts it before pods become clients of gateways")]
pub(crate) mod registrar;
