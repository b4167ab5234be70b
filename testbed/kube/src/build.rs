//! Builds the `kubebed` binary once per content of its Go module, for all checkouts of this user.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// The Go module's directory in the checkout that this crate was compiled from.
const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kubebed");
const PROGRESS_EVERY: Duration = Duration::from_secs(20);

/// The path of the `kubebed` binary, built first if need be.
///
/// It is kept in `$XDG_CACHE_HOME` (or `~/.cache`) `/fairlead/kubebed-VERSION-HASH/`, where the hash
/// covers the module's files, so that a changed module is built anew and an unchanged one never is.
/// Building takes minutes the first time and reports progress on stderr; when several processes ask at
/// once, one builds and the others wait.
///
/// # Errors
/// Go is missing or too old, the modules cannot be downloaded or compiled, or the cache is not writable.
pub fn binary() -> anyhow::Result<PathBuf> {
    let module = Module::read(Path::new(MODULE))?;
    let cache = cache_dir()?;
    let directory = cache.join(format!("kubebed-{}-{:016x}", module.version, module.hash));
    let binary = directory.join("kubebed");
    if binary.exists() {
        return Ok(binary);
    }
    fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let lock_path = directory.join("lock");
    let lock = File::create(&lock_path).with_context(|| format!("cannot create {}", lock_path.display()))?;
    if lock.try_lock().is_err() {
        progress(&format!("waiting for another process that builds {}", binary.display()));
        lock.lock().with_context(|| format!("cannot lock {}", lock_path.display()))?;
    }
    if !binary.exists() {
        module.build(&binary)?;
    }
    Ok(binary)
}

/// The directory for things that are expensive to make and may be deleted at any time.
fn cache_dir() -> anyhow::Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(base
        .context("neither XDG_CACHE_HOME nor HOME is set: no place to keep the test bed's binary")?
        .join("fairlead"))
}

struct Module {
    path: PathBuf,
    /// Kubernetes's version, like `1.36.2`.
    version: String,
    hash: u64,
}

impl Module {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let context = || format!("cannot read the Go module {}", path.display());
        let mut files: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(path).with_context(context)? {
            let file = entry.with_context(context)?.path();
            if matches!(file.extension().and_then(OsStr::to_str), Some("go" | "mod" | "sum")) {
                files.push(file);
            }
        }
        files.sort();
        let mut hash = Fnv1a::default();
        for file in &files {
            hash.add(file.file_name().unwrap_or_default().as_encoded_bytes());
            hash.add(&fs::read(file).with_context(context)?);
        }
        let manifest = fs::read_to_string(path.join("go.mod")).with_context(context)?;
        let version = kubernetes_version(&manifest)
            .with_context(|| format!("{}/go.mod does not require k8s.io/kubernetes", path.display()))?;
        Ok(Self { path: path.to_owned(), version: version.to_owned(), hash: hash.0 })
    }

    fn build(&self, binary: &Path) -> anyhow::Result<()> {
        progress(&format!(
            "building Kubernetes {} for tests into {} (about 5 minutes with an empty Go cache, then never again)",
            self.version,
            binary.display()
        ));
        let unfinished = binary.with_extension("unfinished");
        let started = Instant::now();
        let mut child = Command::new("go")
            .current_dir(&self.path)
            .args(["build", "-trimpath", "-ldflags"])
            .arg(linker_flags(&self.version))
            .arg("-o")
            .arg(&unfinished)
            .arg(".")
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly -buildvcs=false")
            .env_remove("GOOS")
            .env_remove("GOARCH")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot run `go`: install Go 1.26 or newer, or set KUBEBUILDER_ASSETS")?;
        let mut reported = started;
        let status = loop {
            if let Some(status) = child.try_wait().context("cannot wait for `go build`")? {
                break status;
            }
            if reported.elapsed() >= PROGRESS_EVERY {
                reported = Instant::now();
                progress(&format!("still building after {} s", started.elapsed().as_secs()));
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        if !status.success() {
            bail!("`go build` in {} failed ({status}); its messages are above", self.path.display());
        }
        fs::rename(&unfinished, binary).with_context(|| format!("cannot create {}", binary.display()))?;
        progress(&format!("built after {} s", started.elapsed().as_secs()));
        Ok(())
    }
}

/// The version that a go.mod requires of k8s.io/kubernetes, without the `v`.
fn kubernetes_version(manifest: &str) -> Option<&str> {
    manifest.lines().find_map(|line| line.trim().strip_prefix("k8s.io/kubernetes v"))
}

/// Strips the binary and stamps the version into it: without stamps the programs call themselves
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

fn progress(message: &str) {
    // Nothing useful can be done when stderr is closed.
    let _ = writeln!(io::stderr(), "testbed-kube: {message}");
}

/// FNV-1a, 64 bits (<https://www.rfc-editor.org/rfc/rfc9923>): names a cache entry, protects nothing.
struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    /// Adds a field and its length, so that moving bytes between neighbours changes the hash.
    fn add(&mut self, field: &[u8]) {
        for byte in field.iter().chain(&field.len().to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_comes_from_the_requirement_not_from_a_replacement() {
        let manifest = "require (\n\tk8s.io/kubectl v0.36.2\n\tk8s.io/kubernetes v1.36.2\n)\n";
        assert_eq!(kubernetes_version(manifest), Some("1.36.2"));
        assert_eq!(kubernetes_version("module x\n"), None);
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

    #[test]
    fn hash_sees_content_and_boundaries() {
        let of = |fields: &[&str]| {
            let mut hash = Fnv1a::default();
            fields.iter().for_each(|field| hash.add(field.as_bytes()));
            hash.0
        };
        assert_eq!(of(&["a", "bc"]), of(&["a", "bc"]));
        assert_ne!(of(&["a", "bc"]), of(&["ab", "c"]));
        assert_ne!(of(&["a"]), of(&["b"]));
    }
}
