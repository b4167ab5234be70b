//! Coil's names of the programs. Its manifests say `command: ["coild"]`, so the image has links of these names; what the
//! programs were told in Coil is told to ours.

use std::ffi::OsString;
use std::path::Path;

/// The command line as this executable understands it.
///
/// # Errors
/// The name of a program that has become part of another.
pub(crate) fn translate(arguments: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>, String> {
    let mut arguments = arguments.into_iter();
    let Some(program) = arguments.next() else { return Ok(Vec::new()) };
    let name = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
    let command = match name.as_deref() {
        Some("coil-installer") => "install",
        Some("coil-ipam-controller") => "controller",
        Some("coil-router") => {
            return Err("coil-router is part of the node program now: remove this DaemonSet and give coild the argument \
                        --router"
                .to_owned());
        }
        Some("coild") => "node",
        _ => return Ok(std::iter::once(program).chain(arguments).collect()),
    };
    let mut translated = vec!["fairlead".into(), command.into()];
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy();
        if !text.starts_with("--zap-") {
            translated.push(argument);
        } else if !text.contains('=') && text != "--zap-devel" {
            // How Coil logs; the value is an argument of its own.
            arguments.next();
        }
    }
    Ok(translated)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(words: &str) -> Result<String, String> {
        let words = translate(words.split(' ').map(OsString::from))?;
        Ok(words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn coils_programs_are_commands() {
        for (coil, ours) in [
            ("coild --zap-stacktrace-level=panic --router=true", "fairlead node --router=true"),
            (
                "/usr/local/coil/coil-ipam-controller --zap-log-level debug --health-addr :1",
                "fairlead controller --health-addr :1",
            ),
            ("coild --zap-devel --router", "fairlead node --router"),
            ("coil-installer", "fairlead install"),
        ] {
            assert_eq!(translated(coil).as_deref(), Ok(ours));
        }
    }

    #[test]
    fn our_own_name_changes_nothing() {
        for line in ["fairlead status --zap-x=1", "/usr/local/bin/fairlead node", "x"] {
            assert_eq!(translated(line).as_deref(), Ok(line));
        }
    }

    #[test]
    fn the_router_says_where_it_went() {
        assert!(translated("coil-router --protocol-id 31").unwrap_err().contains("--router"));
    }
}
