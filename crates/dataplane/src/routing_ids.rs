//! Table IDs, rule priority and protocol of the routes and rules of pods. Administrators can choose others where these
//! are in use, as in Coil.

use fairlead_api::names::{
    ROUTE_PROTOCOL, ROUTE_PROTOCOL_ROUTER, RULE_PRIORITY_MESH, RULE_PRIORITY_MESH_PAST,
    RULE_PRIORITY_MESH_PODS, RULE_PRIORITY_PODS, TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE, TABLE_EXPORT,
    TABLE_MESH, TABLE_MESH_GUARD, TABLE_MESH_GUARD_NODES, TABLE_PODS,
};
use fairlead_netlink::route::{TABLE_DEFAULT, TABLE_LOCAL, TABLE_MAIN};

/// `RTPROT_STATIC` (`linux/rtnetlink.h`). It and those below belong to the kernel and to administrators.
pub(crate) const PROTOCOL_STATIC: u32 = 4;

/// Routing IDs that are distinct and not reserved for another use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutingIds {
    table_pods: u32,
    rule_priority: u32,
    table_export: u32,
    protocol: u8,
}

/// Routing IDs as configured, not validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawRoutingIds {
    /// Table with a route to each pod of the node.
    pub table_pods: u32,
    /// Priority of the rule that looks that table up.
    pub rule_priority: u32,
    /// Table with the blocks of the node, for routing daemons.
    pub table_export: u32,
    /// Protocol of all these routes and rules.
    pub protocol: u32,
}

impl Default for RawRoutingIds {
    fn default() -> Self {
        Self {
            table_pods: TABLE_PODS,
            rule_priority: RULE_PRIORITY_PODS,
            table_export: TABLE_EXPORT,
            protocol: ROUTE_PROTOCOL.into(),
        }
    }
}

/// A routing ID that is reserved or out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {number} {reason}")]
pub struct Reserved {
    /// Name of the ID: "rule priority", "route protocol".
    pub what: &'static str,
    /// The number.
    pub number: u32,
    /// Reason why it cannot be used; follows the number in the text.
    pub reason: &'static str,
}

impl Default for RoutingIds {
    fn default() -> Self {
        Self {
            table_pods: TABLE_PODS,
            rule_priority: RULE_PRIORITY_PODS,
            table_export: TABLE_EXPORT,
            protocol: ROUTE_PROTOCOL,
        }
    }
}

impl TryFrom<RawRoutingIds> for RoutingIds {
    type Error = Reserved;

    fn try_from(raw: RawRoutingIds) -> Result<Self, Reserved> {
        let RawRoutingIds { table_pods, rule_priority, table_export, protocol } = raw;
        for (what, number) in [("table of pods", table_pods), ("export table", table_export)] {
            if let Some(reason) = reserved_table(number) {
                return Err(Reserved { what, number, reason });
            }
        }
        if table_export == table_pods {
            return Err(Reserved {
                what: "export table",
                number: table_export,
                reason: "is the table of pods",
            });
        }
        if let Some(reason) = reserved_priority(rule_priority) {
            return Err(Reserved { what: "rule priority", number: rule_priority, reason });
        }
        let reserved = |reason| Reserved { what: "route protocol", number: protocol, reason };
        match u8::try_from(protocol) {
            Err(_) => Err(reserved("is more than 255")),
            Ok(_) if protocol <= PROTOCOL_STATIC => {
                Err(reserved("belongs to the kernel and to administrators"))
            }
            Ok(ROUTE_PROTOCOL_ROUTER) => Err(reserved("belongs to the built-in router")),
            Ok(protocol) => Ok(Self { table_pods, rule_priority, table_export, protocol }),
        }
    }
}

fn reserved_table(number: u32) -> Option<&'static str> {
    match number {
        0 => Some("is no table"),
        TABLE_DEFAULT | TABLE_MAIN | TABLE_LOCAL => Some("is one of the kernel's own"),
        TABLE_MESH | TABLE_MESH_GUARD..=TABLE_MESH_GUARD_NODES => Some("is the mesh's"),
        TABLE_EGRESS_NARROW | TABLE_EGRESS_WIDE => Some("is for egress"),
        _ => None,
    }
}

fn reserved_priority(number: u32) -> Option<&'static str> {
    match number {
        0 => Some("is that of the kernel's table of local addresses"),
        RULE_PRIORITY_MESH_PODS..=RULE_PRIORITY_MESH_PAST => Some("is one of the mesh's"),
        RULE_PRIORITY_MESH.. => {
            Some("comes after the mesh's rule: packets for pods here would leave the node")
        }
        _ => None,
    }
}

impl RoutingIds {
    /// Table with a route to each pod of the node.
    pub fn table_pods(self) -> u32 {
        self.table_pods
    }

    /// Priority of the rule that looks up [`Self::table_pods`].
    pub fn rule_priority(self) -> u32 {
        self.rule_priority
    }

    /// Table with the blocks of the node, for routing daemons.
    pub fn table_export(self) -> u32 {
        self.table_export
    }

    /// Protocol of all these routes and rules.
    pub fn protocol(self) -> u8 {
        self.protocol
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_coil() {
        assert_eq!(RoutingIds::try_from(RawRoutingIds::default()), Ok(RoutingIds::default()));
    }

    #[test]
    fn reserved_ids_are_refused_by_name() {
        let usual = RawRoutingIds::default();
        let cases = [
            (RawRoutingIds { table_pods: 0, ..usual }, "table of pods 0 is no table"),
            (RawRoutingIds { table_pods: 254, ..usual }, "table of pods 254 is one of the kernel's own"),
            (RawRoutingIds { table_export: 255, ..usual }, "export table 255 is one of the kernel's own"),
            (RawRoutingIds { table_export: 180, ..usual }, "export table 180 is the mesh's"),
            (RawRoutingIds { table_export: 182, ..usual }, "export table 182 is the mesh's"),
            (RawRoutingIds { rule_priority: 104, ..usual }, "rule priority 104 is one of the mesh's"),
            (RawRoutingIds { table_pods: 118, ..usual }, "table of pods 118 is for egress"),
            (RawRoutingIds { table_export: 116, ..usual }, "export table 116 is the table of pods"),
            (
                RawRoutingIds { rule_priority: 0, ..usual },
                "rule priority 0 is that of the kernel's table of local addresses",
            ),
            (
                RawRoutingIds { rule_priority: 32_766, ..usual },
                "rule priority 32766 comes after the mesh's rule: packets for pods here would leave the node",
            ),
            (RawRoutingIds { protocol: 256, ..usual }, "route protocol 256 is more than 255"),
            (
                RawRoutingIds { protocol: 2, ..usual },
                "route protocol 2 belongs to the kernel and to administrators",
            ),
            (RawRoutingIds { protocol: 31, ..usual }, "route protocol 31 belongs to the built-in router"),
        ];
        for (raw, words) in cases {
            assert_eq!(RoutingIds::try_from(raw).unwrap_err().to_string(), words);
        }
        let all =
            RawRoutingIds { table_pods: 1116, rule_priority: 1999, table_export: 70_000, protocol: 200 };
        assert_eq!(RoutingIds::try_from(all).map(RoutingIds::table_export), Ok(70_000));
    }
}
