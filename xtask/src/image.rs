//! `cargo xtask image`: builds the programs and has `fairlead-image` put them into an OCI image.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use crate::setup;
use crate::steps::{Result, built, cargo, root, run, target, timed};

/// Options of the command line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Request {
    debug: bool,
    output: Option<PathBuf>,
    tag: Option<String>,
}

/// `cargo xtask image`
pub(crate) fn make(arguments: &[String]) -> Result {
    let request = parse(arguments)?;
    setup::packages()?;
    let (fairlead, plugin) = if request.debug {
        setup::build(&["--bin=fairlead", "--bin=fairlead-cni", "--bin=fairlead-image"])?;
        (built("fairlead"), built("fairlead-cni"))
    } else {
        release()?
    };
    let output = request.output.unwrap_or_else(|| target().join("fairlead-image.tar"));
    let mut command = Command::new(built("fairlead-image"));
    command.arg("--fairlead").arg(fairlead).arg("--plugin").arg(plugin).arg("--output").arg(output);
    command.args(request.tag.map(|tag| format!("--tag={tag}")));
    command.args(revision().map(|revision| format!("--revision={revision}")));
    if request.debug {
        command.arg("--local");
    }
    run(command)
}

fn parse(arguments: &[String]) -> std::result::Result<Request, String> {
    let mut request = Request::default();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        let mut value =
            || value.clone().or_else(|| arguments.next().cloned()).ok_or(format!("{name} needs a value"));
        match name {
            "--debug" => request.debug = true,
            "--output" | "-o" => request.output = Some(env::current_dir().unwrap_or_default().join(value()?)),
            "--tag" => request.tag = Some(value()?),
            other => {
                return Err(format!("unknown argument {other:?}; known are --tag, --output and --debug"));
            }
        }
    }
    Ok(request)
}

/// The node program finds names by the C library, so it is linked with that of this machine, which goes into the image. The
/// plugin runs on the node itself, whatever C library that has, so it brings its own.
fn release() -> std::result::Result<(PathBuf, PathBuf), String> {
    let host = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    timed("release builds for the image (first time about 8 minutes)", || {
        run(cargo(&["build", "--package", "fairlead-image"]))?;
        run(cargo(&["build", "--release", "--package", "fairlead", "--bin", "fairlead"]))?;
        let plugin = ["rustc", "--release", "--package", "fairlead-cni-plugin", "--bin", "fairlead-cni"];
        // A target of its own, or every other build would link its programs this way too.
        let apart = ["--target", &host, "--", "-C", "target-feature=+crt-static", "-C", "strip=symbols"];
        run(cargo(&[&plugin[..], &apart[..]].concat()))
    })?;
    Ok((target().join("release/fairlead"), target().join(host).join("release/fairlead-cni")))
}

/// Commit of the checkout, if it is one.
fn revision() -> Option<String> {
    let output = Command::new("git").current_dir(root()).args(["rev-parse", "HEAD"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| output.status.success() && !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> std::result::Result<Request, String> {
        parse(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn values_stand_beside_or_behind() {
        let expected =
            Request { debug: true, output: Some("/tmp/i.tar".into()), tag: Some("r.example/f:1".to_owned()) };
        assert_eq!(parsed(&["--tag=r.example/f:1", "--debug", "-o", "/tmp/i.tar"]), Ok(expected));
        assert_eq!(parsed(&[]), Ok(Request::default()));
    }

    #[test]
    fn what_is_unknown_or_missing_is_named() {
        assert!(parsed(&["--push"]).unwrap_err().contains("--push"));
        assert!(parsed(&["--tag"]).unwrap_err().contains("--tag needs a value"));
    }
}
