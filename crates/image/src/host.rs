//! Files of this machine and the shared libraries they need.

use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// The path in an image, below its root, of an absolute path of this machine. There `/bin`, `/lib` and so on are symbolic
/// links into `/usr`, which an archive must not replace by directories.
pub fn inside(path: &Path) -> PathBuf {
    let relative: PathBuf = path.components().filter(|part| matches!(part, Component::Normal(_))).collect();
    let merged = ["bin", "sbin", "lib", "lib64"].iter().any(|directory| relative.starts_with(directory));
    if merged { Path::new("usr").join(relative) } else { relative }
}

/// The shared libraries of an executable or library, its loader included, as absolute paths of this machine. Scripts and
/// static programs have none.
///
/// # Errors
/// `ldd` cannot be run, or a library is not on this machine.
pub fn libraries(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    // It fails for scripts and static programs, which need none.
    let output = Command::new("ldd").arg(path).output().context("cannot run ldd")?;
    parse_ldd(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("libraries of {}", path.display()))
}

fn parse_ldd(output: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for line in output.lines() {
        if line.contains("=> not found") {
            bail!("a shared library is missing on this machine: {}", line.trim());
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
        for (host, image) in [
            ("/lib64/ld-linux-x86-64.so.2", "usr/lib64/ld-linux-x86-64.so.2"),
            ("/bin/ip", "usr/bin/ip"),
            ("/usr/sbin/nft", "usr/sbin/nft"),
            ("/home/me/./target/test", "home/me/target/test"),
            ("/library/x", "library/x"),
        ] {
            assert_eq!(inside(Path::new(host)), Path::new(image));
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
