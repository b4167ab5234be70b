use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::cpio::Archive;
use crate::machine::{Accelerator, End, Machine, read_until};
use crate::{files, image, script};

/// Makes the command that runs the given program where QEMU shall run, for example inside the network
/// namespace that holds the TAP. Arguments and standard streams are set on the result.
pub type Launcher = Box<dyn Fn(&Path) -> Command + Send + Sync>;

/// Machine to boot; the default has two processors, 768 MiB and no network.
pub struct Options {
    /// Runs QEMU somewhere else than beside the test.
    pub launcher: Option<Launcher>,
    /// Name of an existing TAP interface where QEMU runs; it is the VM's `eth0` (down, no address).
    pub tap: Option<String>,
    /// Host files to have in the VM, at their own paths and with the libraries they need.
    pub files: Vec<PathBuf>,
    /// More arguments of the kernel, after those that make it quick to boot.
    pub kernel_arguments: &'static str,
    /// Memory in MiB; the files above take part of it.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Whether KVM executes the VM where it boots the kernel; else everything is emulated, which is the same on every machine.
    pub may_use_kvm: bool,
    /// Longest time for one command; then the VM is killed and the command an error.
    pub command_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            launcher: None,
            tap: None,
            files: Vec::new(),
            kernel_arguments: "",
            memory_mib: 768,
            cpus: 2,
            may_use_kvm: false,
            command_timeout: Duration::from_secs(300),
        }
    }
}

impl Options {
    pub(crate) fn command(&self, program: &Path) -> Command {
        self.launcher.as_ref().map_or_else(|| Command::new(program), |launch| launch(program))
    }

    /// A different address for every VM: two on one link with the same one would receive each other's packets.
    pub(crate) fn mac(&self) -> String {
        let [a, b, c]: [u8; 3] = rand::random();
        format!("52:54:00:{a:02x}:{b:02x}:{c:02x}")
    }
}

/// A running virtual machine; dropping it ends it at once.
pub struct Vm {
    machine: Machine,
    command_timeout: Duration,
}

impl Vm {
    /// Boots a VM and returns when it can run commands (seconds; a minute more the very first time, see
    /// [`crate::prepare`]). An emulated machine that ends during boot is started once more.
    ///
    /// # Errors
    /// The image cannot be made, a file is missing, or the VM does not boot; the ends of QEMU's messages
    /// and of the console are in the message.
    pub fn start(options: &Options) -> anyhow::Result<Self> {
        let image = image::find_or_make()?;
        let mut archive = Archive::default();
        for file in &options.files {
            files::add_with_libraries(&mut archive, file)?;
        }
        let extra = archive.encode()?;
        let boot = |accelerator| Machine::boot(&image, options, &extra, accelerator);
        let emulated = || boot(Accelerator::Emulation).or_else(|_| boot(Accelerator::Emulation));
        let by_kvm = options.may_use_kvm.then(|| boot(Accelerator::Kvm).ok()).flatten();
        let machine = by_kvm.map_or_else(emulated, Ok);
        Ok(Self { machine: machine?, command_timeout: options.command_timeout })
    }

    /// Whether its processors are emulated: then speeds mean nothing, only ratios do.
    pub fn is_emulated(&self) -> bool {
        self.machine.accelerator == Accelerator::Emulation
    }

    /// Runs a command in the VM to its end. Of the [`Command`], program, arguments, directory and the
    /// environment set on it count; its standard input is empty. A program killed by signal N has exit
    /// code 128 + N; one that is not there has 127. Background processes may live on, and should have
    /// their output redirected.
    ///
    /// # Errors
    /// The VM died or the command took longer than [`Options::command_timeout`]; what it printed until
    /// then and the end of the console are in the message. The VM is of no use afterwards.
    pub fn run(&mut self, command: &Command) -> anyhow::Result<Output> {
        let what = command.get_program().to_string_lossy().into_owned();
        self.request(&script::for_command(command), &[])
            .with_context(|| format!("cannot run {what} in the VM"))
    }

