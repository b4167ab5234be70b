//! Programs of Debian packages on a node of a bed, as they run on a host: with directories for configuration, state and sockets of their own, and
//! the network namespace of the node. Nothing is installed on this machine, and all of them end with the handle.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use testbed_cache::debian;

use crate::mesh_common::Namespace;

/// The files of the machine, and over them those of the packages. `/sys` shows the links of the node.
const SETUP: &str = "mount --make-rprivate /
mount -t tmpfs tmpfs $1
mkdir $1/changed $1/work $1/root
mount -t overlay overlay -o lowerdir=/,upperdir=$1/changed,workdir=$1/work $1/root
test -z $2 || tar -C $2 -c . | tar -C $1/root -x --keep-directory-symlink
mount --rbind /dev $1/root/dev
mount -t proc proc $1/root/proc
mount -t sysfs sysfs $1/root/sys
for directory in run tmp var/tmp; do mount -t tmpfs tmpfs $1/root/$directory; done
exec chroot $1/root /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin sh";
/// First word of the line after the output of a script.
const DONE: &str = "script-ended";

pub(crate) struct DebianHost {
    shell: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    _root: tempfile::TempDir,
}

impl DebianHost {
    /// A host with these packages on the node; those that this machine has need not be named.
    pub(crate) fn new(node: &Namespace, packages: &[&str]) -> Self {
        let root = tempfile::TempDir::new().unwrap();
        let files = match packages {
            [] => PathBuf::new(),
            packages => debian::files(packages).unwrap(),
        };
        let mut command = Command::new("unshare");
        // Its end is the end of all processes of the namespace.
        command.args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-ec",
            SETUP,
            "sh",
        ]);
        command.arg(root.path()).arg(files).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = node.run(|| command.spawn()).unwrap();
        let (stdin, stdout) = (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()));
        Self { shell, stdin, stdout, _root: root }
    }

    /// Runs a script and returns what it prints. It fails at its first failing command.
    pub(crate) fn sh(&mut self, script: &str) -> String {
        write!(
            self.stdin,
            "(set -e\n{script}\n) </dev/null >/tmp/output 2>&1; code=$?; cat /tmp/output; echo; echo {DONE} $code\n"
        )
        .unwrap();
        let mut output = String::new();
        loop {
            let mut line = String::new();
            let read = self.stdout.read_line(&mut line).unwrap();
            assert!(read > 0, "the host has ended: {script}: {output}");
            if let Some(code) = line.strip_prefix(DONE) {
                assert_eq!(code.trim(), "0", "{script}: {output}");
                return output;
            }
            output.push_str(&line);
        }
    }

    /// Starts a program that stays.
    pub(crate) fn start(&mut self, program: &str) {
        self.sh(&format!("{program} >/tmp/log 2>&1 & echo $! >/tmp/pid"));
    }

    /// Waits until the program that was started last logs this text.
    pub(crate) fn wait_for_log(&mut self, text: &str) {
        self.wait(&format!("grep -q '{text}' /tmp/log"));
    }

    /// Waits until a command succeeds.
    pub(crate) fn wait(&mut self, command: &str) {
        self.sh(&format!(
            "n=0; until {command}; do n=$((n + 1)); test $n -lt 1000 || {{ tail -n 50 /tmp/log; exit 1; }}; sleep 0.02; done"
        ));
    }

    /// Ends the program that was started last.
    pub(crate) fn stop(&mut self) {
        self.sh("kill $(cat /tmp/pid)");
        self.wait("! kill -0 $(cat /tmp/pid) 2>/dev/null");
    }
}

impl Drop for DebianHost {
    fn drop(&mut self) {
        drop(self.shell.kill());
        drop(self.shell.wait());
    }
}
