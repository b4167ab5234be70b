//! The environment variables of a CNI call.

use std::ffi::OsString;

use fairlead_wire::spool::{is_identifier, is_interface_name};

use crate::args::PodArgs;
use crate::failure::{Failure, code};

/// Request of the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Invocation {
    /// No `CNI_COMMAND`: not called by a runtime.
    About,
    /// An operation on one interface of one container.
    Attachment(AttachmentOperation, Attachment),
    /// An operation on a whole network.
    Network(NetworkOperation),
    /// VERSION: the supported versions.
    Version,
}

/// Operations on one interface of one container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachmentOperation {
    /// Attach it.
    Add,
    /// Compare it with what ADD made.
    Check,
    /// Detach it; succeeds also when there is nothing to detach.
    Del,
}

/// Operations on a whole network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkOperation {
    /// Remove attachments that are no longer valid.
    Gc,
    /// Could ADD succeed now?
    Status,
}

impl NetworkOperation {
    /// Name in `CNI_COMMAND`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gc => "GC",
            Self::Status => "STATUS",
        }
    }
}

/// One interface of one container, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_NETNS`: path of the container's network namespace. Empty only for DEL: the namespace may be gone.
    pub netns: String,
    /// `CNI_IFNAME`: the interface inside.
    pub ifname: String,
    /// `CNI_ARGS`
    pub args: PodArgs,
    /// `CNI_PATH`, passed on; Fairlead calls no other plugin, so it may be missing.
    pub path: String,
    /// `CNI_NETNS_OVERRIDE`: the container may share the plugin's own namespace.
    pub netns_override: bool,
}

/// Whether the call is a DEL, whatever else is wrong with it.
pub fn is_del(lookup: impl Fn(&str) -> Option<OsString>) -> bool {
    lookup("CNI_COMMAND").is_some_and(|command| command == "DEL")
}

