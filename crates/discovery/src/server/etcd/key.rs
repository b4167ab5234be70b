//! Keys: a prefix, then cluster and affiliate.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, utf8_percent_encode};

/// Identifiers are often base64url.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'=').remove(b'_').remove(b'~');

/// The keys of one population of discovery servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keys(String);

impl Keys {
    /// Below a prefix, with or without a slash at its end.
    pub(super) fn new(prefix: &str) -> Self {
        Self(format!("{}/affiliates/", prefix.trim_end_matches('/')))
    }

    /// The key of an affiliate.
    pub(super) fn of(&self, cluster: &str, affiliate: &str) -> Vec<u8> {
        let escape = |id| utf8_percent_encode(id, ESCAPED);
        format!("{}{}/{}", self.0, escape(cluster), escape(affiliate)).into_bytes()
    }

    /// Cluster and affiliate of a key. `None` for another key, and for another spelling of one.
    pub(super) fn parse(&self, key: &[u8]) -> Option<(String, String)> {
        let rest = std::str::from_utf8(key).ok()?.strip_prefix(&self.0)?;
        let (cluster, affiliate) = rest.split_once('/')?;
        let unescape = |id: &str| percent_decode(id.as_bytes()).decode_utf8().ok().map(String::from);
        let cluster = unescape(cluster)?;
        let affiliate = unescape(affiliate)?;
        (self.of(&cluster, &affiliate) == key).then_some((cluster, affiliate))
    }

    /// The first key, and that after the last one.
    pub(super) fn range(&self) -> (Vec<u8>, Vec<u8>) {
        let first = self.0.clone().into_bytes();
        let mut end = first.clone();
        // The slash at the end becomes the next character.
        end.pop();
        end.push(b'0');
        (first, end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_key_is_read_back_and_is_in_the_range(cluster in any::<String>(), affiliate in any::<String>()) {
            let keys = Keys::new("/a/");
            let key = keys.of(&cluster, &affiliate);
            prop_assert_eq!(keys.parse(&key), Some((cluster, affiliate)));
            let (first, end) = keys.range();
            prop_assert!(first <= key && key < end);
        }

        #[test]
        fn hostile_keys_are_none_of_ours_or_have_one_spelling(rest in proptest::collection::vec(any::<u8>(), 0..40)) {
            let keys = Keys::new("/a");
            let key = [b"/a/affiliates/".as_slice(), &rest].concat();
            if let Some((cluster, affiliate)) = keys.parse(&key) {
                prop_assert_eq!(keys.of(&cluster, &affiliate), key);
            }
        }
    }

    #[test]
    fn other_keys_are_not_ours() {
        let keys = Keys::new("/fairlead/discovery");
        assert_eq!(keys.of("c/d", "a="), b"/fairlead/discovery/affiliates/c%2Fd/a=");
        for key in [
            &b""[..],
            b"/fairlead/discovery/affiliates/c",
            b"/fairlead/discovery/affiliates/c%2fd/a",
            b"/fairlead/discovery/affiliates/c/a/b",
            b"/fairlead/discovery/affiliates/c/%FF",
            b"/fairlead/discovery/affiliates/c/\xff",
            b"/fairlead/discovery/other/c/a",
        ] {
            assert_eq!(keys.parse(key), None, "{}", key.escape_ascii());
        }
    }
}
