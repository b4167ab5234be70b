//! `fairlead-image`: builds Fairlead's image from compiled programs. `cargo xtask image` compiles them and runs it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Parser;
use fairlead_image::{Compression, Image, Reference, Tree, libraries};

/// Build Fairlead's OCI image from compiled programs
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Path of the executable `fairlead`
    #[arg(long)]
    fairlead: PathBuf,
    /// Path of the CNI plugin, statically linked, because it runs on the node and must not need its C library
    #[arg(long)]
    plugin: PathBuf,
    /// Name and tag of the image
    #[arg(long, default_value = concat!("localhost/fairlead:", env!("CARGO_PKG_VERSION")))]
    tag: Reference,
    /// Path of the tar to write
    #[arg(short, long)]
    output: PathBuf,
    /// Source revision, for the label org.opencontainers.image.revision
    #[arg(long)]
    revision: Option<String>,
    /// Build for clusters on this machine: without compression, and with a dynamically linked plugin if it is one
    #[arg(long)]
    local: bool,
}

/// Names of Coil's programs, which manifests use.
const COIL_NAMES: [&str; 6] = [
    "coild",
    "coil-egress",
    "coil-egress-controller",
    "coil-installer",
    "coil-ipam-controller",
    "coil-router",
];

/// Tools to inspect a node's network, from the Debian packages of the machine that builds the image.
const TOOLS: [&str; 4] = ["/usr/sbin/conntrack", "/usr/sbin/ip", "/usr/sbin/nft", "/usr/bin/wg"];

/// Public authorities, one file each, as the Debian package ca-certificates brings them (Mozilla's).
const AUTHORITIES: &str = "/usr/share/ca-certificates/mozilla";
/// File in which programs look for them, as in Debian.
const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(line) => {
            // A closed standard output is no reason to fail.
            let _ = writeln!(std::io::stdout(), "{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<String> {
    if !arguments.local {
        let needed = libraries(&arguments.plugin)?;
        ensure!(
            needed.is_empty(),
            "{} needs shared libraries {needed:?}: link it statically",
            arguments.plugin.display()
        );
    }
    let image = Image {
        references: vec![arguments.tag.clone()],
        entrypoint: vec!["/usr/local/bin/fairlead".to_owned()],
        command: vec!["--help".to_owned()],
        environment: BTreeMap::from([(
            "PATH".to_owned(),
            "/usr/local/coil:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin".to_owned(),
        )]),
        labels: labels(arguments.revision.as_deref()),
        compression: if arguments.local { Compression::None } else { Compression::Gzip },
    };
    let tree = tree(&arguments.fairlead, &arguments.plugin)?;
    let digest = fairlead_image::write(&tree, &image, &arguments.output)?;
    Ok(format!("{} {} {digest}", arguments.output.display(), arguments.tag))
}

fn tree(fairlead: &Path, plugin: &Path) -> anyhow::Result<Tree> {
    let mut tree = Tree::new();
    tree.program(fairlead, Path::new("/usr/local/bin/fairlead"))?;
    tree.file(plugin, Path::new("/usr/local/coil/coil"))?;
    for name in COIL_NAMES {
        tree.symlink(&Path::new("/usr/local/coil").join(name), "../bin/fairlead");
    }
    // The user of the controller, so that its ID has a name.
    tree.bytes(
        Path::new("/etc/passwd"),
        0o644,
        "root:x:0:0:root:/root:/bin/sh\nfairlead:x:10000:10000::/:/bin/sh\n",
    );
    tree.bytes(Path::new("/etc/group"), 0o644, "root:x:0:\nfairlead:x:10000:\n");
    let bundle = authorities(Path::new(AUTHORITIES)).context("install the Debian package ca-certificates")?;
    tree.bytes(Path::new(BUNDLE), 0o644, bundle);
    for tool in TOOLS.map(Path::new) {
        tree.program(tool, tool)
            .context("install the Debian packages conntrack, iproute2, nftables and wireguard-tools")?;
    }
    // Busybox's own shell would run its own `ip` instead of the real one.
    tree.program(Path::new("/usr/bin/dash"), Path::new("/usr/bin/sh"))
        .context("install the Debian package dash")?;
    let busybox = Path::new("/usr/bin/busybox");
    tree.file(busybox, busybox).context("install the Debian package busybox-static")?;
    for applet in [
        "cat", "env", "grep", "head", "ls", "nc", "ping", "ping6", "ps", "sleep", "sysctl", "tail", "top",
        "vi", "wget",
    ] {
        tree.symlink(&Path::new("/usr/bin").join(applet), "busybox");
    }
    Ok(tree)
}

/// The certificates in a directory as one bundle, in the order of their names. The machine's own bundle is not taken: it has the authorities
/// that its administrator added, such as that of a proxy.
fn authorities(directory: &Path) -> anyhow::Result<Vec<u8>> {
    let entries =
        std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<BTreeSet<PathBuf>>>()?;
    let mut bundle = Vec::new();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "crt")) {
        let certificate = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        bundle.extend_from_slice(certificate.trim_ascii());
        bundle.push(b'\n');
    }
    ensure!(!bundle.is_empty(), "{} has no certificates", directory.display());
    Ok(bundle)
}

