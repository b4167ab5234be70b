//! The test executables of the workspace, as cargo names them.

use std::io::{BufRead, BufReader};

use cargo_metadata::camino::Utf8PathBuf;
use cargo_metadata::{Message, Metadata, MetadataCommand};

use crate::setup;
use crate::steps::{root, say};

/// One test executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Executable {
    pub(crate) package: String,
    /// Directory of the package's manifest; tests run there.
    pub(crate) directory: Utf8PathBuf,
    pub(crate) path: Utf8PathBuf,
    /// Whether it has the tests of `tests/`, whose modules run as processes of their own.
    pub(crate) is_integration: bool,
}

/// Builds all tests at once and lists the executables.
pub(crate) fn build() -> Result<Vec<Executable>, String> {
    say("==> building the tests");
    let metadata = workspace()?;
    let mut child = setup::build_tests_with_messages()
        .spawn()
        .map_err(|error| format!("cannot run cargo build: {error}"))?;
    let messages = child.stdout.take().ok_or("cargo build has no output")?;
    let executables = parse(BufReader::new(messages), &metadata);
    let status = child.wait().map_err(|error| format!("cannot wait for cargo build: {error}"))?;
    if !status.success() {
        return Err("the tests do not compile".to_owned());
    }
    executables
}

/// The workspace without its dependencies.
pub(crate) fn workspace() -> Result<Metadata, String> {
    let mut command = MetadataCommand::new();
    command.current_dir(root()).no_deps();
    command.exec().map_err(|error| format!("cannot read the workspace: {error}"))
}

fn parse(messages: impl BufRead, metadata: &Metadata) -> Result<Vec<Executable>, String> {
    let mut executables = Vec::new();
    for message in Message::parse_stream(messages) {
        let message = message.map_err(|error| format!("cannot read cargo's messages: {error}"))?;
        let Message::CompilerArtifact(artifact) = message else { continue };
        // Libraries and programs that tests use come as well; only the profile says what is a test.
        let Some(path) = artifact.executable.filter(|_| artifact.profile.test) else { continue };
        let of_artifact = |package: &&cargo_metadata::Package| package.id == artifact.package_id;
        let package = metadata.packages.iter().find(of_artifact).ok_or_else(|| {
            format!("cargo built tests of {}, which is not in the workspace", artifact.package_id)
        })?;
        let directory = package.manifest_path.parent().ok_or("a manifest without a directory")?;
        executables.push(Executable {
            package: package.name.to_string(),
            directory: directory.to_owned(),
            path,
            is_integration: artifact.target.is_test(),
        });
    }
    Ok(executables)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As cargo prints it, of the first package of this workspace.
    fn artifact(package: &cargo_metadata::Package, test: bool) -> String {
        serde_json_line(&[
            ("reason", "\"compiler-artifact\""),
            ("package_id", &format!("\"{}\"", package.id)),
            ("manifest_path", &format!("\"{}\"", package.manifest_path)),
            (
                "target",
                r#"{"kind":["test"],"crate_types":["bin"],"name":"t","src_path":"/w/t.rs","edition":"2024","doc":false,"doctest":false,"test":true}"#,
            ),
            (
                "profile",
                &format!(
                    r#"{{"opt_level":"0","debuginfo":0,"debug_assertions":true,"overflow_checks":true,"test":{test}}}"#
                ),
            ),
            ("features", "[]"),
            ("filenames", r#"["/t/a-1"]"#),
            ("executable", r#""/t/a-1""#),
            ("fresh", "true"),
        ])
    }

    fn serde_json_line(fields: &[(&str, &str)]) -> String {
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}\n", fields.join(","))
    }

    #[test]
    fn test_executables_are_found_in_cargos_messages() {
        let metadata = workspace().unwrap();
        let package = &metadata.packages[0];
        let messages = [
            "a line of a build script\n".to_owned(),
            artifact(package, false),
            artifact(package, true),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let expected = Executable {
            package: package.name.to_string(),
            directory: package.manifest_path.parent().unwrap().to_owned(),
            path: "/t/a-1".into(),
            is_integration: true,
        };
        assert_eq!(parse(messages.concat().as_bytes(), &metadata), Ok(vec![expected]));
    }

    #[test]
    fn tests_of_a_package_outside_the_workspace_are_an_error() {
        let metadata = workspace().unwrap();
        let message = artifact(&metadata.packages[0], true).replace("#", "#other-");
        let error = parse(message.as_bytes(), &metadata).unwrap_err();
        assert!(error.contains("not in the workspace"), "{error}");
    }
}
