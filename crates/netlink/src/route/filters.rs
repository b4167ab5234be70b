//! BPF classifiers at a link's clsact queueing discipline (`tc-bpf(8)`, `linux/pkt_cls.h`, `linux/pkt_sched.h`).
//!
//! These filters belong to the link and stay when the process that attached them ends. Attachments by TCX (`BPF_LINK_CREATE`)
//! are not made here.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;

use super::dumps::RouteSocket;
use crate::nftables::attributes::{AttributeWriter, Parsed, attributes};
use crate::{Error, Message, Result};

/// `struct tcmsg` in bytes.
const HEADER: usize = 20;
/// Offsets of `tcm_handle` and `tcm_info` in that header.
const HANDLE: std::ops::Range<usize> = 8..12;
const INFO: std::ops::Range<usize> = 16..20;
/// `TCA_KIND`, `TCA_OPTIONS` (`linux/rtnetlink.h`).
const KIND: u16 = 1;
const OPTIONS: u16 = 2;
/// `TCA_BPF_FD`, `TCA_BPF_NAME`, `TCA_BPF_FLAGS`, `TCA_BPF_ID` (`linux/pkt_cls.h`).
const BPF_FD: u16 = 6;
const BPF_NAME: u16 = 7;
const BPF_FLAGS: u16 = 8;
const BPF_ID: u16 = 11;
/// `TCA_BPF_FLAG_ACT_DIRECT`: what the program returns is the action.
const DIRECT_ACTION: u32 = 1;
/// `TC_H_CLSACT` as a parent, and as a handle without its minor number.
const CLSACT_PARENT: u32 = 0xffff_fff1;
const CLSACT_HANDLE: u32 = 0xffff_0000;

/// A hook of the clsact queueing discipline: `tcm_parent` (`TC_H_MIN_INGRESS`, `TC_H_MIN_EGRESS`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FilterHook {
    /// Packets that leave by the link.
    Egress,
    /// Packets that arrive on the link.
    Ingress,
}

impl FilterHook {
    fn parent(self) -> u32 {
        match self {
            Self::Egress => 0xffff_fff3,
            Self::Ingress => 0xffff_fff2,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        }
    }
}

/// Place of a filter. No two filters have the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FilterPlace {
    /// Index of the link.
    pub link: u32,
    /// Hook of the link.
    pub hook: FilterHook,
    /// Less comes first; 1 is the first.
    pub priority: u16,
    /// Number of the filter among those of one priority.
    pub handle: u32,
}

/// A BPF classifier that is attached to a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BpfFilter {
    /// Less comes first.
    pub priority: u16,
    /// Number of the filter among those of one priority.
    pub handle: u32,
    /// The name it was attached with.
    pub name: String,
    /// The kernel's ID of the program.
    pub program: u32,
}

/// Adds the clsact queueing discipline to a link; refused if the link has it, or the one named ingress.
///
/// # Errors
/// None that can occur: the attributes have a fixed length.
pub fn add_clsact(link: u32) -> Result<Message> {
    let what = format!("add the queueing discipline clsact to link {link}");
    let mut wire = AttributeWriter::new(&header(link, CLSACT_HANDLE, CLSACT_PARENT, 0));
    wire.text(KIND, "clsact");
    let flags = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
    Ok(Message { kind: libc::RTM_NEWQDISC, flags, payload: wire.finish(&what)?, what })
}

/// Attaches a BPF program in direct-action mode, for packets of all protocols. The filter of the same place is replaced
/// without a moment at which none is there.
///
/// The message holds the descriptor's number, so `program` must stay open until it is sent.
///
/// # Errors
/// The name is longer than an attribute can be.
pub fn set_bpf_filter(place: &FilterPlace, name: &str, program: BorrowedFd<'_>) -> Result<Message> {
    let what = format!("attach the BPF program {name} to {} of link {}", place.hook.name(), place.link);
    let mut wire = AttributeWriter::new(&place.header());
    wire.text(KIND, "bpf");
    wire.nested(OPTIONS, |options| {
        options.bytes(BPF_FD, &program.as_raw_fd().to_ne_bytes());
        options.text(BPF_NAME, name);
        options.bytes(BPF_FLAGS, &DIRECT_ACTION.to_ne_bytes());
    });
    let flags = libc::NLM_F_CREATE as u16;
    Ok(Message { kind: libc::RTM_NEWTFILTER, flags, payload: wire.finish(&what)?, what })
}

/// Detaches the BPF program of a place.
///
/// # Errors
/// None that can occur: the attributes have a fixed length.
pub fn delete_bpf_filter(place: &FilterPlace) -> Result<Message> {
    let what = format!("detach the BPF program at {} of link {}", place.hook.name(), place.link);
    let mut wire = AttributeWriter::new(&place.header());
    wire.text(KIND, "bpf");
    Ok(Message { kind: libc::RTM_DELTFILTER, flags: 0, payload: wire.finish(&what)?, what })
}

