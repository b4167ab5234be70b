//! CEL rules that several resources share, and schema helpers.
//!
//! Rules guard every conversion with `isCIDR` or `isIP`: the API server evaluates all rules of an object even
//! when one has failed, and a conversion error would bury the useful message. Strings and lists that rules
//! read carry a maximum, without which the API server refuses the rule as too expensive.

use ipnet::IpNet;
use kube::core::{Message, Rule};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::Value;

/// Longest name of an object (RFC 1123, as Kubernetes has it for most kinds).
pub(super) const NAME_LENGTH: usize = 253;

/// Longest address: IPv6 with an embedded IPv4 address (`INET6_ADDRSTRLEN` without the zero).
pub(super) const ADDRESS_LENGTH: usize = 45;

/// Longest `host:port`: a DNS name of 253 characters or an address in brackets, a colon, a port, and room to spare.
pub(super) const ENDPOINT_LENGTH: usize = 270;

/// Longest CIDR: an IPv6 address with an embedded IPv4 address, and `/128`.
pub(super) const CIDR_LENGTH: usize = 49;

/// A rule whose message is computed by the API server, so that it can name the offending value.
pub(super) fn explained(rule: &str, message: &str) -> Rule {
    Rule { rule: rule.to_owned(), message: Some(Message::Expression(message.to_owned())), ..Rule::default() }
}

/// Name of an object whose kind takes DNS subdomains (RFC 1123), such as nodes and pools.
pub(super) const OBJECT_NAME_PATTERN: &str =
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";

/// A string that is a prefix of one family, 4 or 6.
pub(super) fn cidr_of_family(family: u8) -> Rule {
    explained(
        &format!("isCIDR(self) && cidr(self).ip().family() == {family}"),
        &format!("\"'\" + self + \"' is not an IPv{family} prefix in CIDR notation\""),
    )
}

/// A list of prefixes of either family.
pub(super) fn cidrs() -> Rule {
    explained(
        "self.all(prefix, isCIDR(prefix))",
        "\"'\" + self.filter(prefix, !isCIDR(prefix))[0] + \"' is not a prefix in CIDR notation (a single address needs /32 or /128)\"",
    )
}

/// A list of addresses, of one family or as many of each.
pub(super) fn source_addresses() -> Rule {
    let invalid = "self.filter(entry, !isIP(entry))";
    let repeated = "self.filter(entry, self.exists_one(other, isIP(entry) && isIP(other) && ip(entry) == ip(other)) == false)";
    let of = |family| format!("size(self.filter(entry, isIP(entry) && ip(entry).family() == {family}))");
    let v4 = of(4);
    let v6 = of(6);
    explained(
        &format!("size({invalid}) == 0 && size({repeated}) == 0 && ({v4} == 0 || {v6} == 0 || {v4} == {v6})"),
        &format!(
            "size({invalid}) > 0 ? \"'\" + {invalid}[0] + \"' is not an IP address\" : size({repeated}) > 0 ? \"'\" + {repeated}[0] + \"' is there twice\" : \
             'there must be as many IPv6 as IPv4 addresses, or none of one family: the n-th of each are held by the same gateway'"
        ),
    )
}

/// A list of addresses, and addresses with a port.
pub(super) fn health_targets() -> Rule {
    // The host of an entry with a port.
    let host = "(entry.startsWith('[') ? entry.substring(1, entry.lastIndexOf(':') - 1) : entry.substring(0, entry.lastIndexOf(':')))";
    let port = "int(entry.substring(entry.lastIndexOf(':') + 1))";
    let shape = r"entry.matches('^([0-9.]+|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$')";
    let is_valid = format!(
        "isIP(entry) || ({shape} && {port} >= 1 && {port} <= 65535 && isIP({host}) && ip({host}).family() == (entry.startsWith('[') ? 6 : 4))"
    );
    let invalid = format!("self.filter(entry, !({is_valid}))");
    explained(
        &format!("size({invalid}) == 0"),
        &format!(
            "\"'\" + {invalid}[0] + \"' is neither an IP address nor ADDRESS:PORT (IPv6 addresses go in brackets, the port is 1 to 65535)\""
        ),
    )
}

/// Longest entry of [`address_filter`].
pub(super) const FILTER_LENGTH: usize = CIDR_LENGTH + 1;

/// An ordered list of prefixes and addresses, some with `!` before them. A list of these alone adds nothing, which its author hardly
/// wants.
pub(super) fn address_filter() -> Rule {
    let is_invalid = "!isCIDR(entry.startsWith('!') ? entry.substring(1) : entry) && !isIP(entry.startsWith('!') ? entry.substring(1) : entry)";
    let invalid = format!("self.filter(entry, {is_invalid})");
    explained(
        &format!("size({invalid}) == 0 && (size(self) == 0 || self.exists(entry, !entry.startsWith('!')))"),
        &format!(
            "size({invalid}) > 0 ? \"'\" + {invalid}[0] + \"' is no prefix in CIDR notation and no address, with or without ! before it\" : \
             'every entry takes addresses away: begin with those that are added, such as 0.0.0.0/0 and ::/0'"
        ),
    )
}

/// 32 bytes in base64, as `wg(8)` writes keys. The last character can only carry four bits.
pub(super) const KEY_PATTERN: &str = "^[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$";

/// A WireGuard key. The value is not repeated in the message, because it may be a secret.
pub(super) fn wireguard_key() -> Rule {
    Rule::new(format!("self.matches('{KEY_PATTERN}')"))
        .message("must be a WireGuard key: 44 characters of base64 that hold 32 bytes, as `wg pubkey` and `wg genpsk` print them")
}

/// `host:port` with the host an address or a name, IPv6 in brackets, and a port from 1 to 65535.
pub(super) fn host_and_port() -> Rule {
    explained(
        r"self.matches('^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$') && int(self.substring(self.lastIndexOf(':') + 1)) >= 1 && int(self.substring(self.lastIndexOf(':') + 1)) <= 65535 && (!self.startsWith('[') || isIP(self.substring(1, self.lastIndexOf(':') - 1)))",
        "\"'\" + self + \"' is not host:port (IPv6 addresses go in brackets, the port is 1 to 65535)\"",
    )
}

/// The schema of `T` without its descriptions, which for pods alone are longer than a manifest may be.
pub(super) fn undescribed<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = generator.subschema_for::<T>().to_value();
    remove_descriptions(&mut schema);
    Schema::try_from(schema).unwrap_or_default()
}

/// Drops `description` wherever it is a text: a property of that name is an object and stays.
pub(super) fn remove_descriptions(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.get("description").is_some_and(Value::is_string) {
                fields.remove("description");
            }
            fields.values_mut().for_each(remove_descriptions);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_descriptions),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The texts that are prefixes, with host bits cleared, and those that are not.
pub(super) fn parse_prefixes(texts: &[String]) -> (Vec<IpNet>, Vec<&str>) {
    let mut prefixes = Vec::new();
    let mut rejected = Vec::new();
    for text in texts {
        match text.parse::<IpNet>() {
            Ok(prefix) => prefixes.push(prefix.trunc()),
            Err(_) => rejected.push(text.as_str()),
        }
    }
    (prefixes, rejected)
}
