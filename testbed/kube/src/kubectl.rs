//! Calls of kubectl as administrator.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};

use crate::Options;
use crate::programs::Programs;

/// Runs kubectl where the control plane runs, with the kubeconfig in its state directory; returns what it printed on stdout.
pub(crate) fn run<A: AsRef<OsStr>>(
    programs: &Programs,
    options: &Options,
    directory: &Path,
    args: &[A],
    stdin: &str,
) -> anyhow::Result<String> {
    let mut child = programs
        .command(options, "kubectl")
        .args(args)
        .env("KUBECONFIG", directory.join("admin.kubeconfig"))
        // What is known about this server must not be taken for the next one's on the same port.
        .env("KUBECACHEDIR", directory.join("kubectl-cache"))
        // Collecting garbage is half of what a call costs, and it ends before it has made much.
        .envs([("GOGC", "off"), ("GOMEMLIMIT", "512MiB")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run kubectl")?;
    let input = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // Beside reading: kubectl may fill its output before it has read all input. If it ends early,
        // its own words say why, not the broken pipe.
        scope.spawn(move || input.map(|mut pipe| pipe.write_all(stdin.as_bytes())));
        child.wait_with_output()
    })
    .context("cannot read kubectl's output")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        let words: Vec<_> = args.iter().map(|word| word.as_ref().to_string_lossy()).collect();
        let (stderr, stdout) = (text(&output.stderr), text(&output.stdout));
        bail!("kubectl {} failed ({}): {}{stdout}", words.join(" "), output.status, stderr.trim_end());
    }
    Ok(text(&output.stdout))
}
