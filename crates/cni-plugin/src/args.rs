//! `CNI_ARGS`: the pod that a Kubernetes runtime names.

use std::collections::BTreeMap;

use crate::failure::{Failure, code};

/// Keys that are passed to the node program. Every other key needs `IgnoreUnknown=1`, as in libcni.
const KNOWN: [&str; 4] = ["K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID"];
const IGNORE_UNKNOWN: &str = "IgnoreUnknown";

/// The known keys of `CNI_ARGS`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodArgs(BTreeMap<&'static str, String>);

impl PodArgs {
    /// Parses `KEY=VALUE;KEY=VALUE`. The last value of a repeated key counts; empty parts are skipped.
    ///
    /// # Errors
    /// Code 4 for a part without `=`, an `IgnoreUnknown` that is not a boolean, and unknown keys not to be ignored.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let mut known = BTreeMap::new();
        let mut unknown = Vec::new();
        let mut ignore_unknown = false;
        for part in text.split(';').filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(invalid(format!("{part:?} is not KEY=VALUE")));
            };
            if let Some(key) = KNOWN.into_iter().find(|known| *known == key) {
                known.insert(key, value.to_owned());
            } else if key == IGNORE_UNKNOWN {
                ignore_unknown = parse_bool(value)?;
            } else {
                unknown.push(key);
            }
        }
        if unknown.is_empty() || ignore_unknown {
            Ok(Self(known))
        } else {
            Err(invalid(format!("unknown keys {unknown:?}, and {IGNORE_UNKNOWN}=1 is not set")))
        }
    }

    /// Value of a known key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// The known keys that were given, with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(key, value)| (*key, value.as_str()))
    }
}

fn parse_bool(text: &str) -> Result<bool, Failure> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(invalid(format!("{IGNORE_UNKNOWN}={text:?} is neither true nor false"))),
    }
}

fn invalid(what: String) -> Failure {
    Failure::new(
        code::ENVIRONMENT,
        format!("CNI_ARGS: {what}"),
        "expected KEY=VALUE;KEY=VALUE as libcni writes it",
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pairs(text: &str) -> Vec<(&'static str, String)> {
        PodArgs::parse(text).unwrap().iter().map(|(key, value)| (key, value.to_owned())).collect()
    }

    #[test]
    fn what_containerd_sends_is_parsed() {
        let args = PodArgs::parse(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=abc;K8S_POD_UID=u",
        )
        .unwrap();
        assert_eq!(args.get("K8S_POD_NAMESPACE"), Some("default"));
        assert_eq!(args.get("K8S_POD_NAME"), Some("web-0"));
        assert_eq!(args.get("K8S_POD_INFRA_CONTAINER_ID"), Some("abc"));
        assert_eq!(args.get("K8S_POD_UID"), Some("u"));
        assert_eq!(args.get("IgnoreUnknown"), None);
    }

    #[test]
    fn accepted_forms() {
        assert_eq!(pairs(""), vec![]);
        assert_eq!(pairs(";;"), vec![]);
        assert_eq!(pairs("K8S_POD_NAME=a;"), vec![("K8S_POD_NAME", "a".into())]);
        assert_eq!(pairs("K8S_POD_NAME=a;K8S_POD_NAME=b"), vec![("K8S_POD_NAME", "b".into())]);
        assert_eq!(pairs("K8S_POD_NAME=a=b"), vec![("K8S_POD_NAME", "a=b".into())]);
        assert_eq!(pairs("IP=10.0.0.1;IgnoreUnknown=TRUE"), vec![]);
    }

    #[test]
    fn refused_forms() {
        let cases = [
            ("K8S_POD_NAME", "\"K8S_POD_NAME\" is not KEY=VALUE"),
            ("IgnoreUnknown=maybe", "neither true nor false"),
            ("IP=10.0.0.1", "[\"IP\"]"),
            ("A=1;B=2;IgnoreUnknown=0", "[\"A\", \"B\"]"),
            ("=x", "[\"\"]"),
        ];
        for (text, expected) in cases {
            let failure = PodArgs::parse(text).unwrap_err();
            assert_eq!(failure.code, code::ENVIRONMENT, "{text}");
            assert!(failure.msg.contains(expected), "{text}: {}", failure.msg);
        }
    }

    proptest! {
        #[test]
        fn hostile_text_never_panics(text in "(K8S_POD_NAME|IgnoreUnknown|[=;]|\\PC){0,20}") {
            let _ = PodArgs::parse(&text);
        }

        #[test]
        fn values_are_read_back(namespace in "[^;]*", name in "[^;]*") {
            let args = PodArgs::parse(&format!("K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}")).unwrap();
            prop_assert_eq!(args.get("K8S_POD_NAMESPACE"), Some(namespace.as_str()));
            prop_assert_eq!(args.get("K8S_POD_NAME"), Some(name.as_str()));
        }
    }
}
