//! Netlink attributes: type, length, value (`struct nlattr`, `linux/netlink.h`). Shared with [`crate::wireguard`].

use crate::{Error, Result};

/// `NLA_F_NESTED`: the value is attributes again.
const NESTED: u16 = 1 << 15;
/// `NLA_TYPE_MASK`: the type without the nesting and byte-order flags.
const TYPE_MASK: u16 = 0x3fff;
/// `struct nlattr` in bytes.
const HEADER: usize = 4;

/// Writes attributes behind a family's own header.
#[derive(Debug)]
pub(crate) struct AttributeWriter {
    bytes: Vec<u8>,
    oversized: Option<u16>,
}

impl AttributeWriter {
    /// Starts a payload with the family's header.
    pub(crate) fn new(header: &[u8]) -> Self {
        Self { bytes: header.to_vec(), oversized: None }
    }

    /// Adds an attribute with this value, padded to four bytes.
    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.open(kind, |inner| inner.bytes.extend_from_slice(value));
    }

    /// Adds a text with its terminating zero.
    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        self.open(kind, |inner| {
            inner.bytes.extend_from_slice(value.as_bytes());
            inner.bytes.push(0);
        });
    }

    /// Adds a number in network order, as nftables has them.
    pub(crate) fn be32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Adds several such numbers, each with its attribute.
    pub(crate) fn be32s(&mut self, values: &[(u16, u32)]) {
        values.iter().for_each(|(kind, value)| self.be32(*kind, *value));
    }

    /// Adds an attribute whose value is what `write` adds.
    pub(crate) fn nested(&mut self, kind: u16, write: impl FnOnce(&mut Self)) {
        self.open(kind | NESTED, write);
    }

    /// Adds attributes that another writer finished.
    pub(crate) fn raw(&mut self, attributes: &[u8]) {
        self.bytes.extend_from_slice(attributes);
    }

    /// The payload.
    ///
    /// # Errors
    /// [`Error::Invalid`] when an attribute outgrew the 65,535 bytes its length field can say.
    pub(crate) fn finish(self, what: &str) -> Result<Vec<u8>> {
        match self.oversized {
            None => Ok(self.bytes),
            Some(kind) => Err(Error::Invalid {
                what: what.to_owned(),
                reason: format!("attribute {kind} is longer than 65535 bytes; split the request"),
            }),
        }
    }

    fn open(&mut self, kind: u16, write: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; HEADER]);
        write(self);
        let length = self.bytes.len().saturating_sub(start);
        let Ok(field) = u16::try_from(length) else {
            self.oversized.get_or_insert(kind & TYPE_MASK);
            return;
        };
        let [length_low, length_high] = field.to_ne_bytes();
        let [kind_low, kind_high] = kind.to_ne_bytes();
        if let Some(header) = self.bytes.get_mut(start..start.saturating_add(HEADER)) {
            header.copy_from_slice(&[length_low, length_high, kind_low, kind_high]);
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Result of reading an answer. The error says why it cannot be read; it becomes [`Error::Malformed`] with the operation added.
pub(crate) type Parsed<T> = std::result::Result<T, &'static str>;

/// Reads attributes one after the other; the type comes without its flags.
pub(crate) fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes { rest: bytes }
}

/// See [`attributes`].
#[derive(Debug, Clone)]
pub(crate) struct Attributes<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Parsed<(u16, &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let taken = take(self.rest);
        self.rest = taken.map_or(&[], |(_, _, rest)| rest);
        Some(taken.map(|(kind, value, _)| (kind, value)).ok_or("a truncated attribute"))
    }
}

fn take(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let (kind, _) = rest.split_first_chunk::<2>()?;
    let length = usize::from(u16::from_ne_bytes(*length));
    let value = bytes.get(HEADER..length)?;
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((u16::from_ne_bytes(*kind) & TYPE_MASK, value, rest))
}

/// The first attribute of a type.
pub(crate) fn find(bytes: &[u8], wanted: u16) -> Parsed<Option<&[u8]>> {
    for attribute in attributes(bytes) {
        let (kind, value) = attribute?;
        if kind == wanted {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// The first attribute of a type, which has to be there.
pub(crate) fn require(bytes: &[u8], wanted: u16) -> Parsed<&[u8]> {
    find(bytes, wanted)?.ok_or("an attribute is missing")
}

/// A value of exactly `N` bytes.
pub(crate) fn array<const N: usize>(value: &[u8]) -> Parsed<[u8; N]> {
    value.try_into().map_err(|_| "an attribute has the wrong length")
}

/// A number in network order.
pub(crate) fn be32(value: &[u8]) -> Parsed<u32> {
    array(value).map(u32::from_be_bytes)
}

/// A text, with or without its terminating zero.
pub(crate) fn text(value: &[u8]) -> Parsed<&str> {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    std::str::from_utf8(value.get(..end).unwrap_or_default()).map_err(|_| "a name is not UTF-8")
}

/// Adds the operation to a reason.
pub(crate) fn explain<T>(what: &str, parsed: Parsed<T>) -> Result<T> {
    parsed.map_err(|reason| Error::Malformed { what: what.to_owned(), reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layout_is_the_kernels() {
        let mut writer = AttributeWriter::new(&[1, 0, 0, 0]);
        writer.text(1, "ab");
        writer.nested(2, |inner| inner.be32(3, 7));
        let bytes = writer.finish("test").unwrap();
        assert_eq!(bytes, [1, 0, 0, 0, 7, 0, 1, 0, b'a', b'b', 0, 0, 12, 0, 2, 0x80, 8, 0, 3, 0, 0, 0, 0, 7]);
        assert_eq!(text(require(&bytes[4..], 1).unwrap()), Ok("ab"));
        assert_eq!(be32(require(require(&bytes[4..], 2).unwrap(), 3).unwrap()), Ok(7));
    }

    #[test]
    fn too_long_is_an_error_that_names_the_attribute() {
        let mut writer = AttributeWriter::new(&[]);
        writer.nested(9, |inner| inner.bytes(1, &[0; 65532]));
        let error = writer.finish("add elements to set x").unwrap_err().to_string();
        assert!(error.contains("add elements to set x") && error.contains("attribute 1 "), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(values in proptest::collection::vec((0u16..0x3fff, proptest::collection::vec(any::<u8>(), 0..40)), 0..20)) {
            let mut writer = AttributeWriter::new(&[]);
            for (kind, value) in &values {
                writer.bytes(*kind, value);
            }
            let bytes = writer.finish("test").unwrap();
            let read: Vec<_> = attributes(&bytes).map(|a| a.map(|(k, v)| (k, v.to_vec()))).collect::<Parsed<_>>().unwrap();
            prop_assert_eq!(read, values);
        }

        #[test]
        fn garbage_ends(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(attributes(&bytes).count() <= bytes.len());
        }
    }
}
