//! Logs and errors on stderr.

use std::io::Write;

use tracing_subscriber::EnvFilter;

use crate::arguments::{LogFormat, LogLevel};

/// Starts logging. `RUST_LOG` overrides the level per module.
pub(crate) fn start(level: LogLevel, format: LogFormat) {
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

/// Prints why the program failed.
pub(crate) fn error(message: &str) {
    // A closed stderr leaves no place to report to.
    let _ = writeln!(std::io::stderr(), "error: {message}");
}
