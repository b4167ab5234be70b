//! Parses the requests of clients: text in, typed requests out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use fairlead_keys::{DeviceChange, DeviceState, PeerConfig, PresharedKey, PrivateKey, PublicKey};
use ipnet::IpNet;

/// A parsed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// Report configuration and state.
    Get,
    /// Change the configuration.
    Set(Set),
}

/// A request to change the device; what is `None` stays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Set {
    private_key: Option<PrivateKey>,
    listen_port: Option<u16>,
    fwmark: Option<u32>,
    replace_peers: bool,
    peers: Vec<SetPeer>,
}

/// The part of a request about one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SetPeer {
    key: PublicKey,
    remove: bool,
    update_only: bool,
    /// All zeros mean none.
    preshared_key: Option<[u8; 32]>,
    endpoint: Option<SocketAddr>,
    persistent_keepalive: Option<u16>,
    replace_allowed_ips: bool,
    allowed_ips: Vec<AllowedIp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AllowedIp {
    Add(IpNet),
    Remove(IpNet),
}

/// A request that is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid control request: {0}")]
pub(crate) struct Refused(String);

/// Parses the lines of one request, without the empty line at its end.
pub(crate) fn parse(text: &str) -> Result<Request, Refused> {
    let mut lines = text.lines();
    match lines.next() {
        Some("get=1") => Ok(Request::Get),
        Some("set=1") => parse_set(lines).map(Request::Set),
        other => Err(Refused(format!("it begins with {other:?}, not get=1 or set=1"))),
    }
}

fn parse_set<'a>(lines: impl Iterator<Item = &'a str>) -> Result<Set, Refused> {
    let mut set = Set::default();
    for line in lines {
        let (name, value) = line.split_once('=').ok_or_else(|| Refused(format!("{line:?} has no '='")))?;
        if name == "public_key" {
            set.peers.push(SetPeer::new(PublicKey(key(value)?)));
        } else if let Some(peer) = set.peers.last_mut() {
            peer.line(name, value)?;
        } else {
            set.line(name, value)?;
        }
    }
    Ok(set)
}

impl Set {
    fn line(&mut self, name: &str, value: &str) -> Result<(), Refused> {
        match name {
            "private_key" => self.private_key = Some(PrivateKey(key(value)?)),
            "listen_port" => self.listen_port = Some(number(name, value)?),
            "fwmark" => self.fwmark = Some(mark(value)?),
            "replace_peers" => self.replace_peers = yes(name, value)?,
            _ => return Err(unknown(name, value)),
        }
        Ok(())
    }

    /// The change that this request makes to a device in `state`.
    pub(crate) fn change(&self, state: &DeviceState) -> DeviceChange {
        let mut peers: BTreeMap<PublicKey, PeerConfig> = BTreeMap::new();
        if !self.replace_peers {
            peers.extend(state.peers.iter().map(|(key, peer)| (*key, peer.config.clone())));
        }
        for peer in &self.peers {
            peer.apply(&mut peers, state);
        }
        let remove_peers = state.peers.keys().filter(|key| !peers.contains_key(key)).copied().collect();
        peers.retain(|key, config| state.peers.get(key).is_none_or(|present| present.config != *config));
        DeviceChange {
            private_key: self.private_key.clone(),
            listen_port: self.listen_port,
            fwmark: self.fwmark,
            set_peers: peers,
            remove_peers,
            handshakes: BTreeSet::new(),
        }
    }
}

impl SetPeer {
    fn new(key: PublicKey) -> Self {
        Self {
            key,
            remove: false,
            update_only: false,
            preshared_key: None,
            endpoint: None,
            persistent_keepalive: None,
            replace_allowed_ips: false,
            allowed_ips: Vec::new(),
        }
    }

    fn line(&mut self, name: &str, value: &str) -> Result<(), Refused> {
        match name {
            "remove" => self.remove = yes(name, value)?,
            "update_only" => self.update_only = yes(name, value)?,
            "preshared_key" => self.preshared_key = Some(key(value)?),
            "endpoint" => self.endpoint = Some(value.parse().map_err(|_| unknown(name, value))?),
            "persistent_keepalive_interval" => self.persistent_keepalive = Some(number(name, value)?),
            "replace_allowed_ips" => self.replace_allowed_ips = yes(name, value)?,
            "allowed_ip" => self.allowed_ips.push(allowed_ip(value)?),
            "protocol_version" if value == "1" => {}
            _ => return Err(unknown(name, value)),
        }
        Ok(())
    }

