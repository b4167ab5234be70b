//! Validates a network configuration before it is installed: a container runtime that refuses it leaves the node without
//! a network, and reports the reason only in its own log.

use fairlead_wire::spool::is_identifier;
use serde_json::{Map, Value};

/// Whether container runtimes accept the configuration and it names the plugin `kind`. Returns a warning if the plugin is
/// not the first of the list.
///
/// # Errors
/// Why it is invalid.
pub(crate) fn check(
    text: &str,
    file_name: &str,
    kind: &str,
    versions: &[String],
) -> Result<Option<String>, String> {
    let conf: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("it is not a JSON object: {error}"))?;
    let version = string(&conf, "cniVersion")?;
    if !versions.iter().any(|known| known == version) {
        let known = versions.join(", ");
        return Err(format!("\"cniVersion\" is {version:?}, but the plugin supports {known}"));
    }
    let name = string(&conf, "name")?;
    if !is_identifier(name) {
        return Err(format!(
            "\"name\" is {name:?}; it must start with a letter or digit and contain only letters, digits, '_', '.' and '-'"
        ));
    }
    if !file_name.ends_with(".conflist") {
        return check_plugin(&conf, kind).map(|_| None);
    }
    let Some(Value::Array(plugins)) =
        conf.get("plugins").filter(|list| list.as_array().is_some_and(|list| !list.is_empty()))
    else {
        return Err("\"plugins\" must be a list with at least one plugin".to_owned());
    };
    let mut position = None;
    for (index, plugin) in plugins.iter().enumerate() {
        let plugin = plugin
            .as_object()
            .ok_or_else(|| format!("plugin {} of the list is not an object", index.saturating_add(1)))?;
        if string(plugin, "type")? == kind {
            check_plugin(plugin, kind)?;
            position = position.or(Some(index));
        }
    }
    match position {
        None => Err(format!("no plugin of the list has \"type\": {kind:?}")),
        Some(0) => Ok(None),
        Some(_) => Ok(Some(format!(
            "{kind} is not the first plugin of the list, so it cannot create pod interfaces"
        ))),
    }
}

fn check_plugin(plugin: &Map<String, Value>, kind: &str) -> Result<(), String> {
    let found = string(plugin, "type")?;
    if found != kind {
        return Err(format!("\"type\" is {found:?}, not {kind:?}"));
    }
    match plugin.get("socket") {
        None => Ok(()),
        Some(Value::String(path)) if path.starts_with('/') => Ok(()),
        Some(other) => Err(format!("\"socket\" is {other}, not an absolute path")),
    }
}

fn string<'a>(object: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    match object.get(key) {
        None => Err(format!("{key:?} is missing")),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("{key:?} is {other}, not a string")),
    }
}

/// Whether a configuration names the plugin `kind`, so that it belongs to Fairlead and may be removed.
pub(crate) fn names(text: &str, kind: &str) -> bool {
    let Ok(conf) = serde_json::from_str::<Value>(text) else { return false };
    let is = |plugin: &Value| plugin.get("type").and_then(Value::as_str) == Some(kind);
    is(&conf) || conf.get("plugins").and_then(Value::as_array).is_some_and(|list| list.iter().any(is))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "coil", "socket": "/run/coild.sock"}, {"type": "portmap"}]}"#;

    fn checked(text: &str, file: &str) -> Result<Option<String>, String> {
        check(text, file, "coil", &["0.4.0".to_owned(), "1.0.0".to_owned()])
    }

    #[test]
    fn lists_and_single_plugins_are_valid() {
        assert_eq!(checked(LIST, "10-coil.conflist"), Ok(None));
        let single = r#"{"cniVersion": "0.4.0", "name": "net", "type": "coil"}"#;
        assert_eq!(checked(single, "10-coil.conf"), Ok(None));
    }

    #[test]
    fn the_configuration_in_deploy_is_valid() {
        let text = include_str!("../../../deploy/base/netconf.json");
        let versions = ["1.0.0".to_owned(), "1.1.0".to_owned()];
        assert_eq!(check(text, "10-coil.conflist", "coil", &versions), Ok(None));
    }

    #[test]
    fn invalid_configurations_are_refused_with_a_reason() {
        for (from, to, reason) in [
            ("\"1.0.0\"", "\"2.0.0\"", "supports 0.4.0, 1.0.0"),
            ("\"cniVersion\": \"1.0.0\", ", "", "\"cniVersion\" is missing"),
            ("\"net\"", "\"-net\"", "\"name\" is \"-net\""),
            ("\"net\"", "7", "\"name\" is 7, not a string"),
            (
                "[{\"type\": \"coil\", \"socket\": \"/run/coild.sock\"}, {\"type\": \"portmap\"}]",
                "[]",
                "at least one plugin",
            ),
            ("\"coil\"", "\"ptp\"", "no plugin of the list has \"type\": \"coil\""),
            ("{\"type\": \"portmap\"}", "3", "plugin 2 of the list is not an object"),
            ("\"type\": \"portmap\"", "\"kind\": 1", "\"type\" is missing"),
            ("\"/run/coild.sock\"", "\"coild.sock\"", "not an absolute path"),
            ("{\"cniVersion\"", "[\"cniVersion\"", "not a JSON object"),
        ] {
            let text = LIST.replace(from, to);
            assert_ne!(text, LIST, "{from} is not in the list");
            let error = checked(&text, "10-coil.conflist").unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        assert!(checked(LIST, "10-coil.conf").unwrap_err().contains("\"type\" is missing"));
    }

    #[test]
    fn a_plugin_that_is_not_first_causes_a_warning() {
        let text = LIST.replace("\"coil\"", "\"x\"").replace("\"portmap\"", "\"coil\"");
        assert!(checked(&text, "a.conflist").unwrap().unwrap().contains("not the first"));
    }

    #[test]
    fn only_configurations_that_name_the_plugin_belong_to_it() {
        assert!(names(LIST, "coil"));
        assert!(names(r#"{"type": "coil"}"#, "coil"));
        assert!(!names(r#"{"type": "calico"}"#, "coil"));
        assert!(!names("coil", "coil"));
    }
}
