//! Programs that end with the program that started them, wherever they run.

use std::fs::File;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};

use crate::{Options, kubebed};

const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the arguments as a program and kills it when standard input ends, so that nothing outlives the
/// test program, however that dies.
const SUPERVISE: &str = r#"exec 3<&0
"$@" </dev/null 3<&- &
program=$!
{ cat <&3 >/dev/null; kill -KILL "$program"; } &
watcher=$!
wait "$program"; status=$?
kill "$watcher" 2>/dev/null
exit $status"#;

pub(crate) struct Supervised {
    shell: Child,
    /// Pipe whose end kills the program.
    stdin: Option<ChildStdin>,
}

impl Supervised {
    pub(crate) fn start(
        program: &Command,
        options: &Options,
        directory: &Path,
        name: &str,
    ) -> anyhow::Result<Self> {
        let path = directory.join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(&path);
        let log = log.with_context(|| format!("cannot open {}", path.display()))?;
        let mut shell = options.command(Path::new("/bin/sh"));
        shell.args(["-c", SUPERVISE, name]).arg(program.get_program()).args(program.get_args());
        shell.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
        let mut shell = shell.spawn().with_context(|| format!("cannot run {name}"))?;
        let stdin = shell.stdin.take();
        Ok(Self { shell, stdin })
    }

    pub(crate) fn check_alive(&mut self, name: &str) -> anyhow::Result<()> {
        match self.shell.try_wait().with_context(|| format!("cannot supervise {name}"))? {
            Some(status) => bail!("{name} ended by itself ({status})"),
            None => Ok(()),
        }
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        drop(self.stdin.take());
        kubebed::end(&mut self.shell, END_TIMEOUT);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_supervised_program_dies_with_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let mut sleep = Command::new("sh");
        sleep.args(["-c", "echo $$ > \"$0\"; exec sleep 1000"]).arg(directory.path().join("pid"));
        let supervised = Supervised::start(&sleep, &Options::default(), directory.path(), "sleep").unwrap();
        let pid = loop {
            match fs::read_to_string(directory.path().join("pid")) {
                Ok(pid) if pid.ends_with('\n') => break pid.trim().to_owned(),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        assert!(Path::new("/proc").join(&pid).exists());
        drop(supervised);
        assert!(!Path::new("/proc").join(&pid).exists());
    }

    #[test]
    fn a_program_that_ends_by_itself_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let program = Command::new("false");
        let mut supervised =
            Supervised::start(&program, &Options::default(), directory.path(), "false").unwrap();
        while supervised.shell.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let error = supervised.check_alive("false").unwrap_err().to_string();
        assert!(error.contains("false ended by itself"), "{error}");
    }
}
