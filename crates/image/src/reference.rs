//! Names of images.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, ensure};

/// The full name of an image, `HOST/PATH:TAG`, as container runtimes keep it.
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

    /// A name without a host is one of `docker.io`, and without a tag means `latest`: what every runtime makes of it when
    /// a pod names it so.
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let parse = || {
            ensure!(!text.contains('@'), "a name with a digest cannot be given to a new image");
            // A colon before the last slash belongs to the host's port.
            let (name, tag) = match text.rsplit_once(':') {
                Some((name, tag)) if !tag.contains('/') => (name, tag),
                _ => (text, "latest"),
            };
            let tag_is_right = !tag.is_empty()
                && tag.len() <= 128
                && !tag.starts_with(['.', '-'])
                && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
            ensure!(tag_is_right, "{tag:?} is no tag");
            let (host, path) = match name.split_once('/') {
                Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => {
                    (host, path.to_owned())
                }
                Some(_) => ("docker.io", name.to_owned()),
                None => ("docker.io", format!("library/{name}")),
            };
            let host_is_right =
                host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:-[]".contains(&byte));
            ensure!(host_is_right, "{host:?} is no host of a registry");
            ensure!(
                path.split('/').all(is_component),
                "{path:?} may hold only small letters, digits, '.', '_', '-' and '/'"
            );
            Ok(Self { name: format!("{host}/{path}"), tag: tag.to_owned() })
        };
        parse().with_context(|| format!("{text:?} is no name of an image"))
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
    fn short_names_become_what_runtimes_make_of_them() {
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
    fn wrong_names_are_refused() {
        for wrong in ["", ":1", "a:", "a b", "UPPER", "a/", "-a", "a:b c", "a@sha256:00", "a//b", "ho st.x/a"]
        {
            let error = format!("{:#}", wrong.parse::<Reference>().unwrap_err());
            assert!(error.contains("is no name of an image"), "{error}");
        }
    }
}
