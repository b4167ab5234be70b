//! Formats the answers to clients: typed state in, text out.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use fairlead_keys::{DeviceState, PeerState, PublicKey};

/// The answer to `get=1`, with its empty line.
pub(crate) fn describe(state: &DeviceState) -> String {
    let mut text = String::new();
    if let Some(key) = &state.private_key {
        line(&mut text, "private_key", hexadecimal(&key.0));
    }
    if state.listen_port != 0 {
        line(&mut text, "listen_port", state.listen_port);
    }
    if state.fwmark != 0 {
        line(&mut text, "fwmark", state.fwmark);
    }
    for (key, peer) in &state.peers {
        describe_peer(&mut text, key, peer);
    }
    text.push_str(&outcome(0));
    text
}

/// The end of every answer: zero or an errno.
pub(crate) fn outcome(errno: i32) -> String {
    format!("errno={errno}\n\n")
}

fn describe_peer(text: &mut String, key: &PublicKey, peer: &PeerState) {
    line(text, "public_key", hexadecimal(&key.0));
    line(text, "preshared_key", hexadecimal(&peer.config.preshared_key.map(|key| key.0).unwrap_or_default()));
    line(text, "protocol_version", 1);
    if let Some(endpoint) = peer.config.endpoint {
        line(text, "endpoint", endpoint);
    }
    let handshake = since_epoch(peer.last_handshake);
    line(text, "last_handshake_time_sec", handshake.as_secs());
    line(text, "last_handshake_time_nsec", handshake.subsec_nanos());
    line(text, "tx_bytes", peer.tx_bytes);
    line(text, "rx_bytes", peer.rx_bytes);
    line(text, "persistent_keepalive_interval", peer.config.persistent_keepalive.unwrap_or_default());
    for prefix in &peer.config.allowed_ips {
        line(text, "allowed_ip", prefix);
    }
}

/// Zero means never.
fn since_epoch(time: Option<SystemTime>) -> Duration {
    time.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok()).unwrap_or_default()
}

fn line(text: &mut String, name: &str, value: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{name}={value}");
}

/// Lower-case hexadecimal.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().saturating_mul(2));
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fairlead_keys::{PeerConfig, PrivateKey};

    use super::*;

    #[test]
    fn everything_there_is_is_said_in_order() {
        let peer = PeerState {
            config: PeerConfig {
                endpoint: Some("[fd00::1]:51820".parse().unwrap()),
                persistent_keepalive: Some(25),
                allowed_ips: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/64".parse().unwrap()],
                ..PeerConfig::default()
            },
            last_handshake: Some(SystemTime::UNIX_EPOCH + Duration::new(7, 8)),
            rx_bytes: 1,
            tx_bytes: 2,
        };
        let state = DeviceState {
            private_key: Some(PrivateKey([0xab; 32])),
            listen_port: 51_820,
            fwmark: 32,
            peers: BTreeMap::from([(PublicKey([0x0f; 32]), peer)]),
        };
        let expected = format!(
            "private_key={}\nlisten_port=51820\nfwmark=32\npublic_key={}\npreshared_key={}\nprotocol_version=1\n\
             endpoint=[fd00::1]:51820\nlast_handshake_time_sec=7\nlast_handshake_time_nsec=8\ntx_bytes=2\nrx_bytes=1\n\
             persistent_keepalive_interval=25\nallowed_ip=10.0.0.0/8\nallowed_ip=fd00::/64\nerrno=0\n\n",
            "ab".repeat(32),
            "0f".repeat(32),
            "00".repeat(32),
        );
        assert_eq!(describe(&state), expected);
    }
}
