//! Prometheus' `promtool`, from Debian's package, which is not installed.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use testbed_cache::debian;

/// `promtool check metrics`: names, types and help of a scrape in the text format.
///
/// # Errors
/// It reports a problem, or cannot be installed.
pub fn check_metrics(scrape: &str) -> Result<()> {
    run(&["check", "metrics"], scrape)
}

/// `promtool check rules`: a file of rules, without the object that wraps it in Kubernetes.
///
/// # Errors
/// It reports a problem, or cannot be installed.
pub fn check_rules(rules: &Path) -> Result<()> {
    run(&["check", "rules", &rules.to_string_lossy()], "")
}

fn run(arguments: &[&str], input: &str) -> Result<()> {
    let promtool = debian::program("prometheus", "/usr/bin/promtool")?;
    let mut command = Command::new(&promtool);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {}", promtool.display()))?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.map(|mut pipe| pipe.write_all(input.as_bytes())));
        child.wait_with_output()
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    ensure!(output.status.success(), "promtool {}: {stdout}{stderr}", arguments.join(" "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promtool_refuses_a_counter_without_its_suffix() {
        check_metrics("# HELP a_total A.\n# TYPE a_total counter\na_total 1\n").unwrap();
        let error = check_metrics("# HELP a A.\n# TYPE a counter\na 1\n").unwrap_err();
        assert!(format!("{error:#}").contains("_total"), "{error:#}");
    }

    #[test]
    fn promtool_accepts_the_alerts_of_deploy() {
        let alerts = include_str!("../../../deploy/components/monitoring/alerts.yaml");
        let (_, spec) = alerts.split_once("\nspec:\n").unwrap();
        let rules: String =
            spec.lines().map(|line| format!("{}\n", line.get(2..).unwrap_or_default())).collect();
        assert!(rules.starts_with("groups:\n"), "{rules}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        check_rules(file.path()).unwrap();
    }
}
