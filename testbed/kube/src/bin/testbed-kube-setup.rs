//! Builds what tests need ahead of them, so that no test has to wait minutes for it: the control plane, or with the
//! argument `images` the images of test clusters, or with `conformance` those and upstream's suite.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use testbed_kube::{binary, conformance, images};

fn main() -> ExitCode {
    match build(std::env::args().nth(1).as_deref()) {
        Ok(paths) => {
            paths.iter().for_each(|path| print_line(&path.display().to_string()));
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("testbed-kube-setup: {error:#}\n"),
            );
            ExitCode::FAILURE
        }
    }
}

fn build(what: Option<&str>) -> anyhow::Result<Vec<PathBuf>> {
    let images = || [images::pause(), images::busybox(), images::agnhost(), images::coredns()].into_iter();
    match what {
        None | Some("control-plane") => Ok(vec![binary()?]),
        Some("conformance") => images().chain([conformance::ginkgo(), conformance::e2e_test()]).collect(),
        Some("images") => images().collect(),
        Some(other) => bail!("unknown argument {other:?}; known are control-plane, images and conformance"),
    }
}

#[expect(clippy::print_stdout, reason = "the paths are this program's result")]
fn print_line(line: &str) {
    println!("{line}");
}
