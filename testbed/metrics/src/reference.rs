//! The reference of metrics, made from what the programs expose.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::Exposed;

/// Set by `cargo xtask generate`: the reference is written instead of compared.
const GENERATE: &str = "FAIRLEAD_GENERATE";

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md")
}

/// The table of a program's metrics.
pub fn table(exposed: &Exposed) -> String {
    let mut table = "| metric | type | labels | meaning |\n|---|---|---|---|\n".to_owned();
    for (name, metric) in exposed.families() {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let help = metric.help.replace('|', "\\|").replace('<', "\\<");
        table.push_str(&format!("| `{name}` | {} | {} | {help} |\n", metric.kind, labels.join(" ")));
    }
    table
}

/// Compares the section of a program in `docs/metrics.md` with its metrics, or writes it.
///
/// # Errors
/// The section is stale, or is not there.
pub fn check(program: &str, exposed: &Exposed) -> Result<()> {
    let path = page();
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let updated = replaced(&text, program, &table(exposed))?;
    if std::env::var_os(GENERATE).is_some() {
        return fs::write(&path, updated).with_context(|| format!("cannot write {}", path.display()));
    }
    ensure!(text == updated, "docs/metrics.md is stale: run `cargo xtask generate`");
    Ok(())
}

/// A page with another section of `program`, between two comments.
fn replaced(page: &str, program: &str, table: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- {program}: begin -->\n"), format!("<!-- {program}: end -->\n"));
    let (before, rest) = page.split_once(&begin).with_context(|| format!("no {}", begin.trim()))?;
    let (_, after) = rest.split_once(&end).with_context(|| format!("no {}", end.trim()))?;
    Ok(format!("{before}{begin}{table}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_replaced_and_the_rest_kept() {
        let page = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n";
        assert_eq!(replaced(page, "x", "new\n").unwrap(), page.replace("old", "new"));
        assert!(replaced(page, "y", "").is_err());
    }

    #[test]
    fn a_row_names_type_labels_and_meaning() {
        let exposed = Exposed::parse(
            "# HELP a_total Things | <b>.\n# TYPE a_total counter\na_total{x=\"1\",y=\"2\"} 3\n",
        );
        assert!(table(&exposed).ends_with("| `a_total` | counter | `x` `y` | Things \\| \\<b> |\n"));
    }
}
