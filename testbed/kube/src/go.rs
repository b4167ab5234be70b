//! Programs built from Go modules whose versions and sums are pinned beside this crate.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use testbed_cache::{Fnv1a, Shelf, progress};

const PROGRESS_EVERY: Duration = Duration::from_secs(20);
const NEEDS_GO: &str = "cannot run `go`: install Go 1.26 or newer, or set KUBEBUILDER_ASSETS";

/// One of the modules in directories beside this crate.
pub(crate) struct Module {
    path: PathBuf,
    /// Module whose programs are built, like `k8s.io/kubernetes`.
    requirement: String,
    /// The version of that, like `1.36.2`.
    pub(crate) version: String,
    pub(crate) hash: u64,
}

/// Package to build.
#[derive(Clone, Copy)]
pub(crate) enum Package<'a> {
    /// A program.
    Program(&'a str),
    /// The tests of a package, as a program.
    Tests(&'a str),
}

impl Module {
    /// Reads the module in `directory` of this crate, as it was in the checkout this crate was compiled from.
    pub(crate) fn read(directory: &str, requirement: &str) -> anyhow::Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
        let context = || format!("cannot read the Go module {}", path.display());
        let mut files: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(&path).with_context(context)? {
            let file = entry.with_context(context)?.path();
            if matches!(file.extension().and_then(OsStr::to_str), Some("go" | "mod" | "sum")) {
                files.push(file);
            }
        }
        files.sort();
        let mut hash = Fnv1a::default();
        for file in &files {
            hash.add(file.file_name().unwrap_or_default().as_encoded_bytes());
            hash.add(&std::fs::read(file).with_context(context)?);
        }
        let manifest = std::fs::read_to_string(path.join("go.mod")).with_context(context)?;
        let version = required_version(&manifest, requirement)
            .with_context(|| format!("{}/go.mod does not require {requirement}", path.display()))?
            .to_owned();
        Ok(Self { path, requirement: requirement.to_owned(), version, hash: hash.value() })
    }

    /// Directory in the cache for programs that are built from the module as it is now.
    pub(crate) fn shelf(&self, name: &str) -> anyhow::Result<Shelf> {
        Shelf::new(&format!("{name}-{}-{:016x}", self.version, self.hash))
    }

    /// Directory with the sources of the module whose programs are built; they are downloaded if need be.
    pub(crate) fn sources(&self) -> anyhow::Result<PathBuf> {
        let list = ["mod", "download", "-json", self.requirement.as_str()];
        let output = self.go().args(list).stdin(Stdio::null()).output().context(NEEDS_GO)?;
        if !output.status.success() {
            bail!("cannot download {}: {}", self.requirement, String::from_utf8_lossy(&output.stderr).trim());
        }
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).context("go mod download")?;
        let directory =
            answer.get("Dir").and_then(serde_json::Value::as_str).context("go mod download names no Dir")?;
        Ok(directory.into())
    }

    /// Builds a program into `output`, without the C library, so that it runs anywhere; reports progress on stderr.
    pub(crate) fn build(&self, package: Package<'_>, output: &Path) -> anyhow::Result<()> {
        let (verb, name): (&[&str], _) = match package {
            Package::Program(name) => (&["build"], name),
            Package::Tests(name) => (&["test", "-c"], name),
        };
        let what = if name == "." { self.requirement.as_str() } else { name };
        progress(&format!("building {what} {} (takes minutes with an empty Go cache)", self.version));
        let started = Instant::now();
        let mut command = self.go();
        command
            .args(verb)
            // Without debug information, which the linker would drop anyway: 5 % less time, a quarter less in the cache.
            .args(["-trimpath", "-gcflags=all=-dwarf=false", "-ldflags"])
            .arg(linker_flags(&self.version))
            .arg("-o")
            .arg(output);
        let mut child =
            command.arg(name).stdin(Stdio::null()).stdout(Stdio::null()).spawn().context(NEEDS_GO)?;
        let mut reported = started;
        let status = loop {
            if let Some(status) = child.try_wait().context("cannot wait for `go`")? {
                break status;
            }
            if reported.elapsed() >= PROGRESS_EVERY {
                reported = Instant::now();
                progress(&format!("still building after {} s", started.elapsed().as_secs()));
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        if !status.success() {
            bail!("building {what} in {} failed ({status}); its messages are above", self.path.display());
        }
        progress(&format!("built after {} s", started.elapsed().as_secs()));
        Ok(())
    }

    /// The Go command, which ends when this process does: a build of minutes must not go on by itself.
    fn go(&self) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--", "go"])
            .current_dir(&self.path)
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly -buildvcs=false")
            .env_remove("GOOS")
            .env_remove("GOARCH");
        command
    }
}

/// The version that a go.mod requires of a module, without the `v`.
fn required_version<'a>(manifest: &'a str, module: &str) -> Option<&'a str> {
    manifest.lines().find_map(|line| {
        let line = line.trim();
        line.strip_prefix("require ").unwrap_or(line).strip_prefix(module)?.strip_prefix(" v")
    })
}

/// Strips the binary and stamps the version into it: without stamps Kubernetes's programs call themselves
/// `v0.0.0-master+$Format:%H$`, which kubectl itself cannot parse.
fn linker_flags(version: &str) -> String {
    let mut parts = version.split('.');
    let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let mut flags = "-s -w".to_owned();
    for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
        for (name, value) in [
            ("gitVersion", format!("v{version}").as_str()),
            ("gitMajor", major),
            ("gitMinor", minor),
            ("gitTreeState", "clean"),
        ] {
            flags.push_str(&format!(" -X {package}.{name}={value}"));
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_comes_from_the_requirement_not_from_a_replacement() {
        let manifest = "require (\n\tk8s.io/kubectl v0.36.2\n\tk8s.io/kubernetes v1.36.2\n)\n";
        assert_eq!(required_version(manifest, "k8s.io/kubernetes"), Some("1.36.2"));
        assert_eq!(required_version("module x\n", "k8s.io/kubernetes"), None);
        assert_eq!(required_version("require example.com/x v1.0.0\n", "example.com/x"), Some("1.0.0"));
    }

    #[test]
    fn stamps_name_the_version_everywhere_it_is_shown() {
        let flags = linker_flags("1.36.2");
        for stamp in [
            "component-base/version.gitVersion=v1.36.2",
            "client-go/pkg/version.gitMinor=36",
            "version.gitMajor=1 ",
        ] {
            assert!(flags.contains(stamp), "{stamp} not in {flags}");
        }
    }
}