impl RouteSocket {
    /// The BPF classifiers at a hook of a link; none if the link does not exist or has no clsact queueing discipline.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn bpf_filters(&mut self, link: u32, hook: FilterHook) -> Result<Vec<BpfFilter>> {
        let what = format!("list the filters at {} of link {link}", hook.name());
        let payload = header(link, 0, hook.parent(), 0).to_vec();
        let request = Message { kind: libc::RTM_GETTFILTER, flags: 0, payload, what };
        let replies = self.dump(&request)?;
        let filters = replies.iter().filter(|reply| reply.kind == libc::RTM_NEWTFILTER);
        let decoded = filters.filter_map(|reply| filter(&reply.payload).transpose());
        decoded
            .collect::<Parsed<_>>()
            .map_err(|reason| Error::Malformed { what: request.what.clone(), reason: reason.to_owned() })
    }
}

impl FilterPlace {
    fn header(&self) -> [u8; HEADER] {
        // TC_H_MAKE of priority and protocol, the latter in network order.
        let protocol = u16::try_from(libc::ETH_P_ALL).unwrap_or_default().to_be();
        let info = u32::from(self.priority) << 16 | u32::from(protocol);
        header(self.link, self.handle, self.hook.parent(), info)
    }
}

/// `struct tcmsg`.
fn header(link: u32, handle: u32, parent: u32, info: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    let words = [0, link, handle, parent, info];
    for (word, at) in words.iter().zip(bytes.chunks_exact_mut(4)) {
        at.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// Number of BPF classifiers in a message.
pub(crate) fn count_filters(payload: &[u8]) -> Parsed<usize> {
    Ok(filter(payload)?.into_iter().count())
}

/// Reads `RTM_NEWTFILTER`; `None` is a classifier of another kind, or the head of a list of classifiers.
pub(super) fn filter(payload: &[u8]) -> Parsed<Option<BpfFilter>> {
    let word =
        |range| payload.get(range).and_then(|bytes: &[u8]| bytes.try_into().ok()).map(u32::from_ne_bytes);
    let (Some(handle), Some(info)) = (word(HANDLE), word(INFO)) else { return Err("a truncated filter") };
    let mut is_bpf = false;
    let mut name = String::new();
    let mut program = None;
    for attribute in attributes(payload.get(HEADER..).unwrap_or_default()) {
        match attribute? {
            (KIND, value) => is_bpf = value == b"bpf\0",
            (OPTIONS, value) => {
                for option in attributes(value) {
                    match option? {
                        (BPF_NAME, value) => {
                            name = String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
                        }
                        (BPF_ID, value) => {
                            program = Some(u32::from_ne_bytes(value.try_into().map_err(|_| "a program ID")?));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let priority = u16::try_from(info >> 16).unwrap_or_default();
    Ok(program.filter(|_| is_bpf).map(|program| BpfFilter { priority, handle, name, program }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;

    fn place() -> FilterPlace {
        FilterPlace { link: 7, hook: FilterHook::Egress, priority: 3, handle: 9 }
    }

    #[test]
    fn a_filter_has_the_layout_of_tc_bpf() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let message = set_bpf_filter(&place(), "fou", file.as_fd()).unwrap();
        assert_eq!(message.what, "attach the BPF program fou to egress of link 7");
        let mut expected = vec![0, 0, 0, 0];
        expected.extend([7u32, 9, 0xffff_fff3].iter().flat_map(|word| word.to_ne_bytes()));
        // ETH_P_ALL, 3, in network order in the lower half; the priority in the upper one.
        expected.extend((u32::from(3u16.to_be()) | 3 << 16).to_ne_bytes());
        assert_eq!(message.payload[..HEADER], expected);
        let read: Vec<_> = attributes(&message.payload[HEADER..]).map(Parsed::unwrap).collect();
        assert_eq!(read[0], (KIND, b"bpf\0".as_slice()));
        let options: Vec<_> = attributes(read[1].1).map(Parsed::unwrap).collect();
        let descriptor = file.as_raw_fd().to_ne_bytes();
        let one = 1u32.to_ne_bytes();
        assert_eq!(options, [(BPF_FD, &descriptor[..]), (BPF_NAME, b"fou\0"), (BPF_FLAGS, &one[..])]);
    }

    #[test]
    fn a_filter_comes_back_as_written() {
        let mut wire = AttributeWriter::new(&place().header());
        wire.text(KIND, "bpf");
        wire.nested(OPTIONS, |options| {
            options.text(BPF_NAME, "fou_egress");
            options.bytes(BPF_ID, &77u32.to_ne_bytes());
        });
        let read = filter(&wire.finish("test").unwrap()).unwrap();
        let name = "fou_egress".to_owned();
        assert_eq!(read, Some(BpfFilter { priority: 3, handle: 9, name, program: 77 }));
    }

    #[test]
    fn the_head_of_a_list_and_other_kinds_are_no_bpf_filter() {
        for kind in ["bpf", "u32"] {
            let mut wire = AttributeWriter::new(&place().header());
            wire.text(KIND, kind);
            if kind == "u32" {
                wire.nested(OPTIONS, |options| options.bytes(BPF_ID, &77u32.to_ne_bytes()));
            }
            assert_eq!(filter(&wire.finish("test").unwrap()), Ok(None), "{kind}");
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = filter(&bytes);
            let mut framed = place().header().to_vec();
            framed.extend(bytes);
            let _ = filter(&framed);
        }
    }
}
