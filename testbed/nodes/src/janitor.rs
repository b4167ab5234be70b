//! Shell that cleans up when the owner of a cluster is killed and cannot.

use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result};

use crate::cgroups::Layout;

/// `read` returns when the owner's end of the pipe is gone, however the owner ended. The processes of the nodes are killed
/// by the lab; what is left are control groups and a directory. `done` means that the owner did it all.
const SCRIPT: &str = r#"
read -r word
[ "$word" = done ] && exit
for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    rm -rf "$2"
    left=
    for group in /sys/fs/cgroup/"$1" /sys/fs/cgroup/*/"$1"; do
        [ -d "$group" ] || continue
        find "$group" -depth -type d -exec rmdir {} +
        [ -d "$group" ] && left=1
    done
    [ -z "$left" ] && [ ! -e "$2" ] && break
    sleep 0.5
done
"#;

/// Removes a cluster's control groups when dropped, and these and the directory when its owner is killed.
#[derive(Debug)]
pub(crate) struct Janitor {
    cluster: String,
    shell: Child,
    stdin: Option<ChildStdin>,
}

impl Janitor {
    pub(crate) fn new(cluster: &str, directory: &Path) -> Result<Self> {
        let mut shell = Command::new("setsid")
            .args(["sh", "-c", SCRIPT, "testbed-janitor", cluster])
            .arg(directory)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run sh")?;
        let stdin = shell.stdin.take();
        Ok(Self { cluster: cluster.to_owned(), shell, stdin })
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        Layout::remove_cluster(&self.cluster);
        if let Some(mut stdin) = self.stdin.take() {
            // If it is gone, there is nothing to report.
            let _ = stdin.write_all(b"done\n");
        }
        let _ = self.shell.wait();
    }
}
