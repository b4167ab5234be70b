//! Layers of a crate: directories of which each uses only those before it. What stands in none of them may use all.

use std::collections::BTreeMap;

use super::list::Violation;
use super::modules::Modules;
use super::sources::Sources;

/// By crate, the lowest layer first.
const LAYERS: [(&str, &[&str]); 1] = [("crates/mesh", &["model", "gather", "plan", "apply", "tell"])];

/// One violation for each file that is used from a layer below its own.
pub(super) fn violations(crates: &BTreeMap<String, Sources>) -> Vec<Violation> {
    let of_crate = |(directory, sources): (&String, &Sources)| {
        let found = LAYERS.iter().find(|(layered, _)| layered == directory);
        found.map(|(_, layers)| upwards(directory, layers, sources)).unwrap_or_default()
    };
    crates.iter().flat_map(of_crate).collect()
}

fn upwards(directory: &str, layers: &[&str], sources: &Sources) -> Vec<Violation> {
    let modules = Modules::of(sources);
    let mut found = Vec::new();
    for (file, targets) in modules.arrows() {
        let layer = layer(directory, layers, file);
        for (target, names) in targets {
            if self::layer(directory, layers, target) <= layer {
                continue;
            }
            let names: Vec<&str> = names.into_iter().collect();
            found.push(Violation {
                law: "layers",
                subject: format!("{file} -> {target}"),
                figure: names.len(),
                advice: format!(
                    "names of a higher layer ({}); from low to high: {}",
                    names.join(", "),
                    layers.join(", ")
                ),
            });
        }
    }
    found
}

/// Number of the layer of a file; the highest for what stands in none.
fn layer(directory: &str, layers: &[&str], file: &str) -> usize {
    let path = file.strip_prefix(directory).and_then(|path| path.strip_prefix("/src/")).unwrap_or_default();
    let name = path.split('/').next().unwrap_or_default().trim_end_matches(".rs");
    layers.iter().position(|layer| *layer == name).unwrap_or(layers.len())
}