/// Parses the environment. An empty variable counts as a missing one.
///
/// # Errors
/// Code 4: an unknown command; all missing variables in one message; a value that the specification does not allow.
pub fn parse(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Invocation, Failure> {
    let variables = Variables { lookup };
    let Some(command) = variables.get("CNI_COMMAND")? else {
        return Ok(Invocation::About);
    };
    match command.as_str() {
        "ADD" => variables.attachment(AttachmentOperation::Add),
        "CHECK" => variables.attachment(AttachmentOperation::Check),
        "DEL" => variables.attachment(AttachmentOperation::Del),
        "GC" => variables.network(NetworkOperation::Gc),
        "STATUS" => variables.network(NetworkOperation::Status),
        "VERSION" => Ok(Invocation::Version),
        unknown => Err(Failure::new(
            code::ENVIRONMENT,
            format!("unknown CNI_COMMAND {unknown:?}"),
            "known commands are ADD, CHECK, DEL, GC, STATUS and VERSION",
        )),
    }
}

struct Variables<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<OsString>> Variables<F> {
    fn attachment(&self, operation: AttachmentOperation) -> Result<Invocation, Failure> {
        let required: &[&str] = match operation {
            AttachmentOperation::Add | AttachmentOperation::Check => {
                &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]
            }
            AttachmentOperation::Del => &["CNI_CONTAINERID", "CNI_IFNAME"],
        };
        self.require(required)?;
        let attachment = Attachment {
            container_id: container_id(self.text("CNI_CONTAINERID")?)?,
            netns: self.text("CNI_NETNS")?,
            ifname: interface_name(self.text("CNI_IFNAME")?)?,
            args: PodArgs::parse(&self.text("CNI_ARGS")?)?,
            path: self.text("CNI_PATH")?,
            netns_override: is_true(&self.text("CNI_NETNS_OVERRIDE")?),
        };
        Ok(Invocation::Attachment(operation, attachment))
    }

    fn network(&self, operation: NetworkOperation) -> Result<Invocation, Failure> {
        self.require(&["CNI_PATH"])?;
        Ok(Invocation::Network(operation))
    }

    fn require(&self, names: &[&str]) -> Result<(), Failure> {
        let mut missing = Vec::new();
        for name in names {
            if self.get(name)?.is_none() {
                missing.push(*name);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let msg = format!("missing environment variables: {}", missing.join(", "));
        Err(Failure::new(code::ENVIRONMENT, msg, "the container runtime sets them for every call"))
    }

    fn text(&self, name: &str) -> Result<String, Failure> {
        Ok(self.get(name)?.unwrap_or_default())
    }

    fn get(&self, name: &str) -> Result<Option<String>, Failure> {
        let Some(value) = (self.lookup)(name).filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        value.into_string().map(Some).map_err(|raw| invalid(name, &raw.to_string_lossy(), "it must be UTF-8"))
    }
}

fn container_id(text: String) -> Result<String, Failure> {
    if is_identifier(&text) {
        return Ok(text);
    }
    Err(invalid("CNI_CONTAINERID", &text, IDENTIFIER_RULE))
}

/// The rule of [`is_identifier`], for messages.
pub(crate) const IDENTIFIER_RULE: &str =
    "it must start with a letter or digit and contain only letters, digits, '_', '.' and '-'";

fn interface_name(text: String) -> Result<String, Failure> {
    if is_interface_name(&text) {
        return Ok(text);
    }
    Err(invalid(
        "CNI_IFNAME",
        &text,
        "it must have 1 to 15 bytes, no '/', ':' or space, and not be \".\" or \"..\"",
    ))
}

fn is_true(text: &str) -> bool {
    text == "1" || text.eq_ignore_ascii_case("true")
}

fn invalid(name: &str, value: &str, rule: &str) -> Failure {
    Failure::new(code::ENVIRONMENT, format!("invalid {name} {value:?}"), rule)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use proptest::prelude::*;

    use super::*;

    fn parsed(variables: &[(&str, &str)]) -> Result<Invocation, Failure> {
        parse(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value)))
    }

    const ADD: [(&str, &str); 4] = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "c0ffee"),
        ("CNI_NETNS", "/run/netns/x"),
        ("CNI_IFNAME", "eth0"),
    ];

    fn add_with(name: &'static str, value: &str) -> Result<Invocation, Failure> {
        let mut variables: Vec<_> = ADD.into_iter().filter(|(key, _)| *key != name).collect();
        variables.push((name, value));
        parsed(&variables)
    }

    #[test]
    fn add_is_parsed() {
        let Ok(Invocation::Attachment(AttachmentOperation::Add, attachment)) =
            add_with("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=p")
        else {
            panic!("not an ADD")
        };
        assert_eq!(attachment.container_id, "c0ffee");
        assert_eq!(attachment.netns, "/run/netns/x");
        assert_eq!(attachment.ifname, "eth0");
        assert_eq!(attachment.args.get("K8S_POD_NAME"), Some("p"));
        assert_eq!(attachment.path, "");
        assert!(!attachment.netns_override);
    }

    #[test]
    fn without_a_command_it_prints_its_name() {
        assert_eq!(parsed(&[]), Ok(Invocation::About));
        assert_eq!(parsed(&[("CNI_COMMAND", "")]), Ok(Invocation::About));
    }

    #[test]
    fn version_needs_nothing_else() {
        assert_eq!(parsed(&[("CNI_COMMAND", "VERSION")]), Ok(Invocation::Version));
    }

    #[test]
    fn unknown_commands_are_refused() {
        for command in ["add", "UPDATE", "ADD "] {
            let failure = parsed(&[("CNI_COMMAND", command)]).unwrap_err();
            assert_eq!(failure.code, code::ENVIRONMENT);
            assert!(failure.msg.contains(command), "{}", failure.msg);
        }
    }

    #[test]
    fn all_missing_variables_are_named_at_once() {
        let cases = [
            ("ADD", ("", ""), "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME"),
            ("ADD", ("CNI_CONTAINERID", ""), "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME"),
            ("ADD", ("CNI_NETNS", "/n"), "CNI_CONTAINERID, CNI_IFNAME"),
            ("CHECK", ("CNI_IFNAME", "e"), "CNI_CONTAINERID, CNI_NETNS"),
            ("DEL", ("", ""), "CNI_CONTAINERID, CNI_IFNAME"),
            ("GC", ("", ""), "CNI_PATH"),
            ("STATUS", ("", ""), "CNI_PATH"),
        ];
        for (command, other, expected) in cases {
            let failure = parsed(&[("CNI_COMMAND", command), other]).unwrap_err();
            assert_eq!(failure.code, code::ENVIRONMENT);
            assert_eq!(failure.msg, format!("missing environment variables: {expected}"), "{command}");
        }
    }

    #[test]
    fn del_works_without_a_namespace() {
        let variables = [("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "c"), ("CNI_IFNAME", "eth0")];
        let Ok(Invocation::Attachment(AttachmentOperation::Del, attachment)) = parsed(&variables) else {
            panic!("not a DEL")
        };
        assert_eq!(attachment.netns, "");
    }

    #[test]
    fn container_ids() {
        for good in ["a", "0", "A1_b.c-d", &"f".repeat(64)] {
            assert!(add_with("CNI_CONTAINERID", good).is_ok(), "{good}");
        }
        for bad in ["-a", ".a", "_a", "a/b", "a b", "ä", "a\n", "aä"] {
            let failure = add_with("CNI_CONTAINERID", bad).unwrap_err();
            assert_eq!(failure.code, code::ENVIRONMENT, "{bad}");
            assert!(failure.msg.contains("CNI_CONTAINERID"));
        }
    }

    #[test]
    fn interface_names() {
        for good in ["eth0", "e", "123456789012345", "...", "net-1.2"] {
            assert!(add_with("CNI_IFNAME", good).is_ok(), "{good}");
        }
        for bad in [".", "..", "a/b", "a:b", "a b", "a\tb", "1234567890123456", "ääääääää"] {
            let failure = add_with("CNI_IFNAME", bad).unwrap_err();
            assert_eq!(failure.code, code::ENVIRONMENT, "{bad}");
            assert!(failure.msg.contains("CNI_IFNAME"));
        }
    }

    #[test]
    fn the_override_of_libcni() {
        for (value, expected) in [("1", true), ("TRUE", true), ("true", true), ("0", false), ("yes", false)] {
            let Ok(Invocation::Attachment(_, attachment)) = add_with("CNI_NETNS_OVERRIDE", value) else {
                panic!("not an attachment")
            };
            assert_eq!(attachment.netns_override, expected, "{value}");
        }
    }

    proptest! {
        #[test]
        fn hostile_variables_never_panic(
            command in prop::sample::select(vec!["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION", "", "x"]),
            values in prop::collection::vec(prop::option::of(any::<Vec<u8>>()), 6),
        ) {
            let names = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH", "CNI_NETNS_OVERRIDE"];
            let result = parse(|name| match name {
                "CNI_COMMAND" => Some(command.into()),
                _ => {
                    let at = names.iter().position(|known| *known == name)?;
                    values[at].clone().map(OsString::from_vec)
                }
            });
            if let Err(failure) = result {
                prop_assert_eq!(failure.code, code::ENVIRONMENT);
            }
        }

        #[test]
        fn identifiers_are_those_of_the_regular_expression(text in "[A-Za-z0-9][A-Za-z0-9_.-]{0,30}") {
            prop_assert!(is_identifier(&text));
        }
    }
}
