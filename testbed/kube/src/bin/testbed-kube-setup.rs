//! Builds what tests need ahead of them, so that no test has to wait minutes for it: for the argument `control-plane`
//! the programs of Kubernetes, for `images` the images of test clusters, for `conformance` upstream's suite.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use testbed_kube::{binary, conformance, images};

fn main() -> ExitCode {
    for what in std::env::args().skip(1) {
        match build(&what) {
            Ok(paths) => paths.iter().for_each(|path| print_line(&path.display().to_string())),
            Err(error) => {
                let _ = std::io::Write::write_fmt(
                    &mut std::io::stderr(),
                    format_args!("testbed-kube-setup: {error:#}\n"),
                );
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn build(what: &str) -> anyhow::Result<Vec<PathBuf>> {
    match what {
        "conformance" => Ok(vec![conformance::ginkgo()?, conformance::e2e_test()?]),
        "control-plane" => Ok(vec![binary()?]),
        "images" => Ok(vec![images::pause()?, images::busybox()?, images::agnhost()?, images::coredns()?]),
        other => bail!("unknown argument {other:?}; known are conformance, control-plane and images"),
    }
}

#[expect(clippy::print_stdout, reason = "the paths are this program's result")]
fn print_line(line: &str) {
    println!("{line}");
}
