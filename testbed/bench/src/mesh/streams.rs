//! A client's end of an HTTP/2 connection (RFC 9113) with many watches, without I/O.
//!
//! A general client would cost more than the server that it is to measure. This one sends requests without compression of headers,
//! does not decode headers of answers (RFC 7541), and of each message it reads what the benchmark needs; of that, every byte of every watch.

use anyhow::{Result, bail};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
/// Before each message of gRPC: whether it is compressed, and its length.
const MESSAGE_HEADER: usize = 5;
/// Bytes that a server may send on a stream until the client reports them as read (RFC 9113, 6.9.2: the initial window). Reported at the half.
pub(super) const STREAM_WINDOW: u32 = 65_535;
/// The connection does not limit the sum of its streams.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
const PATH: &str = "/sidero.discovery.server.Cluster/Watch";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// A watch.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) cluster: usize,
    /// The beginning of a message whose rest is on its way.
    partial: Vec<u8>,
    /// Bytes that were read since the server was told.
    unreported: u32,
    /// Affiliates that it was told of.
    known: usize,
    /// Changes after the first `affiliates`.
    pub(super) changes: u64,
    /// The time at which the latest change that it saw was made.
    pub(super) latest: u64,
}

/// A connection. What it has to send is in `output`.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) streams: Vec<Stream>,
    opened: usize,
    /// Affiliates of each cluster: a watch that was told of so many has begun.
    affiliates: usize,
    input: Vec<u8>,
    pub(super) output: Vec<u8>,
    unreported: u32,
    /// When changes were made and seen, while `is_recording`.
    pub(super) samples: Vec<(u64, u64)>,
    pub(super) is_recording: bool,
    pub(super) messages: u64,
    pub(super) bytes: u64,
}

impl Connection {
    /// With watches of these clusters, to be opened.
    pub(super) fn new(clusters: impl Iterator<Item = usize>, affiliates: usize) -> Self {
        let mut output = PREFACE.to_vec();
        frame(&mut output, SETTINGS, 0, 0, &[]);
        let more = CONNECTION_WINDOW - STREAM_WINDOW;
        frame(&mut output, WINDOW_UPDATE, 0, 0, &more.to_be_bytes());
        let streams = clusters.map(|cluster| Stream { cluster, ..Default::default() }).collect();
        Self {
            streams,
            opened: 0,
            affiliates,
            input: Vec::new(),
            output,
            unreported: 0,
            samples: Vec::new(),
            is_recording: false,
            messages: 0,
            bytes: 0,
        }
    }

    /// Whether all watches were asked for.
    pub(super) fn is_open(&self) -> bool {
        self.opened >= self.streams.len()
    }

    /// Whether the watch that was asked for last has not been told of all affiliates yet.
    pub(super) fn is_opening(&self) -> bool {
        let last = self.opened.checked_sub(1).and_then(|last| self.streams.get(last));
        last.is_some_and(|stream| stream.known < self.affiliates)
    }

    /// Asks for the next watch.
    pub(super) fn open_next(&mut self, authority: &str) {
        let Some(stream) = self.streams.get(self.opened) else { return };
        let id = stream_id(self.opened);
        self.opened += 1;
        // RFC 7541: fields 3 (POST) and 6 (http) of the static table, then literals whose names are its 4, 1 and 31, and a name.
        let mut headers = vec![0x83, 0x86, 0x04];
        string(&mut headers, PATH);
        headers.push(0x01);
        string(&mut headers, authority);
        headers.extend([0x0f, 0x10]);
        string(&mut headers, "application/grpc");
        headers.push(0x00);
        string(&mut headers, "te");
        string(&mut headers, "trailers");
        frame(&mut self.output, HEADERS, END_HEADERS, id, &headers);
        let mut request = vec![0x0a];
        string(&mut request, &super::load::cluster(stream.cluster));
        let mut message = vec![0, 0, 0, 0, length(&request)];
        message.append(&mut request);
        frame(&mut self.output, DATA, END_STREAM, id, &message);
    }

