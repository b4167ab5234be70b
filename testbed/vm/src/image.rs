//! The kernel and the first file system, made once from Debian's packages and the host's tools.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use testbed_cache::Shelf;
use testbed_cache::debian::{self, output};

use crate::cpio::Archive;
use crate::{files, modules};

const INIT: &str = include_str!("init.sh");

/// Programs that are needed on the host, each with the Debian package that has it.
const HOST_PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("apt-get", "apt"),
    ("apt-cache", "apt"),
    ("dpkg", "dpkg"),
    ("depmod", "kmod"),
    ("ldd", "libc-bin"),
    ("sh", "dash"),
];

/// Programs that are copied into the VM, each with its Debian package; busybox does the rest. The shell and whatever starts other programs
/// must not be busybox, which runs its own `ip`, `ping` or `modprobe` whatever the search path says.
const VM_PROGRAMS: &[(&str, &str)] = &[
    ("busybox", "busybox-static"),
    ("dash", "dash"),
    ("env", "coreutils"),
    ("timeout", "coreutils"),
    ("setsid", "util-linux"),
    ("nsenter", "util-linux"),
    ("unshare", "util-linux"),
    ("modprobe", "kmod"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("ss", "iproute2"),
    ("bridge", "iproute2"),
    ("wg", "wireguard-tools"),
    ("nft", "nftables"),
    ("conntrack", "conntrack"),
    ("ping", "iputils-ping"),
    ("tcpdump", "tcpdump"),
    ("iperf3", "iperf3"),
];

/// Files ready to boot.
pub(crate) struct Image {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
}

/// Makes the image if it is not there yet: downloads a kernel (27 MB) and takes a few seconds. Set-up
/// steps call it ahead of the tests. Returns the directory that holds the image.
///
/// # Errors
/// Programs are missing (all are listed, with their Debian packages), the kernel cannot be downloaded, or
/// the cache directory cannot be written.
pub fn prepare() -> anyhow::Result<PathBuf> {
    let image = find_or_make()?;
    Ok(image.kernel.parent().map(Path::to_owned).unwrap_or_default())
}

pub(crate) fn find_or_make() -> anyhow::Result<Image> {
    let shelf = Shelf::new(&format!("vm-{:016x}", recipe_hash()))?;
    let (directory, kernel) = (shelf.directory().to_owned(), shelf.directory().join("vmlinuz"));
    // The initramfs is put in place last.
    let initramfs = shelf.file("base.cpio", |unfinished| {
        let tools = find_programs()?;
        testbed_cache::progress(&format!("making a VM image in {}", directory.display()));
        make(&kernel, unfinished, &directory, &tools)
    })?;
    Ok(Image { kernel, initramfs })
}

fn recipe_hash() -> u64 {
    // Its value may change with the compiler; then the image is made once more.
    let mut hasher = DefaultHasher::new();
    (INIT, modules::WANTED, VM_PROGRAMS, include_str!("image.rs")).hash(&mut hasher);
    hasher.finish()
}

/// The paths of the VM's programs, after checking that the host's are there too.
fn find_programs() -> anyhow::Result<Vec<PathBuf>> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Where administrators' tools are, even if the caller is no administrator.
    let directories: Vec<PathBuf> =
        std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from)).collect();
    let find =
        |name: &str| directories.iter().map(|directory| directory.join(name)).find(|path| path.is_file());
    let missing: Vec<&(&str, &str)> =
        HOST_PROGRAMS.iter().chain(VM_PROGRAMS).filter(|(name, _)| find(name).is_none()).collect();
    if !missing.is_empty() {
        bail!("{}", missing_programs(&missing));
    }
    Ok(VM_PROGRAMS.iter().filter_map(|(name, _)| find(name)).collect())
}

fn missing_programs(missing: &[&(&str, &str)]) -> String {
    let names: Vec<&str> = missing.iter().map(|(name, _)| *name).collect();
    let mut packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    packages.sort_unstable();
    packages.dedup();
    let (names, packages) = (names.join(", "), packages.join(" "));
    format!(
        "the VM needs programs that are not here: {names}; run: apt-get install --no-install-recommends {packages}"
    )
}

fn make(kernel: &Path, initramfs: &Path, directory: &Path, tools: &[PathBuf]) -> anyhow::Result<()> {
    let work = tempfile::TempDir::new_in(directory).context("cannot create a working directory")?;
    let (unpacked, version) = unpack_kernel(work.path())?;
    let boot = unpacked.join("boot").join(format!("vmlinuz-{version}"));
    let mut archive = Archive::default();
    add_base(&mut archive);
    add_iproute_names(&mut archive)?;
    add_tools(&mut archive, tools)?;
    add_modules(&mut archive, &unpacked, &version)?;
    fs::rename(&boot, kernel).with_context(|| format!("cannot keep {}", boot.display()))?;
    fs::write(initramfs, archive.encode()?).with_context(|| format!("cannot write {}", initramfs.display()))
}

