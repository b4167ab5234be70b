//! The list of clusters and affiliates, read again when its file changes.

use std::io;
use std::path::PathBuf;

use crate::core::{AdmissionList, InvalidLine};

/// The list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The file cannot be read.
    #[error("cannot read {path}: {error}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        error: io::Error,
    },
    /// A line is not what the file should have.
    #[error("{path}: {error}", path = path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, and the reason why it is invalid.
        error: InvalidLine,
    },
}

/// The file, and what was read from it.
#[derive(Debug)]
pub(super) struct AdmissionFile {
    path: PathBuf,
    current: AdmissionList,
    /// The last failure to read it: it is logged once.
    failure: Option<String>,
}

impl AdmissionFile {
    pub(super) fn read(path: PathBuf) -> Result<Self, AdmissionError> {
        let mut file = Self { path, current: AdmissionList::default(), failure: None };
        file.current = file.parse()?;
        Ok(file)
    }

    pub(super) fn current(&self) -> AdmissionList {
        self.current.clone()
    }

    /// Reads the file again; the list if it has changed. A file that cannot be used leaves everything as it is.
    pub(super) fn refresh(&mut self) -> Option<AdmissionList> {
        match self.parse() {
            Ok(list) => {
                self.failure = None;
                let has_changed = list != self.current;
                self.current = list;
                has_changed.then(|| self.current.clone())
            }
            Err(error) => {
                let failure = Some(error.to_string());
                if failure != self.failure {
                    tracing::error!(%error, "cannot read who may publish; those who could still can");
                }
                self.failure = failure;
                None
            }
        }
    }

    fn parse(&self) -> Result<AdmissionList, AdmissionError> {
        let text = std::fs::read_to_string(&self.path)
            .map_err(|error| AdmissionError::File { path: self.path.clone(), error })?;
        AdmissionList::parse(&text).map_err(|error| AdmissionError::Line { path: self.path.clone(), error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_cannot_be_used_leaves_the_one_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nodes");
        assert!(AdmissionFile::read(path.clone()).unwrap_err().to_string().contains("nodes"));
        std::fs::write(&path, "c a").unwrap();
        let mut file = AdmissionFile::read(path.clone()).unwrap();
        assert_eq!(file.refresh(), None);
        std::fs::write(&path, "c a b").unwrap();
        assert_eq!(file.refresh(), None);
        assert_eq!(file.current(), AdmissionList::parse("c a").unwrap());
        std::fs::write(&path, "c *").unwrap();
        assert_eq!(file.refresh(), AdmissionList::parse("c *").ok());
        assert_eq!(file.refresh(), None);
    }
}
