//! Kernel modules that go into the image.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;

/// Modules that tests may need; their dependencies are added. Modules compiled into the kernel are fine too.
pub(crate) const WANTED: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "virtio_rng", // the VM itself
    "wireguard",
    "fou",
    "fou6",
    "ipip",
    "sit",
    "ip6_tunnel",
    "ip_gre",
    "vxlan", // tunnels
    "veth",
    "dummy",
    "bridge",
    "macvlan",
    "tun",
    "vrf",
    "ifb", // links
    "nf_tables",
    "nf_conntrack_netlink",
    "nft_chain_nat",
    "nft_nat",
    "nft_masq",
    "nft_redir",
    "nft_ct",
    "nft_fib_inet",
    "nft_reject_inet",
    "nft_limit",
    "nft_log",
    "nft_numgen",
    "nft_hash",
    "nft_socket",
    "nft_tproxy",
    "sch_netem",
    "sch_tbf",
    "sch_htb",
    "sch_fq",
    "sch_fq_codel",
    "sch_ingress",
    "cls_bpf",
    "cls_u32",
    "cls_flower",
    "act_mirred",
    "tcp_diag",
    "udp_diag",
    "inet_diag",
];

/// The wanted modules and all they depend on, as paths relative to the module directory. `dependencies`
/// is the text of `modules.dep`, `builtin` that of `modules.builtin` (depmod(8), modules.dep(5)).
///
/// # Errors
/// A wanted module is neither a file nor compiled in.
pub(crate) fn closure<'a>(
    dependencies: &'a str,
    builtin: &str,
    wanted: &[&str],
) -> anyhow::Result<BTreeSet<&'a str>> {
    let builtin: BTreeSet<String> = builtin.lines().map(module_name).collect();
    let mut modules: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (module, needs) in dependencies.lines().filter_map(|line| line.split_once(':')) {
        modules
            .insert(module_name(module), std::iter::once(module).chain(needs.split_whitespace()).collect());
    }
    let mut files = BTreeSet::new();
    for name in wanted.iter().filter(|name| !builtin.contains(**name)) {
        // modules.dep lists indirect dependencies as well: no recursion.
        let found = modules.get(*name).with_context(|| format!("the kernel has no module {name}"))?;
        files.extend(found);
    }
    Ok(files)
}

/// `kernel/net/foo-bar.ko.xz` is module `foo_bar`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str =
        "kernel/net/a.ko: kernel/lib/b-c.ko kernel/lib/d.ko.xz\nkernel/lib/b-c.ko:\nkernel/lib/d.ko.xz:\n";

    #[test]
    fn dependencies_come_along_and_builtin_ones_need_nothing() {
        let files = closure(DEPENDENCIES, "kernel/e.ko\n", &["a", "e"]).unwrap();
        assert_eq!(
            files.into_iter().collect::<Vec<_>>(),
            ["kernel/lib/b-c.ko", "kernel/lib/d.ko.xz", "kernel/net/a.ko"]
        );
        let files = closure(DEPENDENCIES, "", &["b_c"]).unwrap();
        assert_eq!(files.into_iter().collect::<Vec<_>>(), ["kernel/lib/b-c.ko"]);
    }

    #[test]
    fn an_unknown_module_is_named() {
        let error = closure(DEPENDENCIES, "", &["nosuch"]).unwrap_err().to_string();
        assert!(error.contains("nosuch"), "{error}");
    }
}
