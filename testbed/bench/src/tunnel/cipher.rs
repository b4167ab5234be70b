//! The cipher of WireGuard alone (ChaCha20-Poly1305, RFC 8439), by the library that the embedded one and gotatun use: what both ends of a
//! tunnel cannot do without.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use aws_lc_rs::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::error::Unspecified;

use super::iperf::Arrived;
use super::load::Transfer;
use super::pair::MTU;
use crate::cpu;

/// One sample.
const DURATION: Duration = Duration::from_secs(1);
/// Packets between two looks at the clock.
const BATCH: u64 = 1000;
/// Headers of TCP over IPv4 with timestamps, in bytes: only what is behind them is payload, as iperf3 counts it.
const HEADERS: u32 = 52;

/// Seals and opens packets as long as the MTU on one core.
pub(super) fn measure() -> Result<Transfer> {
    let key = UnboundKey::new(&CHACHA20_POLY1305, &[7; 32]).map_err(failed)?;
    let key = LessSafeKey::new(key);
    let mut packet = vec![0x55; usize::try_from(MTU)?];
    let (before, start) = (cpu::seconds_of(std::process::id())?, Instant::now());
    let mut packets: u64 = 0;
    while start.elapsed() < DURATION {
        for _ in 0..BATCH {
            seal_and_open(&key, packets, &mut packet).map_err(failed)?;
            packets = packets.wrapping_add(1);
        }
    }
    let (cpu_seconds, elapsed) = (cpu::seconds_of(std::process::id())? - before, start.elapsed());
    ensure!(packet.iter().all(|byte| *byte == 0x55), "what was opened is not what was sealed");
    let bytes = packets as f64 * f64::from(MTU.saturating_sub(HEADERS));
    let bits_per_second = bytes * 8.0 / elapsed.as_secs_f64();
    Ok(Transfer { arrived: Arrived { bytes, bits_per_second, lost_percent: 0.0 }, cpu_seconds })
}

/// In place, with the nonce that WireGuard makes from a counter.
fn seal_and_open(key: &LessSafeKey, counter: u64, packet: &mut Vec<u8>) -> Result<(), Unspecified> {
    let nonce = || {
        let mut nonce = [0; NONCE_LEN];
        let (_, last) = nonce.split_at_mut(4);
        last.copy_from_slice(&counter.to_le_bytes());
        Nonce::assume_unique_for_key(nonce)
    };
    key.seal_in_place_append_tag(nonce(), Aad::empty(), packet)?;
    let length = key.open_in_place(nonce(), Aad::empty(), packet)?.len();
    packet.truncate(length);
    Ok(())
}

fn failed(_: Unspecified) -> anyhow::Error {
    anyhow!("aws-lc refuses to seal or to open a packet")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_sealed_and_opened() {
        let key = LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, &[1; 32]).unwrap());
        let mut packet = b"payload".to_vec();
        seal_and_open(&key, 1 << 40, &mut packet).unwrap();
        assert_eq!(packet, b"payload");
    }
}
