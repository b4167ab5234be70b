//! The tar around the layer: an OCI image layout, and the file that older Docker reads instead.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context;
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};
use tempfile::NamedTempFile;

use crate::layer::{self, Compression, Layer};
use crate::{Reference, Tree};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The metadata of an image.
#[derive(Debug, Default)]
pub struct Image {
    /// Names of the image; at least one.
    pub references: Vec<Reference>,
    /// The entry point.
    pub entrypoint: Vec<String>,
    /// The default arguments, or the program if there is no entry point.
    pub command: Vec<String>,
    /// Environment variables; `PATH` defaults to Debian's.
    pub environment: BTreeMap<String, String>,
    /// Labels and annotations, such as `org.opencontainers.image.version`.
    pub labels: BTreeMap<String, String>,
    /// Compression of its layer.
    pub compression: Compression,
}

impl Image {
    fn config(&self, layer: &Layer) -> Value {
        let mut environment = self.environment.clone();
        let path = || "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned();
        environment.entry("PATH".to_owned()).or_insert_with(path);
        let environment: Vec<String> =
            environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
        json!({
            "architecture": architecture(),
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {
                "Env": environment, "Entrypoint": self.entrypoint, "Cmd": self.command,
                "WorkingDir": "/", "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "fairlead-image"}],
        })
    }

    fn index(&self, manifest: &[u8]) -> Value {
        let entries: Vec<Value> = self
            .references
            .iter()
            .map(|reference| {
                json!({
                    "mediaType": MANIFEST, "digest": layer::digest(manifest), "size": manifest.len(),
                    "platform": {"architecture": architecture(), "os": "linux"},
                    "annotations": {
                        "io.containerd.image.name": reference.to_string(),
                        "org.opencontainers.image.ref.name": reference.tag(),
                    },
                })
            })
            .collect();
        json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
    }
}

/// Writes the image to `output`, replacing it atomically. Returns the digest of its manifest, `sha256:…`.
///
/// # Errors
/// A file of the tree cannot be read, or `output` cannot be written.
pub fn write(tree: &Tree, image: &Image, output: &Path) -> anyhow::Result<String> {
    let directory = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let context = || format!("cannot write the image {}", output.display());
    let temporary = || NamedTempFile::new_in(directory).with_context(context);
    let (layer_file, archive) = (temporary()?, temporary()?);
    let layer = layer::write(tree, image.compression, layer_file.as_file()).with_context(context)?;
    let config = image.config(&layer).to_string();
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": layer::digest(config.as_bytes()), "size": config.len()},
        "layers": [{"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size}],
        "annotations": image.labels,
    })
    .to_string();
    let mut tar = Builder::new(BufWriter::new(archive.as_file()));
    let mut blob = |path: &str, content: &mut dyn Read, size: u64| {
        append(&mut tar, path, content, size).with_context(context)
    };
    let text = |bytes: &str| u64::try_from(bytes.len());
    for (path, content) in [
        ("oci-layout".to_owned(), r#"{"imageLayoutVersion":"1.0.0"}"#.to_owned()),
        ("index.json".to_owned(), image.index(manifest.as_bytes()).to_string()),
        ("manifest.json".to_owned(), docker_manifest(image, &config, &layer)),
        (blob_path(&layer::digest(config.as_bytes())), config.clone()),
        (blob_path(&layer::digest(manifest.as_bytes())), manifest.clone()),
    ] {
        blob(&path, &mut content.as_bytes(), text(&content)?)?;
    }
    blob(&blob_path(&layer.digest), &mut layer_file.reopen().with_context(context)?, layer.size)?;
    tar.into_inner().and_then(|mut buffer| buffer.flush()).with_context(context)?;
    publish(archive, output).with_context(context)?;
    Ok(layer::digest(manifest.as_bytes()))
}

/// The manifest that `docker load` reads before version 25; the blobs are the same.
fn docker_manifest(image: &Image, config: &str, layer: &Layer) -> String {
    let tags: Vec<String> = image.references.iter().map(Reference::to_string).collect();
    let config = blob_path(&layer::digest(config.as_bytes()));
    json!([{"Config": config, "RepoTags": tags, "Layers": [blob_path(&layer.digest)]}]).to_string()
}

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

fn append(
    tar: &mut Builder<BufWriter<&File>>,
    path: &str,
    content: &mut dyn Read,
    size: u64,
) -> std::io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o644);
    header.set_size(size);
    header.set_mtime(0);
    tar.append_data(&mut header, path, content)
}

fn publish(archive: NamedTempFile, output: &Path) -> anyhow::Result<()> {
    archive.as_file().set_permissions(Permissions::from_mode(0o644))?;
    archive.persist(output)?;
    Ok(())
}

