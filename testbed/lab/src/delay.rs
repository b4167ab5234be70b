//! Delay on the Internet: what passes between uplinks takes a way through a TUN device, whose thread holds each packet back for a while.
//! So it needs no `netem`, which not every kernel has. Uplinks can be slow, too ([`SlowLink`]).

mod link;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use self::link::Links;
pub use self::link::SlowLink;
use crate::namespace::Namespace;

mod ioctl {
    use nix::libc;

    nix::ioctl_write_ptr_bad!(tun_set_interface, libc::TUNSETIFF, libc::ifreq);
}

const NAME: &str = "delay";
/// The table that leads everything through the device.
const TABLE: u32 = 99;
/// The longest packet.
const LONGEST: usize = 1 << 16;
/// Packets that are held back at most; more are dropped, as by a router.
const MOST: usize = 20_000;
/// Interval at which the thread looks whether it should end.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Packets between sites take longer while this exists.
#[derive(Debug)]
pub struct Delay {
    internet: Namespace,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Delay {
    /// Holds each packet back for `one_way`, and longer what passes a slow link.
    pub(crate) fn start(internet: &Namespace, one_way: Duration, slow: &[SlowLink]) -> Result<Self> {
        let device = internet.run(open)??;
        internet.ip(&format!("link set {NAME} mtu 65000 txqueuelen 10000 up\n"))?;
        let off = [format!("net/ipv4/conf/{NAME}/rp_filter"), "net/ipv4/conf/all/rp_filter".to_owned()];
        internet.set_sysctls(&[(&off[0], "0"), (&off[1], "0")])?;
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let links = Links::new(slow);
        let thread = thread::Builder::new()
            .name(NAME.to_owned())
            .spawn(move || hold_back(device, one_way, links, &seen))
            .context("cannot start the thread that delays packets")?;
        let delay = Self { internet: internet.clone(), is_over, thread: Some(thread) };
        // What comes out of the device, and what this namespace sends itself, goes where it went before.
        internet.shell(&script("add"))?;
        Ok(delay)
    }
}

/// Adds or deletes the routing rules in both families.
fn script(verb: &str) -> String {
    let of_family = |family: &str| {
        format!(
            "ip {family} rule {verb} pref 10 iif {NAME} lookup main\nip {family} rule {verb} pref 11 iif lo lookup main\n\
             ip {family} route {verb} default dev {NAME} table {TABLE}\nip {family} rule {verb} pref 20 lookup {TABLE}\n"
        )
    };
    ["-4", "-6"].map(of_family).concat()
}

impl Drop for Delay {
    fn drop(&mut self) {
        // The device goes with its thread, and the route with the device.
        drop(self.internet.shell(&script("del")));
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Opens the device in the namespace of this thread.
fn open() -> Result<File> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .context("cannot open /dev/net/tun")?;
    let mut name: [libc::c_char; libc::IFNAMSIZ] = [0; libc::IFNAMSIZ];
    for (slot, byte) in name.iter_mut().zip(NAME.bytes()) {
        *slot = libc::c_char::from_ne_bytes([byte]);
    }
    let flags = libc::c_short::try_from(libc::IFF_TUN | libc::IFF_NO_PI)?;
    let request =
        libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags } };
    #[expect(unsafe_code, reason = "TUNSETIFF has no safe wrapper")]
    // SAFETY: the descriptor is an open /dev/net/tun; TUNSETIFF reads one `ifreq`, valid for the duration of the call.
    let attached = unsafe { ioctl::tun_set_interface(device.as_raw_fd(), &raw const request) };
    attached.context("cannot make a TUN device for delays")?;
    Ok(device)
}

/// A packet that is held back.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    due: Instant,
    /// Packets that are due at the same moment keep their order.
    number: u64,
    packet: Box<[u8]>,
}

/// Reads packets, and writes each when its time has come, until told to end.
fn hold_back(mut device: File, one_way: Duration, mut links: Links, is_over: &AtomicBool) {
    let mut held: BinaryHeap<Reverse<Held>> = BinaryHeap::new();
    let mut buffer = vec![0; LONGEST];
    let mut numbers = 0..;
    while !is_over.load(Ordering::Relaxed) {
        let next = held.peek().map(|Reverse(next)| next.due.saturating_duration_since(Instant::now()));
        let wait = next.map_or(CHECK_INTERVAL, |wait| wait.min(CHECK_INTERVAL));
        let mut ready = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
        let waited = ppoll(&mut ready, Some(TimeSpec::from_duration(wait)), None);
        if waited.is_err_and(|error| error != Errno::EINTR) {
            return;
        }
        while let Ok(length) = device.read(&mut buffer) {
            let Some(packet) = buffer.get(..length).filter(|_| held.len() < MOST) else { continue };
            let (Some(passed), Some(number)) = (links.pass(Instant::now(), packet), numbers.next()) else {
                continue;
            };
            held.push(Reverse(Held { due: passed + one_way, number, packet: packet.into() }));
        }
        while held.peek().is_some_and(|Reverse(next)| next.due <= Instant::now()) {
            let Some(Reverse(Held { packet, .. })) = held.pop() else { break };
            // A packet that the kernel refuses is lost, as it would be at a router.
            if device.write(&packet).is_err_and(|error| error.kind() == ErrorKind::BrokenPipe) {
                return;
            }
        }
    }
}
