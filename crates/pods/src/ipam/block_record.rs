//! Record of this node's blocks in a file beside the socket, for a program that starts while the API server is away.
//!
//! The file alone is no proof: it may be older than the release of a block. A block counts only while the kernel exports it: its
//! route goes before the block does, and no route outlasts the boot ([`Ipam::restore_blocks`]). One line per block: name, UID, pool,
//! and the prefix of each family or `-`.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fairlead_dataplane::routes;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::uplink::has_ipv6;
use fairlead_ipam::{Block, DualStackNets};
use fairlead_netlink::route::RouteSocket;
use ipnet::IpNet;

use super::allocator::Ipam;
use crate::small_file;

/// The file, and what it has.
pub(super) struct BlockRecord {
    file: PathBuf,
    written: Option<String>,
}

impl BlockRecord {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, written: None }
    }

    /// Writes the blocks that give addresses to pods, if they are others than before.
    pub(super) fn keep<'a>(&mut self, blocks: impl Iterator<Item = &'a Block>) {
        let text: String = blocks.filter_map(line).collect();
        if self.written.as_ref() == Some(&text) {
            return;
        }
        match small_file::replace(&self.file, &text) {
            Ok(()) => self.written = Some(text),
            Err(error) => {
                let file = self.file.display();
                tracing::warn!(%file, %error, "cannot write this node's blocks: a program that starts without the API server cannot use them");
            }
        }
    }
}

impl Ipam {
    /// Uses the blocks of an earlier program that the kernel still shows as this node's, until the API server lists them; called
    /// after [`Self::adopt`].
    ///
    /// # Errors
    /// The kernel does not show its routes.
    pub fn restore_blocks(&self, file: &Path) -> fairlead_netlink::Result<()> {
        let recorded = read(file);
        if recorded.is_empty() {
            return Ok(());
        }
        let shown = shown_by_kernel(recorded, &exported(self.numbers())?, has_ipv6());
        let names: Vec<&str> = shown.iter().map(Block::name).collect();
        tracing::info!(blocks = ?names, "uses this node's blocks as the kernel shows them until the API server lists them");
        self.update(|state| shown.into_iter().for_each(|block| state.restore_block(block)));
        Ok(())
    }
}

fn exported(ids: RoutingIds) -> fairlead_netlink::Result<BTreeSet<IpNet>> {
    let all = RouteSocket::open()?.routes(ids.table_export())?;
    let own = all.iter().filter(|route| route.protocol == ids.protocol() && !routes::is_source(route));
    Ok(own.map(|route| route.destination).collect())
}

/// A kernel without IPv6 exports IPv4 alone.
fn shown_by_kernel(blocks: Vec<Block>, exported: &BTreeSet<IpNet>, has_ipv6: bool) -> Vec<Block> {
    let is_shown = |block: &Block| {
        let nets = block.nets();
        let mut expected = nets.iter().filter(|net| net.addr().is_ipv4() || has_ipv6).peekable();
        expected.peek().is_some() && expected.all(|net| exported.contains(&net))
    };
    blocks.into_iter().filter(is_shown).collect()
}

/// A block without a UID could not be told from a later one of its name.
fn line(block: &Block) -> Option<String> {
    let DualStackNets { ipv4, ipv6 } = block.nets();
    let ipv4 = ipv4.map_or_else(|| "-".to_owned(), |net| net.to_string());
    let ipv6 = ipv6.map_or_else(|| "-".to_owned(), |net| net.to_string());
    let words = [block.name(), block.uid(), block.pool(), &ipv4, &ipv6];
    let is_word = |word: &&str| !word.is_empty() && !word.contains(char::is_whitespace);
    words.iter().all(is_word).then(|| words.join(" ") + "\n")
}

fn parse(line: &str) -> Option<Block> {
    let words: Vec<&str> = line.split(' ').collect();
    let [name, uid, pool, ipv4, ipv6] = words.as_slice() else { return None };
    let ipv4 = if *ipv4 == "-" { None } else { Some(ipv4.parse().ok()?) };
    let ipv6 = if *ipv6 == "-" { None } else { Some(ipv6.parse().ok()?) };
    let block = Block::new(name, pool, DualStackNets { ipv4, ipv6 }, false, false).ok()?;
    (!uid.is_empty()).then(|| block.with_uid(uid))
}

/// Reads the file. A line that cannot be read costs only that block.
fn read(file: &Path) -> Vec<Block> {
    let text = fs::read_to_string(file).unwrap_or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            tracing::warn!(file = %file.display(), %error, "cannot read which blocks this node had");
        }
        String::new()
    });
    text.lines().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(name: &str, ipv4: &str, ipv6: Option<&str>) -> Block {
        let nets =
            DualStackNets { ipv4: Some(ipv4.parse().unwrap()), ipv6: ipv6.map(|net| net.parse().unwrap()) };
        Block::new(name, "a", nets, false, false).unwrap().with_uid(&format!("uid-{name}"))
    }

    #[test]
    fn what_is_written_is_read_back_and_damage_costs_one_block() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("coild.sock.d/blocks");
        assert_eq!(read(&file), []);
        let blocks = [block("a-0", "10.0.0.0/30", Some("fd00::/126")), block("a-1", "10.0.0.4/30", None)];
        let mut record = BlockRecord::new(file.clone());
        record.keep(blocks.iter());
        assert_eq!(read(&file), blocks);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, format!("a-9 uid a 10.0.0.0/99 -\n\n{text}a b\n\u{fffd}\n")).unwrap();
        assert_eq!(read(&file), blocks);
        record.keep(blocks.iter().take(1));
        assert_eq!(read(&file), blocks[..1]);
        record.keep([].iter());
        assert_eq!(read(&file), []);
        let nameless = block("a-0", "10.0.0.0/30", None).with_uid("");
        record.keep([nameless].iter());
        assert_eq!(read(&file), [], "without a UID");
    }

    #[test]
    fn a_block_counts_while_the_kernel_exports_all_of_it() {
        let blocks =
            || vec![block("a-0", "10.0.0.0/30", Some("fd00::/126")), block("a-1", "10.0.0.4/30", None)];
        let names = |exported: &[&str], has_ipv6| {
            let exported = exported.iter().map(|net| net.parse().unwrap()).collect();
            let shown = shown_by_kernel(blocks(), &exported, has_ipv6);
            shown.iter().map(|block| block.name().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(&["10.0.0.0/30", "fd00::/126", "10.0.0.4/30"], true), ["a-0", "a-1"]);
        assert_eq!(names(&["10.0.0.0/30", "10.0.0.4/30"], true), ["a-1"], "half of it");
        assert_eq!(names(&["10.0.0.0/30"], false), ["a-0"], "no IPv6");
        assert_eq!(names(&["10.0.0.0/29", "10.0.0.5/32"], true), [""; 0], "other prefixes");
        assert_eq!(names(&[], true), [""; 0], "after a reboot");
        assert_eq!(names(&[], false), [""; 0]);
    }

    proptest! {
        #[test]
        fn hostile_lines_never_panic(text: String) {
            let _ = parse(&text);
        }
    }
}
