//! Targets of iptables that change marks, in iptables-nft's own form (`linux/netfilter/nf_tables_compat.h`).

use super::effect::MarkChange;

/// `XT_CONNMARK_RESTORE` (`linux/netfilter/xt_connmark.h`)
const CONNMARK_RESTORE: u8 = 2;

/// Change of the mark by a target of this name and revision; `None` if it changes none.
pub(super) fn target(name: &str, revision: u32, info: &[u8]) -> Option<MarkChange> {
    match (name, revision) {
        ("CONNMARK", revision @ (1 | 2)) => connection_mark(info, revision),
        ("MARK", 2) => mark(info),
        _ => None,
    }
}

/// `struct xt_mark_tginfo2` (`linux/netfilter/xt_mark.h`): mark and mask; the bits of the mask are cleared before those of the mark are inverted.
fn mark(info: &[u8]) -> Option<MarkChange> {
    Some(MarkChange { kept: !word(info, 4)?, set: word(info, 0)?, unknown: 0 })
}

/// `struct xt_connmark_tginfo1` and `_tginfo2` (`linux/netfilter/xt_connmark.h`): mark, mask of the connection's mark, mask of the packet's, then
/// in the second one the direction and the width of a shift, and the mode. `None` where it does not change the packet's mark.
fn connection_mark(info: &[u8], revision: u32) -> Option<MarkChange> {
    let (mode, shift) = if revision == 1 { (info.get(12)?, 0) } else { (info.get(14)?, *info.get(13)?) };
    let unknown = if shift == 0 { word(info, 4)? } else { u32::MAX };
    (*mode == CONNMARK_RESTORE).then_some(MarkChange { kept: !word(info, 8)?, set: 0, unknown })
}

pub(super) fn word(info: &[u8], offset: usize) -> Option<u32> {
    info.get(offset..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(name: &str, revision: u32, words: &[u32], rest: &[u8]) -> Option<MarkChange> {
        let info: Vec<u8> =
            words.iter().flat_map(|word| word.to_ne_bytes()).chain(rest.iter().copied()).collect();
        target(name, revision, &info)
    }

    #[test]
    fn targets_of_iptables_change_marks() {
        let mark = |kept, set, unknown| Some(MarkChange { kept, set, unknown });
        assert_eq!(change("MARK", 2, &[6, u32::MAX], &[]), mark(0, 6, 0));
        assert_eq!(change("MARK", 2, &[0x4000, 0x4000], &[]), mark(!0x4000, 0x4000, 0));
        let all = [0, u32::MAX, u32::MAX];
        assert_eq!(change("CONNMARK", 1, &all, &[CONNMARK_RESTORE, 0, 0, 0]), mark(0, 0, u32::MAX));
        assert_eq!(change("CONNMARK", 1, &all, &[1, 0, 0, 0]), None, "it saves the packet's mark");
        let some = [0, 0x3f00, 0x3f00];
        assert_eq!(change("CONNMARK", 2, &some, &[0, 0, CONNMARK_RESTORE, 0]), mark(!0x3f00, 0, 0x3f00));
        assert_eq!(change("CONNMARK", 2, &some, &[0, 4, CONNMARK_RESTORE, 0]), mark(!0x3f00, 0, u32::MAX));
        assert_eq!(change("MARK", 2, &[6], &[]), None);
        assert_eq!(change("TCPMSS", 0, &[1], &[]), None);
    }
}
