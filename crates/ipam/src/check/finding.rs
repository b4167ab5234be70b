//! Disagreements that a person can act on.

/// How bad a finding is.
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
    /// How bad it is.
    pub severity: Severity,
    /// What kind it is, in one word for programs.
    pub reason: &'static str,
    /// The address, block or pod it is about.
    pub subject: String,
    /// What was found.
    pub what: String,
    /// How it may have come about, or what follows from it.
    pub why: String,
    /// What to do.
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
