//! Names of the files beside the socket, which the plugin and the node program share.
//!
//! The files are in the directory `<socket>.d`, so neither program needs another setting. An attachment is one empty file,
//! `<container ID>:<interface>`: creating and removing it is atomic, and it has no content that could be incomplete.
//!
//! - `pending-del/` has the DELs that the plugin reported as done while the node program did not answer. It finishes them.
//! - `networks/<name>/` has the attachments of each network. Link aliases do not name the network, and GC must keep the
//!   attachments of other networks.
//! - `sandboxes/` says of each attachment where the pod's network namespace is. These files have a content.

use std::path::{Path, PathBuf};

/// Longest container ID that is accepted, in bytes: longer ones would not fit the alias of the pod's link (`IFALIASZ`,
/// 256 bytes).
pub const CONTAINER_ID_MAX: usize = 128;

/// Directory of pending DELs.
pub fn pending_deletions(socket: &Path) -> PathBuf {
    beside(socket).join("pending-del")
}

/// Directory with one directory per network.
pub fn networks(socket: &Path) -> PathBuf {
    beside(socket).join("networks")
}

/// Directory with a file for each attachment that says where the pod's network namespace is.
pub fn sandboxes(socket: &Path) -> PathBuf {
    beside(socket).join("sandboxes")
}

/// Locked by the node program that serves the socket, until its process has ended. One that is started beside it waits.
pub fn instance_lock(socket: &Path) -> PathBuf {
    beside(socket).join("instance.lock")
}

/// Locked by the program that waits for the instance lock, so that its holder knows of a successor.
pub fn successor_lock(socket: &Path) -> PathBuf {
    beside(socket).join("successor.lock")
}

/// File with the positions at which the node program's search for free addresses goes on after a restart, so that no
/// address is reused at once.
pub fn search_positions(socket: &Path) -> PathBuf {
    beside(socket).join("search-positions")
}

/// File with this node's blocks, for a node program that starts while the API server is away.
pub fn block_record(socket: &Path) -> PathBuf {
    beside(socket).join("blocks")
}

/// File with the pool of each namespace whose pods ran here.
pub fn namespace_pools(socket: &Path) -> PathBuf {
    beside(socket).join("pools")
}

/// Empty file that an ADD leaves until the next boot: packets to other nodes were kept in the mesh by then, or there was none.
pub fn attached(socket: &Path) -> PathBuf {
    beside(socket).join("attached")
}

/// Directory with an empty file for each pod, named by its UID, that asked for no egress gateways when it was attached.
pub fn without_egress(socket: &Path) -> PathBuf {
    beside(socket).join("without-egress")
}

fn beside(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".d");
    PathBuf::from(name)
}

/// The file of an attachment; `None` if a name is invalid.
pub fn file_name(container_id: &str, ifname: &str) -> Option<String> {
    (is_container_id(container_id) && is_interface_name(ifname)).then(|| format!("{container_id}:{ifname}"))
}

/// Container ID and interface of a file; `None` for other files.
pub fn parse_file_name(name: &str) -> Option<(&str, &str)> {
    name.split_once(':')
        .filter(|(container_id, ifname)| is_container_id(container_id) && is_interface_name(ifname))
}

/// The rule of the CNI specification for container IDs and network names, `^[A-Za-z0-9][A-Za-z0-9_.-]*$`.
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
}

/// An identifier that fits a link's alias.
pub fn is_container_id(text: &str) -> bool {
    is_identifier(text) && text.len() <= CONTAINER_ID_MAX
}

/// The kernel's rule (`dev_valid_name`, `net/core/dev.c`): 1 to 15 bytes, no '/', ':' or white space, not "." or "..".
pub fn is_interface_name(text: &str) -> bool {
    let forbidden = |c: char| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control();
    (1..=15).contains(&text.len()) && !matches!(text, "." | "..") && !text.contains(forbidden)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_directories_are_beside_the_socket() {
        let socket = Path::new("/run/coild.sock");
        assert_eq!(pending_deletions(socket), Path::new("/run/coild.sock.d/pending-del"));
        assert_eq!(networks(socket), Path::new("/run/coild.sock.d/networks"));
    }

    #[test]
    fn invalid_names_have_no_file() {
        for (container_id, ifname) in
            [("", "eth0"), ("../x", "eth0"), ("a/b", "eth0"), ("c", ".."), ("c", "a/b")]
        {
            assert_eq!(file_name(container_id, ifname), None, "{container_id} {ifname}");
        }
        assert_eq!(file_name(&"f".repeat(CONTAINER_ID_MAX + 1), "eth0"), None);
    }

    #[test]
    fn container_ids_follow_the_specification() {
        for good in ["a", "0123456789abcdef", "A-b_c.d"] {
            assert!(is_container_id(good), "{good}");
        }
        for bad in ["", "-a", ".a", "a b", "a/b", "a:b", "é"] {
            assert!(!is_container_id(bad), "{bad}");
        }
    }

    #[test]
    fn interface_names_follow_the_kernel() {
        for good in ["eth0", "net1", "a23456789012345"] {
            assert!(is_interface_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a:b", "a b", "a234567890123456", "a\n"] {
            assert!(!is_interface_name(bad), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn every_file_is_read_back(container_id in "[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", ifname in "[^/:\\s\\p{Cc}.]{1,3}") {
            let name = file_name(&container_id, &ifname).unwrap();
            prop_assert!(name.len() <= 255);
            prop_assert_eq!(parse_file_name(&name), Some((container_id.as_str(), ifname.as_str())));
        }

        #[test]
        fn a_file_never_leaves_its_directory(container_id: String, ifname: String) {
            if let Some(name) = file_name(&container_id, &ifname) {
                prop_assert!(!name.contains('/') && !name.starts_with('.'));
            }
        }

        #[test]
        fn hostile_names_never_panic(name: String) {
            let _ = parse_file_name(&name);
        }
    }
}
