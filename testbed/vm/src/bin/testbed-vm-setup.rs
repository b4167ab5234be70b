//! Makes the VM image ahead of the tests, so that no test has to wait for a download.

use std::process::ExitCode;

#[expect(clippy::print_stdout, reason = "the path is this program's result")]
fn main() -> ExitCode {
    match testbed_vm::prepare() {
        Ok(directory) => {
            println!("{}", directory.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("testbed-vm-setup: {error:#}\n"),
            );
            ExitCode::FAILURE
        }
    }
}
