//! Names of links by which Calico's policy program (Felix) knows pods, for clusters that use its NetworkPolicy beside
//! this plugin (`FELIX_INTERFACEPREFIX=veth`).

use sha1::{Digest as _, Sha1};

/// Prefix of the names, before the digest.
const PREFIX: &str = "veth";
/// Hexadecimal digits of the digest; a link's name has room for 15 bytes (`IFNAMSIZ`, `linux/if.h`).
const DIGITS: usize = 11;

/// Name of a pod's link on the host, as `VethNameForWorkload` of Calico's libcalico-go makes it.
pub(super) fn link_name(namespace: &str, pod: &str) -> String {
    let digest = Sha1::digest(format!("{namespace}.{pod}"));
    let mut digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.truncate(DIGITS);
    format!("{PREFIX}{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_sha1sum() {
        // printf default.nginx-0 | sha1sum
        assert_eq!(link_name("default", "nginx-0"), "vethc048fd9a750");
        assert_eq!(link_name("kube-system", "coredns-5d78c9869d-abcde"), "veth4d5f75c480c");
    }
}
