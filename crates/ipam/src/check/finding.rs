//! Disagreements that a person can act on.

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Packets are lost or misled, or two pods may get one address.
    Error,
    /// Untidy, or it heals by itself.
    Warning,
}

impl Severity {
    /// The word for it, in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// One disagreement.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Severity of the disagreement.
    pub severity: Severity,
    /// Kind of the disagreement, in one CamelCase word for programs.
    pub reason: &'static str,
    /// The address, block or pod it is about.
    pub subject: String,
    /// Description of the disagreement.
    pub what: String,
    /// Possible cause, or consequence.
    pub why: String,
    /// Advice: commands or changes that end the disagreement.
    pub advice: String,
}

/// A finding from its parts, in the order of the struct.
pub(super) fn finding(
    severity: Severity,
    reason: &'static str,
    subject: impl Into<String>,
    [what, why, advice]: [String; 3],
) -> Finding {
    Finding { severity, reason, subject: subject.into(), what, why, advice }
}
