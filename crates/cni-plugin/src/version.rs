//! The supported versions of the CNI specification.

use serde::Serialize;

/// A supported version, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SpecVersion {
    /// 0.3.1
    V0_3_1,
    /// 0.4.0: CHECK, and prevResult on DEL.
    V0_4_0,
    /// 1.0.0: no `version` in `ips`.
    V1_0_0,
    /// 1.1.0: GC and STATUS, more about interfaces and routes.
    V1_1_0,
}

impl SpecVersion {
    /// Every supported version, oldest first.
    pub const ALL: [Self; 4] = [Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    /// Version for the VERSION command, and for errors before the configuration is parsed.
    pub const NEWEST: Self = Self::V1_1_0;

    /// Text in `cniVersion`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// The supported version of that name.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }

    /// `0.3.1, 0.4.0, 1.0.0, 1.1.0`, for messages.
    pub fn list() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

/// The answer to VERSION, as JSON.
pub fn answer() -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Answer {
        cni_version: &'static str,
        supported_versions: [&'static str; 4],
    }
    let answer = Answer {
        cni_version: SpecVersion::NEWEST.as_str(),
        supported_versions: SpecVersion::ALL.map(SpecVersion::as_str),
    };
    to_json(&answer)
}

/// Pretty-printed JSON. Serializing our own structs of strings and numbers cannot fail; an empty object still is JSON.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_else(|_| "{}".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for version in SpecVersion::ALL {
            assert_eq!(SpecVersion::parse(version.as_str()), Some(version));
        }
        for other in ["", "0.1.0", "0.2.0", "0.3.0", "1.0", "1.2.0", " 1.0.0", "v1.0.0"] {
            assert_eq!(SpecVersion::parse(other), None, "{other}");
        }
        assert_eq!(SpecVersion::ALL.last(), Some(&SpecVersion::NEWEST));
        assert!(SpecVersion::ALL.is_sorted());
    }

    #[test]
    fn the_answer_lists_every_version() {
        let answer: serde_json::Value = serde_json::from_str(&answer()).unwrap();
        let expected = serde_json::json!({
            "cniVersion": "1.1.0",
            "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"],
        });
        assert_eq!(answer, expected);
    }
}
