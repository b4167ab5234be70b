//! Coil's program names. Its manifests say `command: ["coild"]`, so the image has symbolic links with these names; this
//! module translates `argv[0]` into the subcommand.

use std::ffi::OsString;
use std::path::Path;

use fairlead_api::names::{
    CONTROLLER_PROGRAM, EGRESS_CONTROLLER_PROGRAM, EGRESS_PROGRAM, INSTALLER_PROGRAM, NODE_PROGRAM,
    ROUTER_PROGRAM,
};

/// Replaces a Coil program name by our subcommand. Other command lines are returned unchanged.
///
/// # Errors
/// `coil-router`, which is part of the node program.
pub(crate) fn translate(arguments: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>, String> {
    let mut arguments = arguments.into_iter();
    let Some(program) = arguments.next() else { return Ok(Vec::new()) };
    let name = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
    let command = match name.as_deref() {
        Some(INSTALLER_PROGRAM) => "install",
        Some(CONTROLLER_PROGRAM) => "controller",
        Some(EGRESS_CONTROLLER_PROGRAM) => "egress-controller",
        Some(EGRESS_PROGRAM) => "egress-gateway",
        Some(ROUTER_PROGRAM) => {
            return Err(
                "coil-router is part of the node program: delete this DaemonSet and run coild with --router"
                    .to_owned(),
            );
        }
        Some(NODE_PROGRAM) => "node",
        _ => return Ok(std::iter::once(program).chain(arguments).collect()),
    };
    Ok(["fairlead".into(), command.into()].into_iter().chain(arguments).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(words: &str) -> Result<String, String> {
        let words = translate(words.split(' ').map(OsString::from))?;
        Ok(words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn program_names_of_coil_become_subcommands() {
        for (coil, ours) in [
            ("coild --router=true", "fairlead node --router=true"),
            ("/usr/local/coil/coil-ipam-controller --health-addr :1", "fairlead controller --health-addr :1"),
            ("coil-installer", "fairlead install"),
            (
                "coil-egress --zap-stacktrace-level=panic",
                "fairlead egress-gateway --zap-stacktrace-level=panic",
            ),
            ("coil-egress-controller --egress-port=5555", "fairlead egress-controller --egress-port=5555"),
        ] {
            assert_eq!(translated(coil).as_deref(), Ok(ours));
        }
    }

    #[test]
    fn other_program_names_are_unchanged() {
        for line in ["fairlead status --zap-x=1", "/usr/local/bin/fairlead node", "x"] {
            assert_eq!(translated(line).as_deref(), Ok(line));
        }
    }

    #[test]
    fn coil_router_is_refused_with_its_replacement() {
        assert!(translated("coil-router --protocol-id 31").unwrap_err().contains("--router"));
    }
}