    /// Runs a POSIX shell script in the VM; returns its stdout.
    ///
    /// # Errors
    /// As for [`Self::run`], or the script fails; its stderr is in the message.
    pub fn shell(&mut self, script: &str) -> anyhow::Result<String> {
        let mut command = Command::new("sh");
        command.args(["-ec", script]);
        let output = self.run(&command)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if !output.status.success() {
            let (status, stdout, stderr) = (output.status, text(&output.stdout), text(&output.stderr));
            bail!("in the VM, `{script}` failed ({status}): {stderr}{stdout}");
        }
        Ok(text(&output.stdout))
    }

    /// Writes a file in the VM, with directories as needed; `mode` are its permissions.
    ///
    /// # Errors
    /// As for [`Self::run`], or the VM cannot store it.
    pub fn put(&mut self, path: &Path, mode: u32, content: &[u8]) -> anyhow::Result<()> {
        let quoted = |path: &Path| script::quote(path.as_os_str());
        let mut script = b"set -e\nmkdir -p ".to_vec();
        script.extend(quoted(path.parent().unwrap_or(Path::new("/"))));
        script.extend(format!("\nhead -c {} <&6 >", content.len()).bytes());
        script.extend(quoted(path));
        script.extend(format!("\nchmod {:o} ", mode & 0o7777).bytes());
        script.extend(quoted(path));
        script.push(b'\n');
        let output = self.request(&script, content)?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(anyhow!("cannot write {} in the VM: {}", path.display(), stderr.trim_end()));
        }
        Ok(())
    }

    /// Sends a script, and `input` to its file descriptor 6; returns what it printed and its status.
    fn request(&mut self, script: &[u8], input: &[u8]) -> anyhow::Result<Output> {
        let mark = format!("end-{:016x}\n", rand::random::<u64>());
        let line = format!("{} {}\n", mark.trim_end(), STANDARD.encode(script));
        let deadline = Instant::now() + self.command_timeout;
        let machine = &mut self.machine;
        machine
            .control
            .write_all(line.as_bytes())
            .with_context(|| format!("the VM is gone\n{}", machine.diagnosis()))?;
        let (sink, stdout, stderr) = (&mut machine.input, &mut machine.output, &mut machine.error);
        let mark = mark.as_bytes();
        let (stdout, stderr) = std::thread::scope(|scope| {
            // All at once: a VM whose output is not read stops, and so would its reading. That it died
            // while being sent to is seen by the readers.
            scope.spawn(move || sink.write_all(input));
            let stderr = scope.spawn(move || read_until(stderr, mark, deadline));
            (read_until(stdout, mark, deadline), stderr.join())
        });
        let stderr = stderr.map_err(|_| anyhow!("reading from the VM failed"))?;
        let status = read_until(&mut machine.status, b"\n", deadline);
        for end in [stdout.end, stderr.end, status.end] {
            if end != End::Found {
                let diagnosis = machine.diagnosis();
                machine.kill();
                let (stdout, stderr) =
                    (String::from_utf8_lossy(&stdout.bytes), String::from_utf8_lossy(&stderr.bytes));
                bail!("{}\n--- stdout:\n{stdout}\n--- stderr:\n{stderr}\n{diagnosis}", end.describe());
            }
        }
        let code: i32 =
            String::from_utf8_lossy(&status.bytes).trim().parse().context("the VM sent no exit status")?;
        Ok(Output { status: exit_status(code), stdout: stdout.bytes, stderr: stderr.bytes })
    }
}

/// Boots a VM, runs one command in it and ends it. If the command's program is a path, that host file and
/// its libraries are brought along.
///
/// # Errors
/// As for [`Vm::start`] and [`Vm::run`].
pub fn run(command: &Command, mut options: Options) -> anyhow::Result<Output> {
    let program = command.get_program();
    if program.as_bytes().contains(&b'/') {
        options.files.push(absolute(program)?);
    }
    Vm::start(&options)?.run(command)
}

fn absolute(program: &OsStr) -> anyhow::Result<PathBuf> {
    let path = Path::new(program);
    if !path.is_absolute() {
        bail!("{} must be an absolute path: the VM has other directories", path.display());
    }
    Ok(path.to_owned())
}

/// An exit code as wait(2) reports it.
fn exit_status(code: i32) -> ExitStatus {
    ExitStatus::from_raw((code & 0xff) << 8)
}
