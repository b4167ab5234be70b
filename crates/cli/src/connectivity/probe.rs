//! Runs in a probe pod: connects to all targets at once and writes what came of it.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::serve::PAYLOAD;
use crate::arguments::queries::ProbeArguments;

/// A Service that was just made takes a moment to reach every node.
const ATTEMPTS: u32 = 4;
/// Longest one attempt may take.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(4);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Longest error text: a termination message has at most 4,096 bytes.
const MAX_ERROR: usize = 60;

/// Outcome of one target. The names are short for the termination message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Number of the target, from 0.
    #[serde(rename = "i")]
    pub(super) index: usize,
    /// Milliseconds of the attempt that succeeded.
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none")]
    pub(super) milliseconds: Option<u32>,
    /// Error of the last attempt.
    #[serde(rename = "e", default, skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// Connects to all targets, and writes the outcomes as JSON.
///
/// # Errors
/// The file cannot be written.
pub(super) async fn run(arguments: &ProbeArguments) -> anyhow::Result<ExitCode> {
    let mut running = JoinSet::new();
    for (index, target) in arguments.targets.iter().cloned().enumerate() {
        running.spawn(async move { outcome(index, &target).await });
    }
    let mut outcomes = running.join_all().await;
    outcomes.sort_by_key(|outcome| outcome.index);
    let text = serde_json::to_string(&outcomes)?;
    std::fs::write(&arguments.results, &text)
        .with_context(|| format!("cannot write {}", arguments.results.display()))?;
    tracing::info!(results = text, "done");
    Ok(ExitCode::SUCCESS)
}

async fn outcome(index: usize, target: &str) -> Outcome {
    let (address, name) =
        target.split_once('=').map_or((target, None), |(address, name)| (address, Some(name)));
    let mut error = None;
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            sleep(RETRY_INTERVAL).await;
        }
        let start = Instant::now();
        match timeout(ATTEMPT_TIMEOUT, exchange(address, name)).await {
            Ok(Ok(())) => {
                let milliseconds = u32::try_from(start.elapsed().as_millis()).unwrap_or(u32::MAX);
                return Outcome { index, milliseconds: Some(milliseconds), error: None };
            }
            Ok(Err(failed)) => error = Some(failed.to_string()),
            Err(_) => error = Some("timed out".to_owned()),
        }
    }
    let error = error.map(|error| error.chars().take(MAX_ERROR).collect());
    Outcome { index, milliseconds: None, error }
}

/// Connects, and reads what a target sends if it is one.
async fn exchange(address: &str, name: Option<&str>) -> io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    let Some(name) = name else { return Ok(()) };
    let mut received = Vec::new();
    stream.read_to_end(&mut received).await?;
    let line = received.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let other = |what: String| Err(io::Error::other(what));
    if !name.is_empty() && line != name.as_bytes() {
        return other(format!("another pod answered: {}", String::from_utf8_lossy(line)));
    }
    match received.len().saturating_sub(line.len().saturating_add(1)) {
        PAYLOAD => Ok(()),
        rest => other(format!("{rest} of {PAYLOAD} bytes arrived")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connectivity::serve;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn the_answer_must_come_from_the_right_pod() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let _serving = tokio::spawn(async move { serve::accept_all(&listener, "target-1").await });
        for name in [None, Some(""), Some("target-1")] {
            exchange(&address, name).await.unwrap();
        }
        let error = exchange(&address, Some("target-2")).await.unwrap_err().to_string();
        assert_eq!(error, "another pod answered: target-1");
    }

    #[tokio::test]
    async fn a_connection_that_is_refused_is_reported() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let refused = exchange(&address, None).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn many_outcomes_fit_into_a_termination_message() {
        let outcome = |index| Outcome { index, milliseconds: None, error: Some("x".repeat(MAX_ERROR)) };
        let text = serde_json::to_string(&(0..48).map(outcome).collect::<Vec<_>>()).unwrap();
        assert!(text.len() < 4096, "{}", text.len());
    }
}
