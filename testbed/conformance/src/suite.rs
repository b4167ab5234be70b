//! The run of the suite against a cluster.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::num::NonZeroU8;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed_kube::conformance;
use testbed_nodes::Cluster;

use crate::output::{Counts, Reader};

/// When ginkgo gives up; a quiet machine takes two minutes.
const TIMEOUT: &str = "45m";
/// Interval at which the output of ginkgo is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Selection of tests, and number of them that run at once.
pub(crate) struct Suite<'a> {
    pub(crate) focus: &'a str,
    pub(crate) skip: Option<&'a str>,
    /// Tests at once.
    pub(crate) procs: NonZeroU8,
}

impl Suite<'_> {
    /// Runs the tests on the cluster's first node, and leaves `junit.xml` and `ginkgo.log` in `reports`.
    ///
    /// # Errors
    /// The suite cannot be built or started, or ended in a way that its counts do not explain; the end of its output is in
    /// the message.
    pub(crate) fn run(&self, cluster: &Cluster, reports: &Path) -> Result<Counts> {
        let log = reports.join("ginkgo.log");
        let mut ginkgo = cluster.plane_host().spawn(&mut self.command(cluster, reports)?, &log)?;
        let mut output = Lines::open(&log)?;
        let mut reader = Reader::default();
        let status = loop {
            // Asked before reading, so that the last lines are not missed.
            let status = ginkgo.status()?;
            for line in output.read()? {
                if let Some(progress) = reader.line(&line) {
                    cluster.progress().step(&progress);
                }
            }
            match status {
                Some(status) => break status,
                None => thread::sleep(POLL_INTERVAL),
            }
        };
        ensure!(
            reader.counts.explain(status.success()),
            "the suite ended with {status}, which its tests do not explain ({:?}); the end of {}:\n{}",
            reader.counts,
            log.display(),
            end(&log)
        );
        Ok(reader.counts)
    }

    fn command(&self, cluster: &Cluster, reports: &Path) -> Result<Command> {
        let mut command = Command::new(conformance::ginkgo()?);
        command
            .args(["--no-color", "-v", "--junit-report=junit.xml"])
            .arg(format!("--timeout={TIMEOUT}"))
            .arg(format!("--procs={}", self.procs))
            .arg(format!("--focus={}", self.focus))
            .arg(format!("--output-dir={}", reports.display()));
        command.args(self.skip.map(|skip| format!("--skip={skip}")));
        command
            .arg(conformance::e2e_test()?)
            .arg("--")
            .arg(format!("--kubeconfig={}", cluster.plane().kubeconfig().display()))
            .arg(format!("--kubectl-path={}", kubectl(cluster)?.display()))
            .arg(format!("--num-nodes={}", cluster.nodes().len()))
            .args(["--provider=local", "--dump-logs-on-failure=false"]);
        // What kubectl knows about this server must not be taken for the next one's at the same address.
        command.env("KUBECACHEDIR", cluster.directory().join("suite-kubectl-cache"));
        Ok(command)
    }
}

/// The suite requires a program of that name; ours is a subcommand.
fn kubectl(cluster: &Cluster) -> Result<PathBuf> {
    let path = cluster.directory().join("kubectl");
    let program = testbed_kube::binary()?;
    let text = format!("#!/bin/sh\nexec {} kubectl \"$@\"\n", program.display());
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot create {} executable", path.display()))?;
    Ok(path)
}

/// Lines of a file that grows.
struct Lines {
    file: File,
    read: u64,
    unfinished: Vec<u8>,
}

impl Lines {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { file, read: 0, unfinished: Vec::new() })
    }

    /// Lines that have been finished since the last call.
    fn read(&mut self) -> Result<Vec<String>> {
        self.file.seek(SeekFrom::Start(self.read)).context("cannot go on reading the suite's output")?;
        let count = self.file.read_to_end(&mut self.unfinished).context("cannot read the suite's output")?;
        self.read = self.read.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
        let Some(last) = self.unfinished.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(Vec::new());
        };
        let finished: Vec<u8> = self.unfinished.drain(..=last).collect();
        Ok(String::from_utf8_lossy(&finished).lines().map(str::to_owned).collect())
    }
}

/// The last lines of a file.
fn end(path: &Path) -> String {
    const LINES: usize = 20;
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_come_when_they_are_whole() {
        let path = std::env::temp_dir().join(format!("fairlead-conformance-lines-{}", std::process::id()));
        let mut writer = File::create(&path).unwrap();
        let mut lines = Lines::open(&path).unwrap();
        assert!(lines.read().unwrap().is_empty());
        writer.write_all("one\n• tw".as_bytes()).unwrap();
        assert_eq!(lines.read().unwrap(), ["one"]);
        writer.write_all("o\n\nthree\n".as_bytes()).unwrap();
        assert_eq!(lines.read().unwrap(), ["• two", "", "three"]);
        fs::remove_file(&path).unwrap();
    }
}
