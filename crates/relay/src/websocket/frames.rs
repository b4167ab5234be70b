//! Frames (RFC 6455, section 5).

const FINAL: u8 = 0x80;
const MASKED: u8 = 0x80;
const OPCODE: u8 = 0x0f;
const RESERVED: u8 = 0x70;
const CONTINUATION: u8 = 0x0;
const BINARY: u8 = 0x2;
const CLOSE: u8 = 0x8;
const PING: u8 = 0x9;
const PONG: u8 = 0xa;
/// The longest payload of a control frame (section 5.5).
const MAX_CONTROL: u64 = 125;
/// Two bytes, eight of an extended length, four of the mask.
const MAX_HEADER: usize = 14;

/// An end of a WebSocket. Clients mask what they send, servers do not (section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The end that opened it.
    Client,
    /// The end that accepted it.
    Server,
}

/// Reason why a WebSocket cannot be used any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WebSocketError {
    /// A control frame is too long or in parts, or a continuation continues nothing.
    #[error("malformed WebSocket frame")]
    Malformed,
    /// A frame of a client without a mask, or one of a server with a mask.
    #[error("WebSocket frame with the mask of the other end")]
    Mask,
    /// Text, an extension, or an unknown kind of frame.
    #[error("WebSocket frame of kind {0:#x}, which relays do not use")]
    Unsupported(u8),
}

/// Signals that [`Decoder::decode`] found besides data.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signals {
    /// The payload of the last ping, which is to be answered with [`pong_frame`].
    pub ping: Option<Vec<u8>>,
    /// The other end closes; nothing behind it was read.
    pub closed: bool,
}

/// Takes payloads out of frames, however the bytes of these are divided. Keeps no payload but that of a control frame.
#[derive(Debug)]
pub struct Decoder {
    role: Role,
    header: [u8; MAX_HEADER],
    /// Bytes of the header that have come.
    header_length: usize,
    /// The frame whose payload comes now.
    frame: Option<Current>,
    /// A message has begun and not ended.
    in_message: bool,
}

#[derive(Debug)]
struct Current {
    opcode: u8,
    remaining: u64,
    mask: [u8; 4],
    /// Payload of a control frame.
    control: Vec<u8>,
}

impl Decoder {
    /// Makes a decoder for the end with this role.
    pub fn new(role: Role) -> Self {
        Self { role, header: [0; MAX_HEADER], header_length: 0, frame: None, in_message: false }
    }

    /// Appends the data in `bytes` to `out`.
    ///
    /// # Errors
    /// The other end does not follow the protocol, or uses what relays do not.
    pub fn decode(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) -> Result<Signals, WebSocketError> {
        let mut signals = Signals::default();
        loop {
            if self.frame.is_none() {
                let Some(rest) = self.read_header(bytes)? else { return Ok(signals) };
                bytes = rest;
            }
            let Some(mut frame) = self.frame.take() else { return Ok(signals) };
            let length = usize::try_from(frame.remaining).unwrap_or(usize::MAX).min(bytes.len());
            let (payload, rest) = bytes.split_at_checked(length).unwrap_or((bytes, &[]));
            bytes = rest;
            frame.take(payload, out);
            if frame.remaining > 0 {
                self.frame = Some(frame);
                return Ok(signals);
            }
            match frame.opcode {
                CLOSE => {
                    signals.closed = true;
                    return Ok(signals);
                }
                PING => signals.ping = Some(frame.control),
                _ => {}
            }
        }
    }

