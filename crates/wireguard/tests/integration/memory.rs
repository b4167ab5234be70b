//! A node has a tunnel with every other node of its mesh, most of them idle.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_keys::PrivateKey;
use fairlead_wireguard::{Identity, Now, SystemRandom, Tunnel, read_initiation, receiver_index};

const TUNNELS: u32 = 600;

/// Resident anonymous memory of this process in bytes. File-backed pages do not count: the kernel reclaims them under memory pressure.
/// AWS-LC allocates ciphers outside of Rust's heap, so the whole process is measured, which does nothing else.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<usize>().unwrap() * 1024
}

/// A tunnel with two sessions, and the greatest windows of what was received that there can be.
fn tunnel(identities: &[Arc<Identity>; 2], responds: bool, now: Now) -> Tunnel {
    let [mut here, mut there] =
        [0, 1].map(|side| Tunnel::new(Arc::clone(&identities[side]), identities[1 - side].public(), None));
    for session in 0..2 {
        let now = Now { wall: now.wall + Duration::from_secs(session), ..now };
        let now = Now { instant: now.instant + Duration::from_secs(session), ..now };
        let index = u32::try_from(session).unwrap();
        let (initiator, responder) = if responds { (&mut there, &mut here) } else { (&mut here, &mut there) };
        let identity = &identities[usize::from(!responds)];
        let initiation = initiator.initiate(true, index, now, &mut SystemRandom).unwrap();
        let received = read_initiation(identity, &initiation).unwrap();
        let response = responder.respond(received, index, now, &mut SystemRandom).unwrap();
        initiator.finish(&response, now).unwrap();
        let mut keepalive = [0; 32];
        send(initiator, &mut keepalive, now);
        receive(responder, &mut keepalive, now);
        (0..8_192).for_each(|_| send(&mut there, &mut keepalive, now));
        receive(&mut here, &mut keepalive, now);
    }
    assert_eq!(here.indexes().count(), 2);
    here
}

fn send(from: &mut Tunnel, datagram: &mut [u8], now: Now) {
    let mut sealer = from.sealer(now.instant).unwrap();
    sealer.assign_counter(datagram).unwrap();
    sealer.key().encrypt(datagram).unwrap();
}

fn receive(to: &mut Tunnel, datagram: &mut [u8], now: Now) {
    let index = receiver_index(datagram).unwrap();
    let decrypted = to.receive_key(index, now.instant).unwrap().decrypt(datagram).unwrap();
    to.receive(&decrypted, now).unwrap();
}

/// Set in the process that measures.
const MEASURES: &str = "FAIRLEAD_TEST_MEASURES";

#[test]
fn a_tunnel_with_two_sessions_takes_less_than_four_kibibytes() {
    if std::env::var_os(MEASURES).is_none() {
        // `cargo test` runs the others in this process, which allocate as well.
        let mut own = Command::new(std::env::current_exe().unwrap());
        own.args([
            "--exact",
            "memory::a_tunnel_with_two_sessions_takes_less_than_four_kibibytes",
            "--nocapture",
        ]);
        let output = own.env(MEASURES, "1").output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        println!("{stdout}");
        assert!(
            output.status.success() && stdout.contains("1 passed"),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let identities = [1, 2].map(|private| Arc::new(Identity::new(&PrivateKey([private; 32]))));
    let now = Now { instant: Instant::now(), wall: SystemTime::now() };
    for responds in [false, true] {
        let mut tunnels = Vec::with_capacity(TUNNELS as usize);
        tunnels.push(Box::new(tunnel(&identities, responds, now)));
        let before = resident();
        for _ in 0..TUNNELS {
            tunnels.push(Box::new(tunnel(&identities, responds, now)));
        }
        let each = (resident() - before) / TUNNELS as usize;
        println!("{each} bytes per tunnel, {} of them in Tunnel", size_of::<Tunnel>());
        assert!(each <= 4096, "a tunnel takes {each} bytes");
        // Kept: memory that was freed would be used again by the next tunnels, and not be seen.
        std::mem::forget(tunnels);
    }
}