/// The name in Go and OCI.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "aarch64" => "arm64",
        "x86_64" => "amd64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tempfile::TempDir;

    use super::*;

    fn tree() -> Tree {
        let mut tree = Tree::new();
        tree.bytes(Path::new("/etc/motd"), 0o644, "hello\n");
        tree.symlink(Path::new("/bin/sh"), "dash");
        tree.program(Path::new("/bin/true"), Path::new("/usr/local/bin/true")).unwrap();
        tree
    }

    fn image(compression: Compression) -> Image {
        let label = ("org.opencontainers.image.version".to_owned(), "1".to_owned());
        Image {
            references: ["localhost/test:1", "localhost/test:one"].map(|name| name.parse().unwrap()).to_vec(),
            labels: BTreeMap::from([label]),
            compression,
            ..Image::default()
        }
    }

    fn members(path: &Path) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(File::open(path).unwrap());
        let read = |mut entry: tar::Entry<'_, File>| {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().display().to_string(), bytes)
        };
        archive.entries().unwrap().map(|entry| read(entry.unwrap())).collect()
    }

    fn object(members: &BTreeMap<String, Vec<u8>>, path: &str) -> Value {
        serde_json::from_slice(&members[path]).unwrap()
    }

    /// The blob a descriptor names, which must be what the descriptor says.
    fn follow<'a>(members: &'a BTreeMap<String, Vec<u8>>, descriptor: &Value) -> &'a [u8] {
        let digest = descriptor["digest"].as_str().unwrap();
        let bytes = &members[&blob_path(digest)];
        assert_eq!(layer::digest(bytes), digest);
        assert_eq!(descriptor["size"], bytes.len());
        bytes
    }

    #[test]
    fn every_digest_leads_to_its_bytes_and_every_name_to_the_image() {
        for compression in [Compression::Gzip, Compression::None] {
            let directory = TempDir::new().unwrap();
            let output = directory.path().join("new/image.tar");
            let digest = write(&tree(), &image(compression), &output).unwrap();
            let members = members(&output);
            let index = object(&members, "index.json");
            let names: Vec<&str> = index["manifests"]
                .as_array()
                .unwrap()
                .iter()
                .map(|entry| entry["annotations"]["io.containerd.image.name"].as_str().unwrap())
                .collect();
            assert_eq!(names, ["localhost/test:1", "localhost/test:one"]);
            assert_eq!(index["manifests"][0]["digest"], digest);
            let manifest: Value = serde_json::from_slice(follow(&members, &index["manifests"][0])).unwrap();
            let config: Value = serde_json::from_slice(follow(&members, &manifest["config"])).unwrap();
            let stored = follow(&members, &manifest["layers"][0]);
            let mut layer = Vec::new();
            match compression {
                Compression::Gzip => flate2::read::GzDecoder::new(stored).read_to_end(&mut layer).unwrap(),
                Compression::None => layer.write(stored).unwrap(),
            };
            assert_eq!(config["rootfs"]["diff_ids"][0], layer::digest(&layer));
            let docker = object(&members, "manifest.json");
            assert!(members.contains_key(docker[0]["Layers"][0].as_str().unwrap()));
            assert!(members.contains_key(docker[0]["Config"].as_str().unwrap()));
        }
    }

    #[test]
    fn the_layer_has_files_links_and_libraries_of_root() {
        let directory = TempDir::new().unwrap();
        let output = directory.path().join("image.tar");
        write(&tree(), &image(Compression::None), &output).unwrap();
        let members = members(&output);
        let manifest = follow(&members, &object(&members, "index.json")["manifests"][0]).to_owned();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let mut layer = tar::Archive::new(follow(&members, &manifest["layers"][0]));
        let mut seen = BTreeMap::new();
        for entry in layer.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, 0));
            let target = entry.link_name().unwrap().map(|target| target.display().to_string());
            seen.insert(entry.path().unwrap().display().to_string(), (header.mode().unwrap(), target));
        }
        assert_eq!(seen["usr/local/bin/true"], (0o755, None));
        assert_eq!(seen["usr/bin/sh"].1.as_deref(), Some("dash"));
        assert_eq!(seen["bin"].1.as_deref(), Some("usr/bin"));
        assert!(seen.keys().any(|path| path.ends_with("libc.so.6")), "{seen:?}");
    }

    #[test]
    fn two_runs_give_the_same_bytes() {
        let directory = TempDir::new().unwrap();
        for compression in [Compression::Gzip, Compression::None] {
            let (one, two) = (directory.path().join("1.tar"), directory.path().join("2.tar"));
            let digests = [&one, &two].map(|path| write(&tree(), &image(compression), path).unwrap());
            assert_eq!(digests[0], digests[1]);
            assert_eq!(fs::read(one).unwrap(), fs::read(two).unwrap());
        }
    }

    #[test]
    fn a_failed_image_leaves_nothing_behind() {
        let directory = TempDir::new().unwrap();
        let gone = directory.path().join("gone");
        fs::write(&gone, "x").unwrap();
        let mut tree = Tree::new();
        tree.file(&gone, Path::new("/gone")).unwrap();
        fs::remove_file(&gone).unwrap();
        let output = directory.path().join("out/image.tar");
        let error = format!("{:#}", write(&tree, &image(Compression::None), &output).unwrap_err());
        assert!(error.contains("/gone"), "{error}");
        assert_eq!(fs::read_dir(directory.path().join("out")).unwrap().count(), 0);
    }
}
