//! Writes the CustomResourceDefinitions to `deploy/crds`, one file each, and the admission policies that warn of fields
//! without effect to `deploy/policy`.
//!
//! With `--check` nothing is written: stale, missing and unknown files are named, and the exit status is 1 if
//! there are any. A directory may be given as argument instead of `deploy`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the command line")]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fairlead_api::resources::definitions;
use fairlead_api::resources::not_implemented::warning_policies;
use serde_json::Value;

const HEADER: &str = "# Generated from crates/api/src/resources by `cargo xtask generate`. Do not edit.\n";
/// Directory in which every file is generated.
const DEFINITIONS: &str = "crds";
const POLICIES: &str = "policy/not-implemented.yaml";

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let (options, paths): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|arg| arg.starts_with('-'));
    if let Some(unknown) = options.iter().find(|option| *option != "--check") {
        return Err(format!("unknown option '{unknown}': there is only --check").into());
    }
    let default = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy"));
    let directory = paths.first().map_or(default, PathBuf::from);
    let files = render()?;
    if options.is_empty() { write(&directory, &files) } else { check(&directory, &files) }
}

fn render() -> Result<BTreeMap<String, String>, Box<dyn Error>> {
    let mut files = BTreeMap::new();
    let mut kustomization =
        format!("{HEADER}apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n");
    for definition in definitions() {
        let mut manifest = serde_json::to_value(&definition)?;
        write_whole_numbers(&mut manifest);
        let spec = &definition.spec;
        let file = format!("{}_{}.yaml", spec.group, spec.names.plural);
        kustomization.push_str(&format!("  - {file}\n"));
        files.insert(
            format!("{DEFINITIONS}/{file}"),
            format!("{HEADER}{}", serde_saphyr::to_string(&manifest)?),
        );
    }
    files.insert(format!("{DEFINITIONS}/kustomization.yaml"), kustomization);
    let policies = warning_policies().iter().map(serde_saphyr::to_string).collect::<Result<Vec<_>, _>>()?;
    files.insert(POLICIES.to_owned(), format!("{HEADER}{}", policies.join("---\n")));
    Ok(files)
}

/// `maximum` and the like are floating-point numbers in Kubernetes's types, but `63.0` is not what people write,
/// nor the API server's answer.
fn write_whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let float = number.as_f64().unwrap_or_default();
            if number.is_f64() && float.fract() == 0.0 && float.abs() < f64::from(u32::MAX) {
                *value = Value::from(float as i64);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(write_whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(write_whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

fn write(directory: &Path, files: &BTreeMap<String, String>) -> Result<ExitCode, Box<dyn Error>> {
    for (name, content) in files {
        let path = directory.join(name);
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::write(path, content)?;
    }
    for name in unknown_files(directory, files)? {
        std::fs::remove_file(directory.join(name))?;
    }
    println!("wrote {} files to {}", files.len(), directory.display());
    Ok(ExitCode::SUCCESS)
}

fn check(directory: &Path, files: &BTreeMap<String, String>) -> Result<ExitCode, Box<dyn Error>> {
    let differs = |(name, content): (&String, &String)| {
        (std::fs::read_to_string(directory.join(name)).ok().as_ref() != Some(content)).then(|| name.clone())
    };
    let mut stale: Vec<String> = files.iter().filter_map(differs).collect();
    stale.extend(unknown_files(directory, files)?);
    for name in &stale {
        eprintln!("stale: {}", directory.join(name).display());
    }
    if stale.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("hint: run `cargo xtask generate`");
    Ok(ExitCode::FAILURE)
}

/// Files of definitions that are no longer there.
fn unknown_files(directory: &Path, files: &BTreeMap<String, String>) -> Result<Vec<String>, Box<dyn Error>> {
    let definitions = directory.join(DEFINITIONS);
    if !definitions.exists() {
        return Ok(Vec::new());
    }
    let mut unknown = Vec::new();
    for entry in std::fs::read_dir(definitions)? {
        let name = format!("{DEFINITIONS}/{}", entry?.file_name().to_string_lossy());
        if name.ends_with(".yaml") && !files.contains_key(&name) {
            unknown.push(name);
        }
    }
    Ok(unknown)
}
