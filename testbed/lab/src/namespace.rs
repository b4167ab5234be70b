//! One namespace trio (network, mount, UTS) and the process that holds it.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::{fs, thread};

use anyhow::{Context, Result, anyhow, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use crate::faults::Faults;
use crate::lock;
use crate::process::Process;

/// Script of the holder. `read` returns when the owner's end of the pipe is gone, however the owner ended; then whatever still runs in
/// these namespaces is killed, a few rounds over because the killed may have been forking.
const HOLDER_SCRIPT: &str = r#"
read -r _
for round in 1 2 3 4 5; do
    found=
    for link in /proc/[0-9]*/ns/net; do
        pid=${link#/proc/}; pid=${pid%%/*}
        [ "$pid" = $$ ] && continue
        if [ "/proc/$pid/ns/net" -ef /proc/$$/ns/net ] || [ "/proc/$pid/ns/mnt" -ef /proc/$$/ns/mnt ]; then
            kill -9 "$pid" && found=1
        fi
    done
    [ -z "$found" ] && break
done
"#;

/// A network namespace of the lab with a mount namespace (own `/run/wireguard` and `/sys`) and a host name of its own.
///
/// Cheap to clone. It ends with its lab, not with the last clone; using it afterwards is an error.
#[derive(Debug, Clone)]
pub struct Namespace {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    holder: u32,
    identity: Identity,
    faults: Mutex<Faults>,
    alive: Mutex<Option<Alive>>,
}

#[derive(Debug)]
struct Alive {
    holder: Child,
    files: Arc<Files>,
}

impl Drop for Alive {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Inode numbers of a network and a mount namespace, which show whether a process is in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    net: u64,
    mnt: u64,
}

impl Identity {
    /// Reads those of a process; `None` if it has ended (or is a zombie).
    fn of(process: &str) -> Option<Self> {
        let inode = |kind| fs::metadata(format!("/proc/{process}/ns/{kind}")).ok().map(|data| data.ino());
        Some(Self { net: inode("net")?, mnt: inode("mnt")? })
    }

    fn overlaps(self, other: Self) -> bool {
        self.net == other.net || self.mnt == other.mnt
    }
}

/// The open namespaces. As long as they are open they live.
#[derive(Debug)]
struct Files {
    net: File,
    mnt: File,
    uts: File,
}

impl Files {
    fn open(process: u32) -> io::Result<Self> {
        let open = |kind| File::open(format!("/proc/{process}/ns/{kind}"));
        Ok(Self { net: open("net")?, mnt: open("mnt")?, uts: open("uts")? })
    }

    /// Moves the calling thread inside, keeping the working directory where it exists inside too.
    ///
    /// Runs between fork and exec: system calls only, nothing from the heap.
    fn enter(&self) -> io::Result<()> {
        let mut buffer = [0_u8; 4096];
        #[expect(unsafe_code, reason = "getcwd without the heap, for use after fork")]
        // SAFETY: the buffer is ours and its true length is passed; the result is read as a bounded C string.
        let known = unsafe { !nix::libc::getcwd(buffer.as_mut_ptr().cast(), buffer.len()).is_null() };
        // A thread that shares its root directory with others may not change its mount namespace.
        unshare(CloneFlags::CLONE_FS)?;
        setns(&self.net, CloneFlags::CLONE_NEWNET)?;
        setns(&self.uts, CloneFlags::CLONE_NEWUTS)?;
        setns(&self.mnt, CloneFlags::CLONE_NEWNS)?;
        if let (true, Ok(directory)) = (known, CStr::from_bytes_until_nul(&buffer)) {
            // Hidden by a private mount: then the root directory is as good as any.
            let _ = nix::unistd::chdir(directory);
        }
        Ok(())
    }
}

impl Namespace {
    /// Creates the namespaces and the process that holds them; they contain only `lo`, which is up.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", HOLDER_SCRIPT, "lab-holder", name]).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let host_name = name.to_owned().into_bytes();
        #[expect(unsafe_code, reason = "entering new namespaces between fork and exec")]
        // SAFETY: the closure makes system calls on data prepared before the fork; it takes no lock and does not allocate.
        unsafe {
            command.pre_exec(move || unshare_and_mount(&host_name))
        };
        let holder = command.spawn().with_context(|| {
            format!(
                "cannot create a namespace for {name}: it takes root (CAP_SYS_ADMIN), /sys and /run/wireguard"
            )
        })?;
        let process = holder.id();
        let files = Files::open(process).with_context(|| format!("cannot open the namespaces of {name}"))?;
        let identity = Identity::of(&process.to_string())
            .with_context(|| format!("the holder of {name} (process {process}) ended at once"))?;
        let alive = Mutex::new(Some(Alive { holder, files: Arc::new(files) }));
        let faults = Mutex::default();
        let namespace = Self {
            inner: Arc::new(Inner { name: name.to_owned(), holder: process, identity, faults, alive }),
        };
        namespace.set_sysctls(&[
            // Addresses must be usable at once; nothing but the lab configures links.
            ("net/ipv6/conf/all/accept_dad", "0"),
            ("net/ipv6/conf/default/accept_dad", "0"),
            ("net/ipv6/conf/default/dad_transmits", "0"),
            ("net/ipv6/conf/default/accept_ra", "0"),
            ("net/ipv6/conf/default/autoconf", "0"),
        ])?;
        namespace.ip("link set lo up\n")?;
        Ok(namespace)
    }

    /// The name given to it, which is also its host name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Process ID of the holder, which runs exactly as long as the namespace is in the lab.
    pub fn holder_pid(&self) -> u32 {
        self.inner.holder
    }

    /// Inode number of the network namespace, as in `readlink /proc/self/ns/net`.
    pub fn network_inode(&self) -> u64 {
        self.inner.identity.net
    }

    /// A path by which any process can open the network namespace while the lab exists (as `CNI_NETNS`).
    pub fn netns_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.inner.holder))
    }

    /// A line to paste into a root shell to inspect it from inside.
    pub fn enter_command(&self) -> String {
        format!("nsenter --target {} --net --mount --uts", self.inner.holder)
    }

    /// Runs `work` on a thread of its own inside the namespaces. A panic of `work` continues in the caller.
    ///
    /// Sockets opened inside stay there; processes started inside run there.
    ///
    /// # Errors
    /// The lab has ended, or the namespaces cannot be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let files = self.files()?;
        thread::scope(|scope| {
            let inside = scope.spawn(|| files.enter().map(|()| work()));
            match inside.join() {
                Ok(result) => {
                    result.with_context(|| format!("cannot enter the namespaces of {}", self.name()))
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// A command that will run inside. It is killed with the lab, even if it has forked into the background.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let mut command = Command::new(program);
        self.enter_on_exec(&mut command)?;
        Ok(command)
    }

    /// Starts `command` (made by [`Namespace::command`] or plain) inside, its output going to the file `output`.
    ///
    /// # Errors
    /// The lab has ended, the file cannot be made, or the program cannot be started.
    pub fn spawn(&self, command: &mut Command, output: impl AsRef<Path>) -> Result<Process> {
        self.enter_on_exec(command)?;
        Process::start(self.name(), command, output.as_ref())
    }

    /// Runs a script with `sh -e` inside and returns its standard output.
    ///
    /// # Errors
    /// The lab has ended or the script failed; the error holds its standard error.
    pub fn shell(&self, script: &str) -> Result<String> {
        self.feed("sh", &["-ec", script], "")
    }

    /// Writes sysctls of this network namespace: names as paths below `/proc/sys`.
    ///
    /// # Errors
    /// A name is unknown to this kernel, or the value is refused.
    pub fn set_sysctls(&self, values: &[(&str, &str)]) -> Result<()> {
        self.run(|| {
            values.iter().try_for_each(|(name, value)| {
                fs::write(Path::new("/proc/sys").join(name), value)
                    .with_context(|| format!("cannot set sysctl {name} to {value} in {}", self.name()))
            })
        })?
    }

    /// Puts an empty tmpfs over a directory (made if missing), seen in this namespace only: `/run/program`, say.
    ///
    /// # Errors
    /// The directory cannot be made or mounted on.
    pub fn mount_private(&self, directory: impl AsRef<Path>) -> Result<()> {
        let directory = directory.as_ref();
        self.run(|| {
            fs::create_dir_all(directory)
                .with_context(|| format!("cannot create {} in {}", directory.display(), self.name()))?;
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            mount(Some(c"lab"), directory, Some(c"tmpfs"), flags, Some(c"mode=0755")).with_context(|| {
                format!("cannot mount a tmpfs on {} in {}", directory.display(), self.name())
            })
        })?
    }

    /// Switches faults of this namespace on and off; see [`Faults`]. What `change` leaves alone stays as it is.
    ///
    /// # Errors
    /// The lab has ended or `nft` refuses the rules.
    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) -> Result<()> {
        let mut faults = lock(&self.inner.faults);
        let mut changed = faults.clone();
        change(&mut changed);
        self.nft(&changed.rules())?;
        *faults = changed;
        Ok(())
    }

    /// Runs lines of `ip -batch`.
    pub(crate) fn ip(&self, lines: &str) -> Result<()> {
        self.feed("ip", &["-batch", "-"], lines).map(drop)
    }

    /// Runs one `nft` transaction.
    pub(crate) fn nft(&self, rules: &str) -> Result<()> {
        self.feed("nft", &["-f", "-"], rules).map(drop)
    }

    fn feed(&self, program: &str, arguments: &[&str], input: &str) -> Result<String> {
        let mut child = self
            .command(program)?
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {program} in {}: is it installed?", self.name()))?;
        // The inputs are far smaller than a pipe's buffer or are read at once, so this cannot block forever.
        let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().with_context(|| format!("cannot wait for {program}"))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            bail!(
                "{program} failed in {} ({}): {}\ninput:\n{input}",
                self.name(),
                output.status,
                errors.trim()
            );
        }
        written.with_context(|| format!("{program} in {} did not read its input", self.name()))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn files(&self) -> Result<Arc<Files>> {
        let alive = lock(&self.inner.alive);
        let alive = alive.as_ref().ok_or_else(|| anyhow!("the lab of {} is gone", self.name()))?;
        Ok(Arc::clone(&alive.files))
    }

    fn enter_on_exec(&self, command: &mut Command) -> Result<()> {
        let files = self.files()?;
        #[expect(unsafe_code, reason = "entering namespaces between fork and exec")]
        // SAFETY: `enter` makes system calls on open files and the stack only; it takes no lock and does not allocate.
        unsafe {
            command.pre_exec(move || files.enter())
        };
        Ok(())
    }

    /// Kills everything inside all of `namespaces`, then the holders, and waits until they are gone.
    pub(crate) fn destroy_all(namespaces: &[Self]) {
        // Each round catches what was forked in the round before; bounded, for a process may hang in the kernel.
        for _ in 0..200 {
            if !kill_inhabitants(namespaces) {
                break;
            }
            thread::sleep(std::time::Duration::from_millis(5));
        }
        let mut gone: Vec<Alive> =
            namespaces.iter().filter_map(|one| lock(&one.inner.alive).take()).collect();
        // All get the signal before any is waited for.
        for alive in &mut gone {
            let _ = alive.holder.kill();
        }
    }
}

/// Sends SIGKILL to every process in the namespaces except holders; true if there was one.
fn kill_inhabitants(namespaces: &[Namespace]) -> bool {
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else { return false };
    let mut found = false;
    for entry in entries.flatten() {
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
        let Ok(process) = name.parse::<u32>() else { continue };
        if process == own || namespaces.iter().any(|one| one.inner.holder == process) {
            continue;
        }
        let Some(identity) = Identity::of(&name) else { continue };
        let inhabits = namespaces.iter().any(|one| one.inner.identity.overlaps(identity));
        if let (true, Ok(process)) = (inhabits, i32::try_from(process)) {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(process),
                nix::sys::signal::Signal::SIGKILL,
            );
            found = true;
        }
    }
    found
}

