//! Builds the test bed's programs ahead of the tests, so that no test has to wait minutes for them.

use std::process::ExitCode;

fn main() -> ExitCode {
    match testbed_kube::binary() {
        Ok(path) => {
            print_line(&path.display().to_string());
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("testbed-kube-setup: {error:#}\n"),
            );
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stdout, reason = "the path is this program's result")]
fn print_line(line: &str) {
    println!("{line}");
}