/// <https://github.com/opencontainers/image-spec/blob/main/annotations.md>
fn labels(revision: Option<&str>) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([
        ("description", "A Kubernetes network across clouds, homes and data centres"),
        ("licenses", env!("CARGO_PKG_LICENSE")),
        ("title", "Fairlead"),
        ("version", env!("CARGO_PKG_VERSION")),
    ]);
    labels.extend(revision.map(|revision| ("revision", revision)));
    labels
        .into_iter()
        .map(|(key, value)| (format!("org.opencontainers.image.{key}"), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_plugin_that_needs_libraries_is_refused_unless_local() {
        let directory = tempfile::tempdir().unwrap();
        let arguments = |local| Arguments {
            fairlead: "/bin/true".into(),
            plugin: "/bin/true".into(),
            tag: "localhost/fairlead:test".parse().unwrap(),
            output: directory.path().join("image.tar"),
            revision: Some("abc".to_owned()),
            local,
        };
        let error = run(&arguments(false)).unwrap_err().to_string();
        assert!(error.contains("link it statically") && error.contains("libc.so.6"), "{error}");
        assert!(run(&arguments(true)).unwrap().contains("localhost/fairlead:test sha256:"));
    }

    #[test]
    fn the_tree_has_programs_tools_and_coils_names() {
        let tree = tree(Path::new("/bin/true"), Path::new("/bin/true")).unwrap();
        for path in [
            "/usr/local/bin/fairlead",
            "/usr/local/coil/coil",
            "/usr/local/coil/coild",
            "/usr/sbin/nft",
            "/bin/sh",
            "/etc/ssl/certs/ca-certificates.crt",
        ] {
            assert!(tree.contains(Path::new(path)), "{path} is missing");
        }
    }

    #[test]
    fn public_authorities_are_in_the_image_and_those_of_the_machine_are_not() {
        let bundle = authorities(Path::new(AUTHORITIES)).unwrap();
        let roots = fairlead_transport::trust(&bundle).unwrap();
        assert!(roots.len() > 100, "{}", roots.len());
        let own = tempfile::tempdir().unwrap();
        let first = std::fs::read_dir(AUTHORITIES).unwrap().next().unwrap().unwrap().path();
        std::fs::copy(&first, own.path().join("a.crt")).unwrap();
        std::fs::write(own.path().join("README"), "no certificate").unwrap();
        assert_eq!(fairlead_transport::trust(&authorities(own.path()).unwrap()).unwrap().len(), 1);
        let none = authorities(&own.path().join("none")).unwrap_err();
        assert!(format!("{none:#}").contains("none"), "{none:#}");
    }
}
