//! List of the clusters and affiliates that a server accepts.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_wire::discovery::MAX_ID;

/// Clusters, and those of their affiliates that may be published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdmissionList(BTreeMap<String, Affiliates>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Affiliates {
    all: bool,
    listed: BTreeSet<String>,
}

/// A line of the list cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {text:?} is not the ID of a cluster and that of an affiliate, or *")]
pub struct InvalidLine {
    line: usize,
    text: String,
}

impl AdmissionList {
    /// Reads lines with the ID of a cluster and that of an affiliate, or `*` for all of its affiliates. Empty lines and those that
    /// begin with `#` do not count.
    ///
    /// # Errors
    /// See [`InvalidLine`].
    pub fn parse(text: &str) -> Result<Self, InvalidLine> {
        let mut list = Self::default();
        let lines = text.lines().map(str::trim).zip(1..);
        for (text, line) in lines.filter(|(text, _)| !text.is_empty() && !text.starts_with('#')) {
            let mut words = text.split_whitespace();
            let (Some(cluster), Some(affiliate), None) = (words.next(), words.next(), words.next()) else {
                return Err(InvalidLine { line, text: text.to_owned() });
            };
            if cluster.len() > MAX_ID || affiliate.len() > MAX_ID {
                return Err(InvalidLine { line, text: text.to_owned() });
            }
            let affiliates = list.0.entry(cluster.to_owned()).or_default();
            match affiliate {
                "*" => affiliates.all = true,
                _ => {
                    affiliates.listed.insert(affiliate.to_owned());
                }
            }
        }
        Ok(list)
    }

    pub(super) fn accepts_cluster(&self, cluster: &str) -> bool {
        self.0.contains_key(cluster)
    }

    pub(super) fn accepts(&self, cluster: &str, affiliate: &str) -> bool {
        let affiliates = self.0.get(cluster);
        affiliates.is_some_and(|affiliates| affiliates.all || affiliates.listed.contains(affiliate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_means_nothing_is_named() {
        for text in ["c", "c a b", &format!("{} a", "c".repeat(257))] {
            let error = AdmissionList::parse(&format!("c a\n{text}")).unwrap_err();
            assert!(error.to_string().starts_with("line 2: "), "{error}");
        }
        assert_eq!(AdmissionList::parse("").unwrap(), AdmissionList::default());
    }
}
