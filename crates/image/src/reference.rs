//! Names of images.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, ensure};

/// The full name of an image, `HOST/PATH:TAG`, as container runtimes store it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    name: String,
    tag: String,
}

impl Reference {
    /// `HOST/PATH`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tag alone.
    pub fn tag(&self) -> &str {
        &self.tag
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.name, self.tag)
    }
}

impl FromStr for Reference {
    type Err = anyhow::Error;

    /// The host defaults to `docker.io` and the tag to `latest`, as container runtimes complete the image of a pod.
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let parse = || {
            ensure!(!text.contains('@'), "the name of a new image cannot have a digest");
            // A colon before the last slash belongs to the host's port.
            let (name, tag) = match text.rsplit_once(':') {
                Some((name, tag)) if !tag.contains('/') => (name, tag),
                _ => (text, "latest"),
            };
            let is_tag = !tag.is_empty()
                && tag.len() <= 128
                && !tag.starts_with(['.', '-'])
                && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
            ensure!(is_tag, "{tag:?} is not a valid tag");
            let (host, path) = match name.split_once('/') {
                Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => {
                    (host, path.to_owned())
                }
                Some(_) => ("docker.io", name.to_owned()),
                None => ("docker.io", format!("library/{name}")),
            };
            let is_host = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:-[]".contains(&byte));
            ensure!(is_host, "{host:?} is not a valid registry host");
            ensure!(
                path.split('/').all(is_component),
                "{path:?} may contain only lower-case letters, digits, '.', '_', '-' and '/'"
            );
            Ok(Self { name: format!("{host}/{path}"), tag: tag.to_owned() })
        };
        parse().with_context(|| format!("{text:?} is not a valid image name"))
    }
}

fn is_component(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.bytes().next().is_some_and(plain)
        && text.bytes().last().is_some_and(plain)
        && text.bytes().all(|byte| plain(byte) || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_completed_as_runtimes_do() {
        for (short, full) in [
            ("fairlead", "docker.io/library/fairlead:latest"),
            ("me/fairlead:1", "docker.io/me/fairlead:1"),
            ("localhost/fairlead:0.1.0", "localhost/fairlead:0.1.0"),
            ("registry.example:5000/a/b", "registry.example:5000/a/b:latest"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
        ] {
            assert_eq!(short.parse::<Reference>().unwrap().to_string(), full);
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        for invalid in
            ["", ":1", "a:", "a b", "UPPER", "a/", "-a", "a:b c", "a@sha256:00", "a//b", "ho st.x/a"]
        {
            let error = format!("{:#}", invalid.parse::<Reference>().unwrap_err());
            assert!(error.contains("is not a valid image name"), "{error}");
        }
    }
}
