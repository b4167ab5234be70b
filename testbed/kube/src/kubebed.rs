//! The control plane as one child process that obeys commands on its standard input.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};

use crate::Options;

/// Longer than kubebed's own limit for an API server to become ready, so that its words are heard.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(240);
const END_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Kubebed {
    child: Child,
    /// Taken when dropping: its end makes the child end.
    stdin: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Kubebed {
    /// Starts the control plane and waits until it answers; `directory` gets its state and logs.
    pub(crate) fn start(binary: &Path, options: &Options, directory: &Path) -> anyhow::Result<Self> {
        let log = directory.join("kubebed.log");
        let log = std::fs::File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut command = options.command(binary);
        command.arg("up").arg("-dir").arg(directory).args(arguments(options));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().with_context(|| format!("cannot run {}", binary.display()))?;
        let stdin = child.stdin.take();
        let answers = child.stdout.take().map(lines).context("the control plane has no standard output")?;
        let bed = Self { child, stdin, answers };
        let answer = bed.answer("start")?;
        if !answer.starts_with("READY ") {
            bail!("the control plane said {answer:?} instead of READY");
        }
        Ok(bed)
    }

    pub(crate) fn command(&mut self, name: &str) -> anyhow::Result<()> {
        let stdin = self.stdin.as_mut().context("the control plane has ended")?;
        writeln!(stdin, "{name}")
            .with_context(|| format!("cannot send {name} to the control plane: it has ended"))?;
        match self.answer(name)?.as_str() {
            "OK" => Ok(()),
            answer => bail!("the control plane answered {name} with: {answer}"),
        }
    }

    /// Kills everything and leaves the directory as it is.
    pub(crate) fn kill(mut self) -> anyhow::Result<()> {
        // First, so that its port is free when this returns. It may be stopped already.
        let _ = self.command("stop-apiserver");
        self.child.kill().context("cannot kill the control plane")?;
        self.child.wait().context("cannot wait for the end of the control plane").map(drop)
    }

    fn answer(&self, what: &str) -> anyhow::Result<String> {
        self.answers.recv_timeout(ANSWER_TIMEOUT).map_err(|error| match error {
            RecvTimeoutError::Timeout => anyhow!("{what}: no answer in {} s", ANSWER_TIMEOUT.as_secs()),
            RecvTimeoutError::Disconnected => anyhow!("{what}: the control plane ended"),
        })
    }
}

impl Drop for Kubebed {
    fn drop(&mut self) {
        drop(self.stdin.take());
        end(&mut self.child, END_TIMEOUT);
    }
}

/// Gives a child time to end in its own order (API server before etcd), then kills it.
pub(crate) fn end(child: &mut Child, patience: Duration) {
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // Both fail only when it is gone.
    let _ = child.kill();
    let _ = child.wait();
}

/// Flags of all commands that use a state directory.
pub(crate) fn arguments(options: &Options) -> Vec<String> {
    let mut arguments = vec![
        // If this process is killed, nothing else removes the directory.
        "-ephemeral".to_owned(),
        format!("-controllers={}", options.controllers),
        format!("-scheduler={}", options.scheduler),
        format!("-port={}", options.port.unwrap_or(0)),
    ];
    arguments.extend(options.addresses.iter().map(|address| format!("-address={address}")));
    arguments.extend(options.extra_names.iter().map(|name| format!("-san={name}")));
    arguments.extend(options.apiserver_args.iter().map(|argument| format!("-apiserver-arg={argument}")));
    arguments.extend(options.controller_args.iter().map(|argument| format!("-controller-arg={argument}")));
    arguments
}

fn lines(output: ChildStdout) -> Receiver<String> {
    // At most one answer per command is ever under way, so the queue cannot grow.
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_reaches_the_command_line() {
        let options = Options {
            addresses: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            extra_names: vec!["api.test".into()],
            port: Some(6443),
            controllers: true,
            apiserver_args: vec!["--v=4".into()],
            ..Options::default()
        };
        let expected = "-ephemeral -controllers=true -scheduler=false -port=6443 -address=192.0.2.1 -address=2001:db8::1 \
                        -san=api.test -apiserver-arg=--v=4";
        assert_eq!(arguments(&options).join(" "), expected);
    }
}
