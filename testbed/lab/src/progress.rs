//! Progress on stderr, one line a step.

use std::io::Write;
use std::time::Instant;

/// Counts the time since it was made and prints steps.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    start: Instant,
}

impl Default for Progress {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Progress {
    /// Prints one step with the time since the start.
    pub fn step(&self, what: &str) {
        // A closed stderr is no error.
        let _ = writeln!(std::io::stderr(), "[{:5.1} s] {what}", self.start.elapsed().as_secs_f64());
    }
}