    fn apply(&self, peers: &mut BTreeMap<PublicKey, PeerConfig>, state: &DeviceState) {
        if self.remove {
            peers.remove(&self.key);
            return;
        }
        if self.update_only && !peers.contains_key(&self.key) {
            return;
        }
        // A peer that replaces itself keeps only its session.
        let fresh = PeerConfig {
            endpoint: state.peers.get(&self.key).and_then(|present| present.config.endpoint),
            ..PeerConfig::default()
        };
        let mut config = peers.remove(&self.key).unwrap_or(fresh);
        if let Some(preshared) = self.preshared_key {
            config.preshared_key = (preshared != [0; 32]).then_some(PresharedKey(preshared));
        }
        config.endpoint = self.endpoint.or(config.endpoint);
        if let Some(seconds) = self.persistent_keepalive {
            config.persistent_keepalive = (seconds != 0).then_some(seconds);
        }
        if self.replace_allowed_ips {
            config.allowed_ips.clear();
        }
        for change in &self.allowed_ips {
            let (AllowedIp::Add(prefix) | AllowedIp::Remove(prefix)) = change;
            config.allowed_ips.retain(|present| present != prefix);
            if matches!(change, AllowedIp::Add(_)) {
                config.allowed_ips.push(*prefix);
                peers.values_mut().for_each(|other| other.allowed_ips.retain(|present| present != prefix));
            }
        }
        config.allowed_ips.sort_unstable();
        peers.insert(self.key, config);
    }
}

