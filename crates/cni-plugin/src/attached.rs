//! Attachments of this node, by the records beside the socket: the node program may be away.

use std::fs;
use std::path::Path;

use fairlead_wire::spool;

/// Whether any attachment is recorded, of any network. Records are on a file system that ends with the boot, as attachments do.
pub fn any(socket: &Path) -> bool {
    let networks = fs::read_dir(spool::networks(socket)).into_iter().flatten().flatten();
    let mut directories = networks.map(|network| network.path()).chain([spool::sandboxes(socket)]);
    directories.any(|directory| has_attachment(&directory))
}

fn has_attachment(directory: &Path) -> bool {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| {
        let attachment = name.to_str().and_then(spool::parse_file_name);
        attachment.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_of_any_network_counts_and_other_files_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        assert!(!any(&socket), "no directory");
        let networks = spool::networks(&socket);
        fs::create_dir_all(networks.join("empty")).unwrap();
        fs::create_dir_all(spool::pending_deletions(&socket)).unwrap();
        fs::write(spool::pending_deletions(&socket).join("gone:eth0"), "").unwrap();
        fs::write(networks.join("empty/.hidden"), "").unwrap();
        assert!(!any(&socket));
        fs::create_dir_all(networks.join("other")).unwrap();
        fs::write(networks.join("other/c0ffee:net1"), "").unwrap();
        assert!(any(&socket));
        fs::remove_dir_all(&networks).unwrap();
        assert!(!any(&socket));
        fs::create_dir_all(spool::sandboxes(&socket)).unwrap();
        fs::write(spool::sandboxes(&socket).join("c0ffee:eth0"), "{}").unwrap();
        assert!(any(&socket), "behind another plugin there is no other record");
    }
}
