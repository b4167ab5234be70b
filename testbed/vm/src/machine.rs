//! One QEMU process and the serial ports through which it is spoken to.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tempfile::TempDir;

use crate::image::Image;
use crate::vm::Options;

const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// With KVM it takes seconds, or it never boots: a nested KVM may hang.
const KVM_BOOT_TIMEOUT: Duration = Duration::from_secs(30);
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a wait checks that the VM still runs.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The order in which the ports are made; `init.sh` knows them by these names.
const PORTS: [&str; 5] = ["control", "status", "input", "output", "error"];

/// Stock settings of the kernel that make an emulated machine quick to boot and a panic fatal.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 loglevel=4 oops=panic panic=-1 mitigations=off no_timer_check \
                                tsc=reliable random.trust_cpu=on cryptomgr.notests nokaslr audit=0";

/// Runs the arguments and kills them when standard input ends, so that no VM outlives its test program;
/// then also removes the directory that is the script's own name.
const SUPERVISE: &str = r#"exec 3<&0
"$@" </dev/null 3<&- &
machine=$!
{ cat <&3 >/dev/null; kill -KILL "$machine"; } &
watcher=$!
wait "$machine"; status=$?
kill "$watcher" 2>/dev/null
[ $status = 137 ] && rm -rf "$0"
exit $status"#;

/// Executor of the VM's instructions: QEMU itself or KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accelerator {
    Emulation,
    Kvm,
}

impl Accelerator {
    fn arguments(self) -> &'static str {
        match self {
            // qemu64 copies memory faster than `max`, and without rdrand WireGuard would wait for entropy.
            Self::Emulation => "-accel tcg,thread=multi -cpu qemu64,+rdrand",
            Self::Kvm => "-accel kvm -cpu host",
        }
    }

    fn boot_timeout(self) -> Duration {
        match self {
            Self::Emulation => BOOT_TIMEOUT,
            Self::Kvm => KVM_BOOT_TIMEOUT,
        }
    }
}

pub(crate) struct Machine {
    pub(crate) accelerator: Accelerator,
    // Ended before its directory is removed.
    qemu: Qemu,
    pub(crate) control: UnixStream,
    pub(crate) status: UnixStream,
    pub(crate) input: UnixStream,
    pub(crate) output: UnixStream,
    pub(crate) error: UnixStream,
    directory: TempDir,
}

impl Machine {
    /// Starts QEMU and waits until the first process inside is ready for requests. `extra` is an archive
    /// unpacked over the base image.
    pub(crate) fn boot(
        image: &Image,
        options: &Options,
        extra: &[u8],
        accelerator: Accelerator,
    ) -> anyhow::Result<Self> {
        let directory =
            TempDir::with_prefix("fairlead-vm-").context("cannot create a temporary directory")?;
        let initramfs = directory.path().join("initramfs");
        concatenate(&image.initramfs, extra, &initramfs)
            .with_context(|| format!("cannot write {}", initramfs.display()))?;
        let listeners = PORTS.map(|port| listen(&directory.path().join(port)));
        let arguments = qemu_arguments(options, accelerator, directory.path());
        let mut qemu = Qemu::start(image, options, &initramfs, directory.path(), arguments)?;
        let deadline = Instant::now() + accelerator.boot_timeout();
        let [control, status, input, output, error] = listeners
            .map(|listener| qemu.accept(&listener?, deadline).with_context(|| diagnosis(directory.path())));
        let mut machine = Self {
            accelerator,
            qemu,
            control: control?,
            status: status?,
            input: input?,
            output: output?,
            error: error?,
            directory,
        };
        match read_until(&mut machine.status, b"ready\n", deadline).end {
            End::Found => Ok(machine),
            end => bail!("the VM did not boot: {}\n{}", end.describe(), machine.diagnosis()),
        }
    }

    /// The last output of QEMU and of the kernel's console.
    pub(crate) fn diagnosis(&self) -> String {
        diagnosis(self.directory.path())
    }

    /// Ends the VM at once; every later request fails.
    pub(crate) fn kill(&mut self) {
        self.qemu.kill();
    }
}

/// The QEMU process, under the shell that ties its life to ours.
struct Qemu {
    supervisor: Child,
    /// Pipe whose end kills QEMU.
    lifeline: Option<ChildStdin>,
}

impl Qemu {
    fn start(
        image: &Image,
        options: &Options,
        initramfs: &Path,
        directory: &Path,
        arguments: Vec<String>,
    ) -> anyhow::Result<Self> {
        let log_path = directory.join("qemu.log");
        let log =
            fs::File::create(&log_path).with_context(|| format!("cannot create {}", log_path.display()))?;
        let mut command = options.command(Path::new("/bin/sh"));
        command.args(["-c", SUPERVISE]).arg(directory).arg("qemu-system-x86_64");
        command.args(arguments);
        command.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(initramfs);
        command.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
        let mut supervisor = command.spawn().context("cannot start QEMU")?;
        let lifeline = supervisor.stdin.take();
        Ok(Self { supervisor, lifeline })
    }

