//! How a node program proves to a gateway which node it runs on (`fairlead_wire::egress`).
//!
//! It asks the API server for a token of its own ServiceAccount, bound to its pod, whose audience names the gateway's Egress and the
//! public key of the certificate that the gateway has just presented. The gateway has the API server review the token for this
//! audience. So a gateway cannot use the tokens that it receives at another one, and a server between both cannot use them at all.

use crate::EgressName;

/// SHA-256 (FIPS 180-4) of the SubjectPublicKeyInfo of a certificate (RFC 5280, section 4.1), in DER.
pub type PublicKeyHash = [u8; 32];

/// The audience of tokens for a gateway of this Egress with this key.
pub fn audience(egress: &EgressName, key: &PublicKeyHash) -> String {
    let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("egress.coil.cybozu.com/{}/{}/{key}", egress.namespace, egress.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audience_names_egress_and_key() {
        let egress = EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() };
        let mut key = [0; 32];
        key[..2].copy_from_slice(&[0x0a, 0xff]);
        let expected = format!("egress.coil.cybozu.com/internet-egress/nat/0aff{}", "00".repeat(30));
        assert_eq!(audience(&egress, &key), expected);
    }
}