    /// Handles bytes that the server sent; `now` is the time of their arrival.
    pub(super) fn receive(&mut self, bytes: &[u8], now: u64) -> Result<()> {
        self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        if self.input.is_empty() {
            let rest = self.frames(bytes, now)?.to_vec();
            self.input = rest;
        } else {
            let mut input = std::mem::take(&mut self.input);
            input.extend_from_slice(bytes);
            self.input = self.frames(&input, now)?.to_vec();
        }
        Ok(())
    }

    /// Reads whole frames; what is left is the beginning of one.
    fn frames<'a>(&mut self, mut bytes: &'a [u8], now: u64) -> Result<&'a [u8]> {
        while let Some((header, rest)) = bytes.split_first_chunk::<FRAME_HEADER>() {
            let [a, b, c, kind, flags, id @ ..] = *header;
            let length = u32::from_be_bytes([0, a, b, c]) as usize;
            let Some((payload, rest)) = rest.split_at_checked(length) else { break };
            self.frame(kind, flags, u32::from_be_bytes(id), payload, now)?;
            bytes = rest;
        }
        Ok(bytes)
    }

    fn frame(&mut self, kind: u8, flags: u8, id: u32, payload: &[u8], now: u64) -> Result<()> {
        match kind {
            DATA if flags & (END_STREAM | PADDED) == 0 => self.data(id, payload, now),
            HEADERS if flags & END_STREAM == 0 => Ok(()),
            DATA | HEADERS | RST_STREAM => bail!("the server ended watch {id} (frame {kind}, flags {flags})"),
            GOAWAY => bail!("the server ended the connection: {payload:?}"),
            SETTINGS if flags & ACK == 0 => {
                frame(&mut self.output, SETTINGS, ACK, 0, &[]);
                Ok(())
            }
            PING if flags & ACK == 0 => {
                frame(&mut self.output, PING, ACK, 0, payload);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn data(&mut self, id: u32, payload: &[u8], now: u64) -> Result<()> {
        let Some(stream) = self.streams.get_mut((id / 2) as usize) else { bail!("no stream {id}") };
        let read = u32::try_from(payload.len())?;
        stream.unreported = stream.unreported.saturating_add(read);
        self.unreported = self.unreported.saturating_add(read);
        if stream.unreported > STREAM_WINDOW / 2 {
            let read = std::mem::take(&mut stream.unreported);
            frame(&mut self.output, WINDOW_UPDATE, 0, id, &read.to_be_bytes());
        }
        if self.unreported > CONNECTION_WINDOW / 4 {
            let read = std::mem::take(&mut self.unreported);
            frame(&mut self.output, WINDOW_UPDATE, 0, 0, &read.to_be_bytes());
        }
        let (affiliates, is_recording, samples) = (self.affiliates, self.is_recording, &mut self.samples);
        let messages = stream.read(payload, |stream, made| {
            if stream.known < affiliates {
                stream.known += 1;
                return;
            }
            stream.changes = stream.changes.saturating_add(1);
            stream.latest = stream.latest.max(made);
            if is_recording {
                samples.push((made, now));
            }
        });
        self.messages = self.messages.saturating_add(messages);
        Ok(())
    }
}

impl Stream {
    /// Reads messages; how many are whole now. `see` is called with the time at which each affiliate in them was published.
    fn read(&mut self, payload: &[u8], mut see: impl FnMut(&mut Self, u64)) -> u64 {
        let mut partial = std::mem::take(&mut self.partial);
        let mut bytes = payload;
        if !partial.is_empty() {
            partial.extend_from_slice(payload);
            bytes = &partial;
        }
        let mut messages = 0_u64;
        while let Some((header, rest)) = bytes.split_first_chunk::<MESSAGE_HEADER>() {
            let [_, length @ ..] = *header;
            let Some((message, rest)) = rest.split_at_checked(u32::from_be_bytes(length) as usize) else {
                break;
            };
            messages = messages.saturating_add(1);
            Fields(message)
                .filter(|(number, _)| *number == 1)
                .for_each(|(_, affiliate)| see(self, made(affiliate)));
            bytes = rest;
        }
        self.partial = bytes.to_vec();
        messages
    }
}

/// The time that the data of an affiliate begins with.
fn made(affiliate: &[u8]) -> u64 {
    let data = Fields(affiliate).find(|(number, _)| *number == 2);
    data.and_then(|(_, data)| data.first_chunk().copied()).map_or(0, u64::from_be_bytes)
}

/// Fields of a protobuf message that have a length, by their numbers. Numbers are skipped; anything else ends it.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let tag = self.varint()?;
            match tag & 7 {
                0 => _ = self.varint()?,
                2 => {
                    let length = usize::try_from(self.varint()?).ok()?;
                    let (value, rest) = self.0.split_at_checked(length)?;
                    self.0 = rest;
                    return Some((tag >> 3, value));
                }
                _ => return None,
            }
        }
    }
}

