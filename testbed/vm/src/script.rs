//! A command as text for the VM's shell.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

/// A shell script that becomes the command: its program, arguments, directory (created if need be) and
/// the environment set on it. What the host's environment holds besides stays on the host.
pub(crate) fn for_command(command: &Command) -> Vec<u8> {
    let mut script = Vec::new();
    let directory = command.get_current_dir().map_or(OsStr::new("/"), |path| path.as_os_str());
    let directory = quote(directory);
    for part in [b"mkdir -p ".as_slice(), &directory, b" && cd ", &directory, b" || exit 126\nexec env"] {
        script.extend(part);
    }
    for (name, value) in command.get_envs() {
        let Some(value) = value else {
            script.extend(b" -u ");
            script.extend(quote(name));
            continue;
        };
        let mut assignment = name.to_owned();
        assignment.push("=");
        assignment.push(value);
        script.push(b' ');
        script.extend(quote(&assignment));
    }
    for word in std::iter::once(command.get_program()).chain(command.get_args()) {
        script.push(b' ');
        script.extend(quote(word));
    }
    script.push(b'\n');
    script
}

/// One word for a POSIX shell, whatever is in it.
pub(crate) fn quote(word: &OsStr) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend(b"'\\''"),
            other => quoted.push(*other),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_sees_exactly_the_command() {
        let mut command = Command::new("printf");
        command
            .args(["%s|", "it's", "$HOME \"x\"", "two\nlines", ""])
            .env("GREETING", "a b")
            .current_dir("/tmp");
        let script = for_command(&command);
        let output = Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "it's|$HOME \"x\"|two\nlines||");
    }

    #[test]
    fn directory_and_environment_are_set_and_unset() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $GREETING-$GONE; pwd"])
            .env("GREETING", "a b")
            .env_remove("GONE")
            .current_dir("/tmp");
        let script = for_command(&command);
        let output =
            Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)).env("GONE", "x").output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "a b-\n/tmp\n");
    }
}
