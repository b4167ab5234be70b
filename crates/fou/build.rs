//! Compiles `bpf/fou.bpf.c` with clang, and computes the version of the programs from its text and that of its headers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

const DIRECTORY: &str = "bpf";
const SOURCE: &str = "bpf/fou.bpf.c";
/// Directories of headers of the machine's architecture, which `linux/types.h` includes and clang does not search for BPF.
const HEADERS: [&str; 2] = ["/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={DIRECTORY}");
    println!("cargo::rerun-if-env-changed=CLANG");
    let object = PathBuf::from(env::var("OUT_DIR")?).join("fou.bpf.o");
    println!("cargo::rustc-env=FOU_VERSION={:016x}", fnv1a(&text()?));
    compile(&object)
}

fn compile(object: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let mut command = Command::new(&clang);
    command.args(["-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]);
    for directory in HEADERS.into_iter().filter(|directory| Path::new(directory).is_dir()) {
        command.args(["-idirafter", directory]);
    }
    let output = command.args(["-c", SOURCE, "-o"]).arg(object).output().map_err(|error| {
        format!(
            "cannot run {clang}, which compiles {SOURCE}: {error}. On Debian: \
             apt-get install --no-install-recommends clang libbpf-dev libc6-dev"
        )
    })?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{clang} cannot compile {SOURCE}. If a header is missing, on Debian: \
         apt-get install --no-install-recommends clang libbpf-dev libc6-dev\n{}",
        String::from_utf8_lossy(&output.stderr)
    )
    .into())
}

/// Text of the source and of its headers, in the order of their names.
fn text() -> io::Result<Vec<u8>> {
    let mut files =
        fs::read_dir(DIRECTORY)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    files.sort();
    let texts = files.iter().map(fs::read).collect::<io::Result<Vec<Vec<u8>>>>()?;
    Ok(texts.concat())
}

/// The hash function FNV-1a of 64 bits.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
