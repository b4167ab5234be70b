//! Logs on stderr.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// Minimum level of lines that are logged.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// JSON for log collectors, text for terminals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Json,
    Text,
}

/// Starts logging. `RUST_LOG` overrides the level per module.
pub(crate) fn start(level: LogLevel, format: Option<LogFormat>) {
    let format = format.unwrap_or_else(|| default_format(std::io::stderr().is_terminal()));
    let level = match level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
        LogLevel::Trace => "trace",
    };
    // The HTTP and TLS libraries log every connection; only their warnings are kept.
    let default = format!("{level},hyper=warn,rustls=warn,tower=warn,kube_client=warn,h2=warn");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Json => lines.json().flatten_event(true).init(),
        LogFormat::Text => lines.init(),
    }
}

/// People read a terminal, programs everything else.
fn default_format(terminal: bool) -> LogFormat {
    if terminal { LogFormat::Text } else { LogFormat::Json }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_text_on_a_terminal_and_json_elsewhere() {
        assert_eq!(default_format(true), LogFormat::Text);
        assert_eq!(default_format(false), LogFormat::Json);
    }
}