/// Downloads and unpacks the kernel package that Debian's cloud images use now; returns its files and its version.
fn unpack_kernel(work: &Path) -> anyhow::Result<(PathBuf, String)> {
    let depends = output(Command::new("apt-cache").args(["depends", "linux-image-cloud-amd64"]))?;
    let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).context(
        "apt knows no linux-image-cloud-amd64: run `apt-get update` (Debian's own repositories must be enabled)",
    )?;
    let version = package
        .strip_prefix("linux-image-")
        .with_context(|| format!("unexpected kernel package {package}"))?;
    let unpacked = debian::unpack(package, work)?;
    output(Command::new("depmod").arg("-b").arg(&unpacked).arg(version))?;
    Ok((unpacked, version.to_owned()))
}

fn add_base(archive: &mut Archive) {
    for directory in
        ["dev", "proc", "sys", "tmp", "run", "root", "var/tmp", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64"]
    {
        archive.directory(Path::new(directory));
    }
    for directory in ["bin", "sbin", "lib", "lib64"] {
        archive.symlink(Path::new(directory), format!("usr/{directory}"));
    }
    archive.symlink(Path::new("var/run"), "../run");
    archive.file(Path::new("init"), 0o755, INIT.into());
    // tcpdump gives up its rights for those of the user of its name.
    let users = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\ntcpdump:x:100:100::/:/bin/false\n";
    archive.file(Path::new("etc/passwd"), 0o644, users.into());
    archive.file(Path::new("etc/group"), 0o644, "root:x:0:\nnogroup:x:65534:\ntcpdump:x:100:\n".into());
    let protocols = "ip 0 IP\nicmp 1 ICMP\nipencap 4 IP-ENCAP\ntcp 6 TCP\nudp 17 UDP\nipv6 41 IPv6\nipv6-icmp 58 IPv6-ICMP\n";
    archive.file(Path::new("etc/protocols"), 0o644, protocols.into());
    archive.file(Path::new("etc/hosts"), 0o644, "127.0.0.1 localhost\n::1 localhost\n".into());
}

/// The names that `ip` knows for tables and protocols; which directory has them depends on its version.
fn add_iproute_names(archive: &mut Archive) -> anyhow::Result<()> {
    for directory in ["/etc/iproute2", "/usr/share/iproute2"] {
        let entries = fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
        for file in entries.map(|entry| entry.path()).filter(|path| path.is_file()) {
            files::add(archive, &file)?;
        }
    }
    Ok(())
}

fn add_tools(archive: &mut Archive, tools: &[PathBuf]) -> anyhow::Result<()> {
    let mut busybox = None;
    for tool in tools {
        let real = fs::canonicalize(tool).with_context(|| format!("cannot resolve {}", tool.display()))?;
        files::add_with_libraries(archive, &real)?;
        let name = tool.file_name().unwrap_or_default();
        // The kernel calls /sbin/modprobe itself; for the others every directory is in PATH.
        let usual = Path::new("usr/sbin").join(name);
        if !archive.contains(&usual) {
            archive.symlink(&usual, Path::new("/").join(fairlead_image::inside(&real)));
        }
        if name == "busybox" {
            busybox = Some(real);
        }
    }
    archive.symlink(Path::new("usr/bin/sh"), "dash");
    let busybox = busybox.context("no busybox among the tools")?;
    for applet in output(Command::new(&busybox).arg("--list"))?.lines() {
        let paths = ["usr/bin", "usr/sbin"].map(|directory| Path::new(directory).join(applet));
        if !paths.iter().any(|path| archive.contains(path)) {
            archive.symlink(
                &Path::new("usr/bin").join(applet),
                Path::new("/").join(fairlead_image::inside(&busybox)),
            );
        }
    }
    Ok(())
}

fn add_modules(archive: &mut Archive, unpacked: &Path, version: &str) -> anyhow::Result<()> {
    let source = unpacked.join("lib/modules").join(version);
    let target = Path::new("usr/lib/modules").join(version);
    let read = |name: &str| {
        let path = source.join(name);
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let (dependencies, builtin) = (read("modules.dep")?, read("modules.builtin")?);
    let (dependencies, builtin) = (String::from_utf8(dependencies)?, String::from_utf8(builtin)?);
    for module in modules::closure(&dependencies, &builtin, modules::WANTED)? {
        archive.file(&target.join(module), 0o644, read(module)?);
    }
    for index in [
        "modules.dep.bin",
        "modules.alias.bin",
        "modules.softdep",
        "modules.builtin.bin",
        "modules.builtin.alias.bin",
        "modules.symbols.bin",
    ] {
        archive.file(&target.join(index), 0o644, read(index)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_programs_are_listed_with_one_command_that_helps() {
        let message =
            missing_programs(&[&("ip", "iproute2"), &("tc", "iproute2"), &("wg", "wireguard-tools")]);
        assert!(
            message.contains("ip, tc, wg") && message.ends_with(" iproute2 wireguard-tools"),
            "{message}"
        );
    }
}