fn unknown(name: &str, value: &str) -> Refused {
    Refused(format!("{name}={value:?}"))
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, Refused> {
    value.parse().map_err(|_| unknown(name, value))
}

fn yes(name: &str, value: &str) -> Result<bool, Refused> {
    if value == "true" { Ok(true) } else { Err(unknown(name, value)) }
}

fn mark(value: &str) -> Result<u32, Refused> {
    let parsed = value.strip_prefix("0x").map_or_else(|| value.parse(), |hex| u32::from_str_radix(hex, 16));
    parsed.map_err(|_| unknown("fwmark", value))
}

fn allowed_ip(value: &str) -> Result<AllowedIp, Refused> {
    let (prefix, remove) = value.strip_prefix('-').map_or((value, false), |prefix| (prefix, true));
    let prefix = prefix.parse::<IpNet>().map_err(|_| unknown("allowed_ip", value))?.trunc();
    Ok(if remove { AllowedIp::Remove(prefix) } else { AllowedIp::Add(prefix) })
}

/// 32 bytes in hexadecimal. The value may be a secret, so the error does not repeat it.
fn key(value: &str) -> Result<[u8; 32], Refused> {
    let refused = || Refused("a key is not 64 hexadecimal digits".to_owned());
    let (digits, rest) = value.as_bytes().as_chunks::<2>();
    if !rest.is_empty() || digits.len() != 32 {
        return Err(refused());
    }
    let mut bytes = [0; 32];
    for (byte, [high, low]) in bytes.iter_mut().zip(digits) {
        let digit =
            |character: u8| char::from(character).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let high = digit(*high).ok_or_else(refused)?;
        let low = digit(*low).ok_or_else(refused)?;
        *byte = high << 4 | low;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use fairlead_keys::PeerState;
    use proptest::prelude::*;

    use super::*;
    use crate::uapi::response::hexadecimal;

    fn config(prefixes: &[&str]) -> PeerConfig {
        PeerConfig {
            preshared_key: Some(PresharedKey([9; 32])),
            endpoint: Some("192.0.2.1:5".parse().unwrap()),
            persistent_keepalive: Some(25),
            allowed_ips: prefixes.iter().map(|prefix| prefix.parse().unwrap()).collect(),
        }
    }

    fn state(peers: &[(u8, PeerConfig)]) -> DeviceState {
        let peer = |config: &PeerConfig| PeerState { config: config.clone(), ..PeerState::default() };
        DeviceState {
            private_key: None,
            listen_port: 0,
            fwmark: 0,
            peers: peers.iter().map(|(number, config)| (PublicKey([*number; 32]), peer(config))).collect(),
        }
    }

    fn change(text: &str, state: &DeviceState) -> DeviceChange {
        let Request::Set(set) = parse(text).unwrap() else { panic!("{text}") };
        set.change(state)
    }

    #[test]
    fn device_lines_and_a_new_peer() {
        let (private, public) = (hexadecimal(&[1; 32]), hexadecimal(&[2; 32]));
        let text = format!(
            "set=1\nprivate_key={private}\nlisten_port=51820\nfwmark=0x20\npublic_key={public}\n\
             endpoint=[fd00::1]:51821\npersistent_keepalive_interval=25\nreplace_allowed_ips=true\n\
             allowed_ip=10.0.0.1/8\nallowed_ip=fd00::/64\nprotocol_version=1\n"
        );
        let change = change(&text, &state(&[]));
        assert_eq!(change.private_key, Some(PrivateKey([1; 32])));
        assert_eq!((change.listen_port, change.fwmark), (Some(51_820), Some(0x20)));
        let peer = &change.set_peers[&PublicKey([2; 32])];
        assert_eq!(peer.allowed_ips, ["10.0.0.0/8".parse::<IpNet>().unwrap(), "fd00::/64".parse().unwrap()]);
        assert_eq!(peer.endpoint, Some("[fd00::1]:51821".parse().unwrap()));
    }

    #[test]
    fn only_what_differs_is_sent_on() {
        let before = state(&[(1, config(&["10.0.0.0/8"])), (2, config(&["10.1.0.0/16"]))]);
        let public = hexadecimal(&[1; 32]);
        assert!(change(&format!("set=1\npublic_key={public}\nallowed_ip=10.0.0.0/8\n"), &before).is_empty());

        let moved = change(&format!("set=1\npublic_key={public}\nallowed_ip=10.1.0.0/16\n"), &before);
        assert_eq!(moved.set_peers[&PublicKey([1; 32])], config(&["10.0.0.0/8", "10.1.0.0/16"]));
        assert_eq!(moved.set_peers[&PublicKey([2; 32])].allowed_ips, []);

        let removed = change(&format!("set=1\npublic_key={public}\nremove=true\n"), &before);
        assert_eq!(removed.remove_peers, [PublicKey([1; 32])]);

        let shrunk = change(&format!("set=1\npublic_key={public}\nallowed_ip=-10.0.0.0/8\n"), &before);
        assert_eq!(shrunk.set_peers[&PublicKey([1; 32])].allowed_ips, []);
    }

    #[test]
    fn replacing_all_peers_removes_the_others_and_update_only_adds_none() {
        let before = state(&[(1, config(&[])), (2, config(&[]))]);
        let (first, third) = (hexadecimal(&[1; 32]), hexadecimal(&[3; 32]));
        let text =
            format!("set=1\nreplace_peers=true\npublic_key={first}\npublic_key={third}\nupdate_only=true\n");
        let change = change(&text, &before);
        assert_eq!(change.remove_peers, [PublicKey([2; 32])]);
        let replaced = &change.set_peers[&PublicKey([1; 32])];
        assert_eq!((replaced.preshared_key, replaced.persistent_keepalive), (None, None));
        assert_eq!(change.set_peers.len(), 1);
    }

    #[test]
    fn nonsense_is_refused_without_repeating_secrets() {
        for text in [
            "",
            "get=2",
            "set=1\nno equals sign",
            "set=1\nlisten_port=70000",
            "set=1\nendpoint=192.0.2.1:5",
            "set=1\nreplace_peers=false",
            "set=1\npublic_key=00",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        let secret = "x".repeat(64);
        assert!(!parse(&format!("set=1\nprivate_key={secret}")).unwrap_err().to_string().contains(&secret));
    }

    proptest! {
        #[test]
        fn hostile_text_never_panics(text in "(get|set)=1\n(([a-z_]{0,30}=.{0,70}|\\PC*)\n){0,8}") {
            if let Ok(Request::Set(set)) = parse(&text) {
                let _ = set.change(&state(&[(1, config(&["10.0.0.0/8"]))]));
            }
        }

        #[test]
        fn hostile_peer_lines_never_panic(lines in prop::collection::vec(
            ("remove|update_only|preshared_key|endpoint|persistent_keepalive_interval|replace_allowed_ips|allowed_ip",
             "true|-?[0-9./:]{0,20}|\\PC{0,70}"), 0..6)) {
            let mut text = format!("set=1\npublic_key={}\n", hexadecimal(&[1; 32]));
            for (name, value) in lines {
                text.push_str(&format!("{name}={value}\n"));
            }
            if let Ok(Request::Set(set)) = parse(&text) {
                let _ = set.change(&state(&[(1, config(&["10.0.0.0/8"]))]));
            }
        }

        #[test]
        fn keys_survive_writing_and_reading(bytes: [u8; 32]) {
            prop_assert_eq!(key(&hexadecimal(&bytes)).unwrap(), bytes);
        }
    }
}
