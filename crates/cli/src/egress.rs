//! `fairlead egress`: shows egress gateways and their client pods, and says which way packets of a pod take. Everything is read from the
//! API server with the rights of the user.

mod display;
mod explain;
mod gateways;
mod read;
mod status;
#[cfg(test)]
mod tests;
mod who;

use std::process::ExitCode;

use crate::arguments::egress::EgressCommand;
use crate::output;
use crate::query::current_thread;

/// Runs a subcommand. The exit code says whether a problem was found.
///
/// # Errors
/// A query fails.
pub fn run(command: &EgressCommand) -> anyhow::Result<ExitCode> {
    let (text, code) = current_thread(async {
        match command {
            EgressCommand::Explain(query) => explain::run(query).await,
            EgressCommand::Status(query) => status::run(query).await,
            EgressCommand::Who(query) => who::run(query).await,
        }
    })?;
    output::print(&text);
    Ok(code)
}