fn stream_id(number: usize) -> u32 {
    u32::try_from(number).unwrap_or_default().saturating_mul(2).saturating_add(1)
}

/// Everything that is sent is short.
fn length(bytes: &[u8]) -> u8 {
    u8::try_from(bytes.len()).unwrap_or_default()
}

/// With its length before it, which is less than 127.
fn string(output: &mut Vec<u8>, text: &str) {
    output.push(length(text.as_bytes()));
    output.extend_from_slice(text.as_bytes());
}

fn frame(output: &mut Vec<u8>, kind: u8, flags: u8, id: u32, payload: &[u8]) {
    output.extend([0, 0, length(payload), kind, flags]);
    output.extend(id.to_be_bytes());
    output.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of two affiliates with `deleted`, in a frame for a watch.
    fn told(times: [u64; 2]) -> Vec<u8> {
        let affiliate = |made: u64| {
            let mut data = vec![0x0a, 1, b'a', 0x12, 8];
            data.extend(made.to_be_bytes());
            [vec![0x0a, length(&data)], data].concat()
        };
        let message = [affiliate(times[0]), vec![0x10, 1], affiliate(times[1])].concat();
        let message = [vec![0, 0, 0, 0, length(&message)], message].concat();
        let (first, second) = message.split_at(7);
        let mut output = Vec::new();
        frame(&mut output, DATA, 0, 1, first);
        frame(&mut output, PING, 0, 0, b"12345678");
        frame(&mut output, DATA, 0, 1, second);
        output
    }

    #[test]
    fn every_change_is_seen_however_bytes_arrive() {
        let bytes = [told([1, 2]), told([3, 4])].concat();
        for size in [1, 3, 20, 1_000] {
            let mut connection = Connection::new([0].into_iter(), 1);
            connection.is_recording = true;
            connection.open_next("localhost");
            assert!(connection.is_opening() && connection.is_open());
            connection.output.clear();
            for (now, part) in (10..).zip(bytes.chunks(size)) {
                connection.receive(part, now).unwrap();
            }
            let made: Vec<u64> = connection.samples.iter().map(|(made, _)| *made).collect();
            assert_eq!(made, [2, 3, 4], "after the first affiliate of the cluster, in pieces of {size}");
            assert_eq!((connection.messages, connection.streams[0].latest), (2, 4));
            assert!(!connection.is_opening());
            assert_eq!(connection.output.len(), 2 * (FRAME_HEADER + 8), "answers of pings");
        }
    }

    #[test]
    fn a_watch_that_ends_is_an_error() {
        for (kind, flags) in [(HEADERS, END_STREAM), (RST_STREAM, 0), (GOAWAY, 0), (DATA, END_STREAM)] {
            let mut bytes = Vec::new();
            frame(&mut bytes, kind, flags, 1, &[0; 8]);
            assert!(Connection::new([0].into_iter(), 1).receive(&bytes, 0).is_err());
        }
    }
}