    /// Takes a header from `bytes` and returns the rest, or takes all and waits for more.
    fn read_header<'a>(&mut self, mut bytes: &'a [u8]) -> Result<Option<&'a [u8]>, WebSocketError> {
        while self.header_length < self.wanted_header() {
            let Some((first, rest)) = bytes.split_first() else { return Ok(None) };
            if let Some(slot) = self.header.get_mut(self.header_length) {
                *slot = *first;
            }
            self.header_length = self.header_length.saturating_add(1);
            bytes = rest;
        }
        self.frame = Some(self.parse_header()?);
        self.header_length = 0;
        Ok(Some(bytes))
    }

    /// Length of the header in bytes, as far as its bytes so far tell it.
    fn wanted_header(&self) -> usize {
        if self.header_length < 2 {
            return 2;
        }
        let [_, second, ..] = self.header;
        let extended = match second & !MASKED {
            126 => 2,
            127 => 8,
            _ => 0_usize,
        };
        let mask = if second & MASKED == 0 { 0 } else { 4_usize };
        2_usize.saturating_add(extended).saturating_add(mask)
    }

    fn parse_header(&mut self) -> Result<Current, WebSocketError> {
        let [first, second, a, b, c, d, e, f, g, h, w, x, y, z] = self.header;
        let (length, mask) = match second & !MASKED {
            126 => (u16::from_be_bytes([a, b]).into(), [c, d, e, f]),
            127 => (u64::from_be_bytes([a, b, c, d, e, f, g, h]), [w, x, y, z]),
            short => (short.into(), [a, b, c, d]),
        };
        let is_masked = second & MASKED != 0;
        if is_masked != (self.role == Role::Server) {
            return Err(WebSocketError::Mask);
        }
        let opcode = first & OPCODE;
        if first & RESERVED != 0 {
            return Err(WebSocketError::Unsupported(first));
        }
        let is_final = first & FINAL != 0;
        let in_message = self.in_message;
        match opcode {
            BINARY if !in_message => self.in_message = !is_final,
            CONTINUATION if in_message => self.in_message = !is_final,
            CLOSE | PING | PONG if is_final && length <= MAX_CONTROL => {}
            BINARY | CLOSE | CONTINUATION | PING | PONG => return Err(WebSocketError::Malformed),
            other => return Err(WebSocketError::Unsupported(other)),
        }
        let mask = if is_masked { mask } else { [0; 4] };
        Ok(Current { opcode, remaining: length, mask, control: Vec::new() })
    }
}

impl Current {
    /// Takes a part of the payload; control frames keep theirs.
    fn take(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        let is_data = matches!(self.opcode, BINARY | CONTINUATION);
        let target = if is_data { out } else { &mut self.control };
        let start = target.len();
        target.extend_from_slice(payload);
        if self.mask != [0; 4] {
            apply_mask(target.get_mut(start..).unwrap_or_default(), self.mask);
            self.mask.rotate_left(payload.len() % 4);
        }
        self.remaining = self.remaining.saturating_sub(u64::try_from(payload.len()).unwrap_or(u64::MAX));
    }
}

fn apply_mask(bytes: &mut [u8], mask: [u8; 4]) {
    let wide = u32::from_ne_bytes(mask);
    let (words, rest) = bytes.as_chunks_mut::<4>();
    for word in words {
        *word = (u32::from_ne_bytes(*word) ^ wide).to_ne_bytes();
    }
    for (byte, mask) in rest.iter_mut().zip(mask) {
        *byte ^= mask;
    }
}

/// One binary message with `data`; a client gives a random mask.
pub fn encode(data: &[u8], mask: Option<[u8; 4]>) -> Vec<u8> {
    frame(BINARY, data, mask)
}

/// The answer to a ping.
pub fn pong_frame(ping: &[u8], mask: Option<[u8; 4]>) -> Vec<u8> {
    frame(PONG, ping, mask)
}

/// The end of a WebSocket, without a reason.
pub fn close_frame(mask: Option<[u8; 4]>) -> Vec<u8> {
    frame(CLOSE, &[], mask)
}

