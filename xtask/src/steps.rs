//! Running programs with progress, and the commands that are little more than that.

use std::env;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::{laws, setup};

/// Result of a command: a sentence for the user when it failed.
pub(crate) type Result = std::result::Result<(), String>;

/// Data, for pipes.
#[expect(clippy::print_stdout, reason = "this is where data leaves the program")]
pub(crate) fn print(text: &str) {
    print!("{text}");
    // A reader that went away is no reason to fail.
    let _ = std::io::stdout().flush();
}

/// Progress and errors, for people.
#[expect(clippy::print_stderr, reason = "this is where progress leaves the program")]
pub(crate) fn say(text: &str) {
    eprintln!("{text}");
}

/// Announces a step, runs it and says how long it took.
pub(crate) fn timed(what: &str, step: impl FnOnce() -> Result) -> Result {
    say(&format!("==> {what}"));
    let start = Instant::now();
    step()?;
    say(&format!("    done in {:.1} s", start.elapsed().as_secs_f64()));
    Ok(())
}

/// Runs a program to its end; anything but success is an error that shows its command line.
pub(crate) fn run(mut command: impl std::borrow::BorrowMut<Command>) -> Result {
    let command = command.borrow_mut();
    let line = describe(command);
    let status = command.status().map_err(|error| format!("cannot run {line}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{line} failed: {status}")) }
}

/// A program that runs beside us. Dropping it kills it.
pub(crate) struct Background {
    line: String,
    child: Child,
}

impl Background {
    pub(crate) fn start(mut command: Command) -> std::result::Result<Self, String> {
        let line = describe(&command);
        let child = command.spawn().map_err(|error| format!("cannot run {line}: {error}"))?;
        Ok(Self { line, child })
    }

    /// Waits for its end, as [`run`] does.
    pub(crate) fn wait(mut self) -> Result {
        let line = &self.line;
        let status = self.child.wait().map_err(|error| format!("cannot wait for {line}: {error}"))?;
        if status.success() { Ok(()) } else { Err(format!("{line} failed: {status}")) }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Both do nothing when it was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// The workspace's root: where `cargo xtask` found this program.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default()
}

/// The same cargo that runs us, at the workspace's root.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
    command
}

/// Directory where cargo puts what it builds.
pub(crate) fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// A program that [`setup::build`] built; examples are `examples/NAME`.
pub(crate) fn built(name: &str) -> PathBuf {
    target().join("debug").join(name)
}

/// `cargo xtask demo`
pub(crate) fn demo(arguments: &[String]) -> Result {
    let start = Instant::now();
    setup::demo()?;
    let outcome = run(Command::new(built("fairlead-demo")).args(arguments));
    say(&format!(
        "demo: {:.0} s in all, set-up included (budget: 900 s from nothing, 60 s again)",
        start.elapsed().as_secs_f64()
    ));
    outcome
}

/// `cargo xtask nodes`
pub(crate) fn nodes(arguments: &[String]) -> Result {
    setup::nodes(false)?;
    run(Command::new(built("fairlead-nodes")).args(arguments))
}

/// `cargo xtask test conformance`: no ring, since it takes minutes for what the rings test in seconds.
pub(crate) fn conformance(arguments: &[String]) -> Result {
    setup::nodes(true)?;
    let reports = target().join("conformance");
    run(Command::new(built("fairlead-conformance")).arg("--report-dir").arg(reports).args(arguments))
}

/// `cargo xtask bench`: of the release build, which users run.
pub(crate) fn bench(arguments: &[String]) -> Result {
    setup::packages()?;
    timed("release build (first time up to 15 minutes)", || {
        // At once, so that cargo unifies their features and builds each library once.
        let packages = ["fairlead-bench", "fairlead", "fairlead-cni-plugin"];
        run(cargo(&["build", "--release"]).args(packages.map(|package| format!("--package={package}"))))
    })?;
    run(Command::new(target().join("release/fairlead-bench")).args(arguments))
}

/// `cargo xtask generate`
pub(crate) fn generate(arguments: &[String]) -> Result {
    setup::build(&["--example=generate_crds"])?;
    run(Command::new(built("examples/generate_crds")).current_dir(root()).args(arguments))?;
    let mut reference = cargo(&["test", "--quiet", "--workspace", "--exclude=fairlead-fuzz", "--lib"]);
    reference.arg("the_reference_of_metrics");
    if !arguments.iter().any(|argument| argument == "--check") {
        reference.env("FAIRLEAD_GENERATE", "1");
    }
    run(reference.stdout(Stdio::null()))
}

/// `cargo xtask lint`
pub(crate) fn lint() -> Result {
    timed("rustfmt", || run(cargo(&["fmt", "--all", "--check"])))?;
    timed("clippy", || {
        run(cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    timed("laws", || run(cargo(&["test", "--quiet", "--package", "xtask", "laws::"])))?;
    say(&format!("    {}", laws::summary()?));
    timed("generated files", || generate(&["--check".to_owned()]))
}
