//! Logs and errors, on stderr.

use std::io::Write;

use tracing_subscriber::EnvFilter;

use crate::arguments::{LogFormat, LogLevel};

/// Starts logging. `RUST_LOG` still has the last word, module by module.
pub(crate) fn start(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
        LogLevel::Trace => "trace",
    };
    // The HTTP and TLS libraries speak of every connection; only their warnings are worth a line.
    let usual = format!("{level},hyper=warn,rustls=warn,tower=warn,kube_client=warn,h2=warn");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(usual));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Json => lines.json().flatten_event(true).init(),
        LogFormat::Text => lines.init(),
    }
}

/// Tells the user why the program ends.
pub(crate) fn complain(message: &str) {
    // Nobody is left to tell when stderr is closed.
    let _ = writeln!(std::io::stderr(), "error: {message}");
}
