//! `fairlead status`: this node as its program reports it, or nodes and pools as the API server has them.

mod cluster;
mod local;
mod path;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use fairlead_api::names::NODE_SOCKET;

use crate::arguments::queries::StatusArguments;
use crate::query::{PROBLEM_FOUND, current_thread};

/// Interval of `--watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// Clears a terminal and moves to its top (ECMA-48: ED, CUP).
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Source of a status.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    Cluster,
    Node(String),
    Socket(PathBuf),
}

/// Prints the status. The exit code says whether a problem was found.
///
/// # Errors
/// The node program or the API server refuses, or does not answer.
pub fn run(query: &StatusArguments) -> anyhow::Result<ExitCode> {
    let source = source(query, Path::new(NODE_SOCKET).exists());
    let mut stdout = std::io::stdout();
    let clears = query.watch && stdout.is_terminal();
    current_thread(async {
        loop {
            let answer = ask(query, &source).await;
            let (text, healthy) = match answer {
                // What is watched may be away for a while.
                Err(error) if query.watch => (format!("error: {error:#}\n"), false),
                answer => answer?,
            };
            let text = if clears { format!("{CLEAR}{text}") } else { text };
            // A closed pipe (`| head`) is not a failure.
            let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
            if !query.watch || written.is_err() {
                return Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::from(PROBLEM_FOUND) });
            }
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    })
}

/// Without a choice of the user: the node program of this machine if there is one. Pure.
fn source(query: &StatusArguments, is_node: bool) -> Source {
    match (&query.node, &query.socket) {
        (Some(node), _) => Source::Node(node.clone()),
        (None, Some(socket)) => Source::Socket(socket.clone()),
        (None, None) if query.peer.is_some() => Source::Socket(NODE_SOCKET.into()),
        (None, None) if query.cluster || query.api.is_given() || !is_node => Source::Cluster,
        (None, None) => Source::Socket(NODE_SOCKET.into()),
    }
}

/// The text, and whether there is no problem.
async fn ask(query: &StatusArguments, source: &Source) -> anyhow::Result<(String, bool)> {
    match source {
        Source::Cluster => cluster::all(&query.api.client().await?, query.output).await,
        Source::Node(name) => cluster::node(&query.api.client().await?, name, query.output).await,
        Source::Socket(socket) => local::node(socket, query.peer.as_deref(), query.output).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::tests::arguments;

    fn parsed(words: &str) -> StatusArguments {
        arguments(words).unwrap()
    }

    #[test]
    fn the_node_of_this_machine_is_the_default_where_there_is_one() {
        for (words, on_node, elsewhere) in [
            ("", Source::Socket(NODE_SOCKET.into()), Source::Cluster),
            ("--cluster", Source::Cluster, Source::Cluster),
            ("--context lab", Source::Cluster, Source::Cluster),
            ("--kubeconfig /k", Source::Cluster, Source::Cluster),
            ("--node a --context lab", Source::Node("a".to_owned()), Source::Node("a".to_owned())),
            ("home-1", Source::Socket(NODE_SOCKET.into()), Source::Socket(NODE_SOCKET.into())),
            ("--socket /s home-1", Source::Socket("/s".into()), Source::Socket("/s".into())),
            ("--socket /s", Source::Socket("/s".into()), Source::Socket("/s".into())),
        ] {
            assert_eq!(source(&parsed(words), true), on_node, "{words}");
            assert_eq!(source(&parsed(words), false), elsewhere, "{words}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        for words in [
            "--cluster home-1",
            "--node a home-1",
            "--context c home-1",
            "--socket /s --cluster",
            "--socket /s --node a",
            "--node a --cluster",
            "--socket /s --context c",
        ] {
            let error = arguments::<StatusArguments>(words).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{words}");
        }
    }
}
