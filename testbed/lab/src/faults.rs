//! Faults that can be made in one namespace, as nftables rules.

use std::collections::BTreeSet;
use std::fmt::Write;

/// Faults of one host or router. All off by default.
///
/// Loss, length and blackhole act on packets as they arrive, before connection tracking and NAT, forwarded ones too; so on
/// a host they are one-way, on a router they act on both directions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Share of arriving packets that are lost, in thousandths; 1000 loses all.
    pub loss_permille: u16,
    /// IP packets longer than this many bytes vanish silently: a path-MTU black hole.
    pub drop_longer_than: Option<u16>,
    /// Arriving UDP to these destination ports vanishes.
    pub blackholed_udp: BTreeSet<u16>,
    /// A host firewall: UDP that this host did not ask for is dropped on input.
    pub udp_firewall: bool,
}

impl Faults {
    /// The complete table, to replace whatever was there in one transaction.
    pub(crate) fn rules(&self) -> String {
        let mut arriving = String::new();
        if let Some(length) = self.drop_longer_than {
            let _ = writeln!(arriving, "    meta length > {length} drop");
        }
        for port in &self.blackholed_udp {
            let _ = writeln!(arriving, "    udp dport {port} drop");
        }
        match self.loss_permille {
            0 => {}
            // nft refuses a comparison that is always true.
            1000.. => arriving.push_str("    drop\n"),
            permille => {
                let _ = writeln!(arriving, "    numgen random mod 1000 < {permille} drop");
            }
        }
        // Mentions of `ct` start connection tracking, so an idle firewall must leave no rule.
        let firewall =
            if self.udp_firewall { "    iifname != \"lo\" meta l4proto udp ct state new drop\n" } else { "" };
        format!(
            "table inet faults\ndelete table inet faults\ntable inet faults {{\n  \
             chain arriving {{\n    type filter hook prerouting priority -350;\n    iifname \"lo\" accept\n{arriving}  }}\n  \
             chain input {{\n    type filter hook input priority -10;\n{firewall}  }}\n}}\n"
        )
    }
}