    /// Waits until QEMU has connected to a port's socket.
    fn accept(&mut self, listener: &UnixListener, deadline: Instant) -> anyhow::Result<UnixStream> {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    stream.set_read_timeout(Some(POLL_INTERVAL))?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                Err(error) => return Err(error).context("cannot connect a port of the VM"),
            }
            if let Some(status) = self.supervisor.try_wait().context("cannot supervise QEMU")? {
                bail!("QEMU ended at once ({status})");
            }
            if Instant::now() > deadline {
                bail!("QEMU did not connect its ports in time");
            }
        }
    }

    fn kill(&mut self) {
        drop(self.lifeline.take());
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            if !matches!(self.supervisor.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Both fail only when it is gone.
        let _ = self.supervisor.kill();
        let _ = self.supervisor.wait();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}

fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn qemu_arguments(options: &Options, accelerator: Accelerator, directory: &Path) -> Vec<String> {
    let fixed = "-nodefaults -no-user-config -display none -no-reboot -M q35,smm=off,hpet=off \
                 -device virtio-serial-pci -device virtio-rng-pci -nic none";
    let words = fixed.split_whitespace().chain(accelerator.arguments().split_whitespace());
    let mut arguments: Vec<String> = words.map(str::to_owned).collect();
    let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    add("-m", options.memory_mib.to_string());
    add("-smp", options.cpus.to_string());
    add("-append", format!("{KERNEL_ARGUMENTS} {}", options.kernel_arguments));
    add("-chardev", format!("file,id=console,path={}", directory.join("console.log").display()));
    add("-serial", "chardev:console".to_owned());
    for port in PORTS {
        add("-chardev", format!("socket,id={port},path={}", directory.join(port).display()));
        add("-device", format!("virtserialport,name={port},chardev={port}"));
    }
    if let Some(tap) = &options.tap {
        add("-netdev", format!("tap,id=net,ifname={tap},script=no,downscript=no"));
        add("-device", format!("virtio-net-pci,netdev=net,mac={}", options.mac()));
    }
    arguments
}

fn concatenate(base: &Path, extra: &[u8], target: &Path) -> io::Result<()> {
    fs::copy(base, target)?;
    fs::File::options().append(true).open(target)?.write_all(extra)
}

fn diagnosis(directory: &Path) -> String {
    const LINES: usize = 30;
    let mut report = String::new();
    for (name, file) in [("QEMU's messages", "qemu.log"), ("the VM's console", "console.log")] {
        let log = fs::read(directory.join(file)).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let end = lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default();
        report.push_str(&format!("--- end of {name}:\n{}\n", end.join("\n")));
    }
    report
}

/// Reason why reading from a port ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Found,
    Died,
    TimedOut,
}

impl End {
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Found => "it answered",
            Self::Died => "it ended",
            Self::TimedOut => "it took too long",
        }
    }
}

/// Bytes before the mark, or all that came if the mark did not.
pub(crate) struct Content {
    pub(crate) bytes: Vec<u8>,
    pub(crate) end: End,
}

pub(crate) fn read_until(stream: &mut impl Read, mark: &[u8], deadline: Instant) -> Content {
    let mut bytes = Vec::new();
    let mut buffer = [0; 65536];
    let end = loop {
        // The mark is random or the stream is ours alone, so it can stand only at the end.
        if bytes.ends_with(mark) {
            bytes.truncate(bytes.len().saturating_sub(mark.len()));
            break End::Found;
        }
        match stream.read(&mut buffer) {
            Ok(0) => break End::Died,
            Ok(count) => bytes.extend(buffer.iter().take(count)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => break End::Died,
        }
        if Instant::now() > deadline {
            break End::TimedOut;
        }
    };
    Content { bytes, end }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_ends_a_stream_wherever_it_is_cut() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            for part in ["text ma", "rk", "\n"] {
                far.write_all(part.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
            far
        });
        let content = read_until(&mut near, b"mark\n", Instant::now() + Duration::from_secs(60));
        assert_eq!((content.bytes.as_slice(), content.end), (b"text ".as_slice(), End::Found));
        drop(writer.join().unwrap());
        let content = read_until(&mut near, b"mark\n", Instant::now() + Duration::from_secs(60));
        assert_eq!(content.end, End::Died);
    }

    #[test]
    fn the_accelerator_and_the_processor_belong_together() {
        let arguments =
            |accelerator| qemu_arguments(&Options::default(), accelerator, Path::new("/tmp/vm")).join(" ");
        let emulated = arguments(Accelerator::Emulation);
        assert!(
            emulated.contains("-accel tcg,thread=multi -cpu qemu64,+rdrand -m 768 -smp 2 "),
            "{emulated}"
        );
        assert!(arguments(Accelerator::Kvm).contains("-accel kvm -cpu host -m 768 -smp 2 "));
    }

    #[test]
    fn waiting_has_an_end() {
        let (mut near, _far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert_eq!(read_until(&mut near, b"x", Instant::now()).end, End::TimedOut);
    }
}
