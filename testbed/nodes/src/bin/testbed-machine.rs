//! Process 1 of a test bed's node; see `testbed_nodes::machine`.
//!
//! `testbed-machine enter FILE` makes the node's namespaces and runs `testbed-machine live FILE` in them.

use std::env;
use std::fs;
use std::io::Write;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use testbed_nodes::machine::{self, Machine};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // There is no other place for the message when stderr is closed.
            let _ = writeln!(std::io::stderr(), "testbed-machine: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [step, file] = arguments.as_slice() else { bail!("usage: testbed-machine enter|live FILE") };
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    let machine: Machine = serde_json::from_str(&text).with_context(|| format!("cannot parse {file}"))?;
    match step.as_str() {
        "enter" => {
            let own = env::current_exe().context("cannot find this program")?;
            machine::enter(&machine, Command::new(own).args(["live", file]))
        }
        "live" => machine::live(&machine),
        other => bail!("there is no step {other:?}"),
    }
}
