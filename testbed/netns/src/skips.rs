//! Tests that cannot run on this kernel. libtest counts a test that returns as passed; with this, a runner can count it as skipped.

use std::fs::OpenOptions;
use std::io::Write;
use std::thread;

/// The variable that names the file to which skipped tests are appended.
pub const TEST_SKIPS: &str = "FAIRLEAD_TEST_SKIPS";

/// The word of a test that returns because this machine lacks something: the line `test-skipped: REASON` on standard output, and the
/// line `EXECUTABLE TEST REASON` in the file that [`TEST_SKIPS`] names, since libtest shows no output of tests that pass. To be called
/// on the thread of the test. A test that says so several times is skipped once.
///
/// # Panics
/// The file cannot be written.
#[expect(clippy::print_stdout, reason = "it is for the runner of the tests")]
pub fn skipped(reason: &str) {
    println!("test-skipped: {reason}");
    let Some(file) = std::env::var_os(TEST_SKIPS) else { return };
    let program = std::env::current_exe().expect("/proc is mounted");
    let program = program.file_name().unwrap_or_default().display();
    let line = format!("{program} {} {reason}\n", thread::current().name().unwrap_or("main"));
    let file = OpenOptions::new().append(true).create(true).open(file);
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .expect("the file of skipped tests can be written");
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const INNER: &str = "skips::tests::a_test_that_is_skipped";

    #[test]
    #[ignore = "another test runs it: cargo test -p testbed-netns"]
    fn a_test_that_is_skipped() {
        skipped("the kernel has no fou");
    }

    #[test]
    fn a_skipped_test_says_so_where_its_runner_reads_it() {
        let own = std::env::current_exe().unwrap();
        let file = std::env::temp_dir().join(format!("fairlead-skips-{}", std::process::id()));
        let mut command = Command::new(&own);
        command.args(["--exact", INNER, "--ignored", "--nocapture"]).env(TEST_SKIPS, &file);
        let outputs: Vec<_> = (0..2).map(|_| command.output().unwrap()).collect();
        let lines = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let line = format!("{} {INNER} the kernel has no fou\n", own.file_name().unwrap().display());
        assert_eq!(lines, line.repeat(2));
        for output in outputs {
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(printed.lines().any(|line| line == "test-skipped: the kernel has no fou"), "{printed}");
        }
    }
}