fn frame(opcode: u8, data: &[u8], mask: Option<[u8; 4]>) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len().saturating_add(MAX_HEADER));
    let masked = if mask.is_some() { MASKED } else { 0 };
    out.push(FINAL | opcode);
    match (u8::try_from(data.len()), u16::try_from(data.len())) {
        (Ok(short @ ..126), _) => out.push(masked | short),
        (_, Ok(medium)) => {
            out.push(masked | 126);
            out.extend(medium.to_be_bytes());
        }
        _ => {
            out.push(masked | 127);
            out.extend(u64::try_from(data.len()).unwrap_or(u64::MAX).to_be_bytes());
        }
    }
    out.extend(mask.unwrap_or_default().get(..if mask.is_some() { 4 } else { 0 }).unwrap_or_default());
    let start = out.len();
    out.extend_from_slice(data);
    if let (Some(mask), Some(payload)) = (mask, out.get_mut(start..)) {
        apply_mask(payload, mask);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];

    fn decoded(role: Role, bytes: &[u8]) -> Result<(Vec<u8>, Signals), WebSocketError> {
        let mut out = Vec::new();
        let signals = Decoder::new(role).decode(bytes, &mut out)?;
        Ok((out, signals))
    }

    #[test]
    fn frames_are_those_of_the_rfc() {
        // Section 5.7, with binary messages instead of text.
        assert_eq!(encode(b"Hello", None), b"\x82\x05Hello");
        assert_eq!(encode(b"Hello", Some(MASK)), b"\x82\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58");
        assert_eq!(encode(&[0; 256], None)[..4], [0x82, 0x7e, 1, 0]);
        assert_eq!(encode(&[0; 65536], None)[..10], [0x82, 0x7f, 0, 0, 0, 0, 0, 1, 0, 0]);
        let pong = b"\x8a\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58";
        assert_eq!(pong_frame(b"Hello", Some(MASK)), pong);
        assert_eq!(close_frame(None), [0x88, 0]);
    }

    #[test]
    fn fragments_are_joined_and_control_frames_between_them_are_told() {
        let bytes = [
            &b"\x02\x03Hel"[..],
            b"\x89\x02hi",
            b"\x80\x02lo",
            b"\x8a\x00",
            b"\x88\x02\x03\xe8",
            b"\x82\x01x",
        ];
        let (data, signals) = decoded(Role::Client, &bytes.concat()).unwrap();
        assert_eq!(data, b"Hello");
        assert_eq!(signals, Signals { ping: Some(b"hi".to_vec()), closed: true });
    }

    #[test]
    fn what_relays_do_not_use_is_refused() {
        for (bytes, error) in [
            (&b"\x81\x01x"[..], WebSocketError::Unsupported(1)),
            (b"\xc2\x01x", WebSocketError::Unsupported(0xc2)),
            (b"\x80\x01x", WebSocketError::Malformed),
            (b"\x09\x00", WebSocketError::Malformed),
            (b"\x89\x7e\x00\x7e", WebSocketError::Malformed),
            (b"\x02\x00\x82\x00", WebSocketError::Malformed),
            (b"\x82\x81\x00\x00\x00\x00x", WebSocketError::Mask),
        ] {
            assert_eq!(decoded(Role::Client, bytes).unwrap_err(), error, "{bytes:02x?}");
        }
        assert_eq!(decoded(Role::Server, b"\x82\x01x").unwrap_err(), WebSocketError::Mask);
    }

    proptest! {
        #[test]
        fn data_survives_any_division(
            messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..5),
            mask in any::<Option<[u8; 4]>>(),
            step in 1_usize..50,
        ) {
            let stream: Vec<u8> = messages.iter().flat_map(|message| encode(message, mask)).collect();
            let role = if mask.is_some() { Role::Server } else { Role::Client };
            let (mut decoder, mut out) = (Decoder::new(role), Vec::new());
            for part in stream.chunks(step) {
                prop_assert_eq!(decoder.decode(part, &mut out).unwrap(), Signals::default());
            }
            prop_assert_eq!(out, messages.concat());
        }

        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100), server in any::<bool>()) {
            let role = if server { Role::Server } else { Role::Client };
            if let Ok((data, signals)) = decoded(role, &bytes) {
                prop_assert!(data.len() + signals.ping.map_or(0, |ping| ping.len()) <= bytes.len());
            }
        }
    }
}