/// Makes the namespaces of the calling process and mounts what must be private. Runs between fork and exec.
fn unshare_and_mount(host_name: &[u8]) -> io::Result<()> {
    // Ctrl-C at the terminal is for the owner alone; the holder outlives it until the pipe closes.
    nix::unistd::setsid()?;
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS)?;
    #[expect(unsafe_code, reason = "nix offers sethostname only with another feature")]
    // SAFETY: pointer and length are those of one live slice.
    let named = unsafe { nix::libc::sethostname(host_name.as_ptr().cast(), host_name.len()) };
    if named != 0 {
        return Err(io::Error::last_os_error());
    }
    let none = None::<&CStr>;
    // A slave sees later mounts of the machine but never hands its own back.
    mount(none, c"/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    // A sysfs shows the network namespace it was mounted in. It is put together elsewhere, with the control groups
    // and the BPF file system of the old one, and then moved over it.
    mount(Some(c"sysfs"), c"/run/wireguard", Some(c"sysfs"), flags, none)?;
    let bind = MsFlags::MS_BIND | MsFlags::MS_REC;
    let _ = mount(Some(c"/sys/fs/cgroup"), c"/run/wireguard/fs/cgroup", none, bind, none);
    let _ = mount(Some(c"/sys/fs/bpf"), c"/run/wireguard/fs/bpf", none, bind, none);
    mount(Some(c"/run/wireguard"), c"/sys", none, MsFlags::MS_MOVE, none)?;
    mount(Some(c"lab"), c"/run/wireguard", Some(c"tmpfs"), flags, Some(c"mode=0700"))?;
    Ok(())
}
