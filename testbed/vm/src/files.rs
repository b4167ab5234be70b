//! Host files, with the shared libraries they need, as they will lie inside the VM.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::cpio::Archive;

/// Adds a host file at its own path, and every library that `ldd` names for it.
pub(crate) fn add_with_libraries(archive: &mut Archive, path: &Path) -> anyhow::Result<()> {
    add(archive, path)?;
    for library in libraries(path)? {
        if !archive.contains(&inside(&library)) {
            add(archive, &library)?;
        }
    }
    Ok(())
}

/// Adds a host file at its own path.
pub(crate) fn add(archive: &mut Archive, path: &Path) -> anyhow::Result<()> {
    let read = || anyhow::Ok((fs::metadata(path)?.permissions().mode(), fs::read(path)?));
    let (permissions, content) =
        read().with_context(|| format!("cannot copy {} into the VM", path.display()))?;
    archive.file(&inside(path), permissions, content);
    Ok(())
}

/// Where an absolute host path lies in the VM, relative to its root. There `/bin`, `/lib` and so on are
/// symbolic links into `/usr`, which an archive must not replace by directories.
pub(crate) fn inside(path: &Path) -> PathBuf {
    let plain = path.components().filter(|part| matches!(part, Component::Normal(_)));
    let relative: PathBuf = plain.collect();
    let merged = ["bin", "sbin", "lib", "lib64"].iter().any(|directory| relative.starts_with(directory));
    if merged { Path::new("usr").join(relative) } else { relative }
}

fn libraries(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    // It fails for scripts and static programs, which need none.
    let output = Command::new("ldd").arg(path).output().context("cannot run ldd")?;
    parse_ldd(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("libraries of {}", path.display()))
}

fn parse_ldd(output: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for line in output.lines() {
        if line.contains("=> not found") {
            bail!("a library is missing on this machine: {}", line.trim());
        }
        paths.extend(
            line.split_whitespace()
                .find(|word| word.starts_with('/') && !word.ends_with(':'))
                .map(PathBuf::from),
        );
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_follow_the_merged_usr() {
        for (host, vm) in [
            ("/lib64/ld-linux-x86-64.so.2", "usr/lib64/ld-linux-x86-64.so.2"),
            ("/bin/ip", "usr/bin/ip"),
            ("/usr/sbin/nft", "usr/sbin/nft"),
            ("/home/me/./target/test", "home/me/target/test"),
            ("/library/x", "library/x"),
        ] {
            assert_eq!(inside(Path::new(host)), Path::new(vm));
        }
    }

    #[test]
    fn ldd_output_gives_paths_only() {
        let output = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse_ldd(output).unwrap(), expected);
        assert_eq!(parse_ldd("\tstatically linked\n").unwrap(), Vec::<PathBuf>::new());
        assert!(parse_ldd("\tlibx.so => not found\n").unwrap_err().to_string().contains("libx.so"));
    }
}
