//! Validates a network configuration before it is installed: a container runtime that refuses it leaves the node without
//! a network, and reports the reason only in its own log.

use std::path::Path;

use fairlead_wire::spool::is_identifier;
use serde_json::{Map, Value, json};

/// Whether container runtimes accept the configuration and it names the plugin `kind`. Returns a warning if the plugin is
/// not the first of the list.
///
/// # Errors
/// The cause, if it is invalid.
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

/// The list of another plugin with the plugin `kind` behind all others, or `None` if it is in the list.
///
/// # Errors
/// The cause, if it cannot be added.
pub(crate) fn with_plugin(
    text: &str,
    file_name: &str,
    kind: &str,
    socket: &Path,
    versions: &[String],
) -> Result<Option<String>, String> {
    if !file_name.ends_with(".conflist") {
        return Err(
            "it is a single plugin, and only a list (.conflist) can have another one behind it".to_owned()
        );
    }
    if names(text, kind) {
        return check(text, file_name, kind, versions).map(|_| None);
    }
    let mut conf: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("it is not a JSON object: {error}"))?;
    if let Some(Value::Array(plugins)) = conf.get_mut("plugins") {
        plugins.push(json!({"type": kind, "socket": socket}));
    }
    let longer = format!("{:#}\n", Value::Object(conf));
    check(&longer, file_name, kind, versions).map(|_| Some(longer))
}

/// A list without the plugin `kind`, if another plugin stays in it.
pub(crate) fn without_plugin(text: &str, kind: &str) -> Option<String> {
    let mut conf: Value = serde_json::from_str(text).ok()?;
    let plugins = conf.get_mut("plugins")?.as_array_mut()?;
    let before = plugins.len();
    plugins.retain(|plugin| plugin.get("type").and_then(Value::as_str) != Some(kind));
    let is_shorter = plugins.len() < before && !plugins.is_empty();
    is_shorter.then(|| format!("{conf:#}\n"))
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

    const OTHER: &str = r#"{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "ptp", "ipam": {"type": "host-local"}}, {"type": "portmap"}]}"#;

    fn chained(text: &str, file: &str) -> Result<Option<String>, String> {
        with_plugin(text, file, "coil", Path::new("/run/coild.sock"), &["1.0.0".to_owned()])
    }

    #[test]
    fn the_plugin_comes_behind_those_of_another_list_once_and_goes_again() {
        let longer = chained(OTHER, "10-other.conflist").unwrap().unwrap();
        let before: Value = serde_json::from_str(OTHER).unwrap();
        let mut after: Value = serde_json::from_str(&longer).unwrap();
        let last = after["plugins"].as_array_mut().unwrap().pop().unwrap();
        assert_eq!(last, json!({"type": "coil", "socket": "/run/coild.sock"}));
        assert_eq!(after, before, "nothing else has changed");
        assert_eq!(chained(&longer, "10-other.conflist"), Ok(None));
        let again: Value = serde_json::from_str(&without_plugin(&longer, "coil").unwrap()).unwrap();
        assert_eq!(again, before);
        assert_eq!(without_plugin(OTHER, "coil"), None);
        assert_eq!(
            without_plugin(r#"{"plugins": [{"type": "coil"}]}"#, "coil"),
            None,
            "a list needs a plugin"
        );
    }

    #[test]
    fn what_cannot_have_a_plugin_behind_it_is_named() {
        let refused = |text: &str, file: &str| chained(text, file).unwrap_err();
        assert!(refused(OTHER, "10-other.conf").contains("only a list"));
        assert!(refused("{", "a.conflist").contains("not a JSON object"));
        assert!(refused(&OTHER.replace("1.0.0", "0.1.0"), "a.conflist").contains("0.1.0"));
        assert!(refused(r#"{"cniVersion": "1.0.0", "name": "net"}"#, "a.conflist").contains("plugins"));
    }

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
