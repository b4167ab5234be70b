//! The list of today's violations, and what differs from it.

use std::collections::BTreeMap;

/// Violation of a law.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Violation {
    /// Section of the list.
    pub(super) law: &'static str,
    /// Subject: a file, a function in it, a crate.
    pub(super) subject: String,
    /// Size: lines, fields, files; 1 where only its existence counts.
    pub(super) figure: usize,
    /// The limit, and what to do.
    pub(super) advice: String,
}

/// Violations that are known, by law and subject.
pub(super) type Known = BTreeMap<(String, String), usize>;

/// Reads the list: sections `[law]` with lines `"subject" = figure`.
pub(super) fn parse(list: &str) -> Result<Known, String> {
    let mut law = String::new();
    let mut known = Known::new();
    for line in list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            law = name.to_owned();
            continue;
        }
        let entry = line.strip_prefix('"').and_then(|line| line.rsplit_once("\" = "));
        let (subject, figure) = entry.ok_or_else(|| format!("cannot read the line '{line}'"))?;
        let figure =
            figure.parse().map_err(|error| format!("cannot read the figure of '{line}': {error}"))?;
        if known.insert((law.clone(), subject.to_owned()), figure).is_some() {
            return Err(format!("'{subject}' is listed twice"));
        }
    }
    Ok(known)
}

pub(super) fn write(known: &Known) -> String {
    let mut text = "# Violations of the laws in ARCHITECTURE.md, by law. The list may only shrink; CONTRIBUTING.md says how.\n".to_owned();
    let mut section = "";
    for ((law, subject), figure) in known {
        if law != section {
            text.push_str(&format!("\n[{law}]\n"));
            section = law;
        }
        text.push_str(&format!("\"{subject}\" = {figure}\n"));
    }
    text
}

/// Objections: new and larger violations, and entries that are larger than what they list.
pub(super) fn judge(found: &[Violation], known: &Known) -> Vec<String> {
    let mut wrong = Vec::new();
    for Violation { law, subject, figure, advice } in found {
        match known.get(&((*law).to_owned(), subject.clone())) {
            Some(listed) if listed == figure => {}
            Some(listed) if listed > figure => {
                wrong
                    .push(format!("{law}: {subject} has {figure} now and is listed with {listed}: {UPDATE}"));
            }
            Some(listed) => wrong.push(format!("{law}: {subject} grew from {listed} to {figure}: {advice}")),
            None => wrong.push(format!("{law}: {subject} has {figure}: {advice}")),
        }
    }
    let is_found = |law: &str, subject: &str| found.iter().any(|it| it.law == law && it.subject == subject);
    let gone = known.keys().filter(|(law, subject)| !is_found(law, subject));
    wrong.extend(
        gone.map(|(law, subject)| format!("{law}: {subject} is listed and violates no more: {UPDATE}")),
    );
    wrong
}

pub(super) const UPDATE: &str = "shorten the list with FAIRLEAD_LAWS=update cargo test -p xtask laws";

/// The list after it was shortened; with `grow` also what is new and larger.
pub(super) fn update(found: &[Violation], known: &Known, grow: bool) -> Known {
    let entry = |it: &Violation| {
        let key = (it.law.to_owned(), it.subject.clone());
        let listed = known.get(&key).copied();
        let figure = if grow { it.figure } else { it.figure.min(listed?) };
        Some((key, figure))
    };
    found.iter().filter_map(entry).collect()
}
