//! Keeps where the search for free addresses goes on in a file beside the socket, one line per block: UID and offset.
//!
//! It lasts as long as `/run`: after a reboot no pod is left whose peers could still send to its old address.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::allocator::Ipam;
use crate::small_file;

/// Changes are collected this long: a restart may repeat addresses of pods that came and went within it.
const DEBOUNCE: Duration = Duration::from_millis(200);

impl Ipam {
    /// Continues the search for free addresses where an earlier process of this node stopped; called before [`Self::adopt`].
    pub fn restore_positions(&self, file: &Path) {
        let positions = read(file);
        self.update(|state| state.restore_positions(positions));
    }
}

/// Writes the file whenever an address was allocated, forever.
pub(super) async fn run(ipam: Arc<Ipam>, file: PathBuf) {
    loop {
        ipam.positions.notified().await;
        tokio::time::sleep(DEBOUNCE).await;
        let positions = ipam.lock().table().search_positions();
        if let Err(error) = write(&file, &positions) {
            let file = file.display();
            tracing::warn!(%file, %error, "cannot write the search positions: a restart may reuse addresses early");
        }
    }
}

/// Reads the file. A line that cannot be read costs only that block's position.
fn read(file: &Path) -> BTreeMap<String, u32> {
    let text = fs::read_to_string(file).unwrap_or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            tracing::warn!(file = %file.display(), %error, "cannot read the search positions");
        }
        String::new()
    });
    let position = |line: &str| {
        let (uid, offset) = line.split_once(' ')?;
        Some((uid.to_owned(), offset.parse().ok()?))
    };
    text.lines().filter_map(position).collect()
}

fn write(file: &Path, positions: &BTreeMap<String, u32>) -> io::Result<()> {
    let text: String = positions.iter().map(|(uid, offset)| format!("{uid} {offset}\n")).collect();
    small_file::replace(file, &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_damage_costs_one_line() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("coild.sock.d/search-positions");
        assert_eq!(read(&file), BTreeMap::new());
        let positions = BTreeMap::from([("a".to_owned(), 7), ("b".to_owned(), u32::MAX)]);
        write(&file, &positions).unwrap();
        assert_eq!(read(&file), positions);
        fs::write(&file, "a 7\nb\nc -1\n\u{fffd}\n").unwrap();
        assert_eq!(read(&file), BTreeMap::from([("a".to_owned(), 7)]));
    }
}
