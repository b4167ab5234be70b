use std::collections::BTreeSet;

use proptest::prelude::*;

use super::ReplayWindow;

/// Words of a session of WireGuard, and those that it keeps once the next one is in use.
const WORDS: usize = 128;
const REDUCED_WORDS: usize = 32;
/// `REJECT_AFTER_MESSAGES` of WireGuard.
const END: u64 = u64::MAX - (1 << 13);

/// One more than the window, as in the kernel's self-test.
const LIMIT: u64 = 8_192 - 64 + 1;

fn expect(window: &mut ReplayWindow, counter: u64, accepted: bool) {
    assert_eq!(window.is_new(counter), accepted, "is_new({counter})");
    assert_eq!(window.check_and_record(counter), accepted, "check_and_record({counter})");
}

/// The sequence that the kernel's own test of its window uses (`drivers/net/wireguard/selftest/counter.c`).
#[test]
fn it_decides_as_the_kernel_does() {
    let mut window = ReplayWindow::new(WORDS, END);
    let sequence = [
        (0, true),
        (1, true),
        (1, false),
        (9, true),
        (8, true),
        (7, true),
        (7, false),
        (LIMIT, true),
        (LIMIT - 1, true),
        (LIMIT - 1, false),
        (LIMIT - 2, true),
        (2, true),
        (2, false),
        (LIMIT + 16, true),
        (3, false),
        (LIMIT + 16, false),
        (LIMIT * 4, true),
        (LIMIT * 4 - (LIMIT - 1), true),
        (10, false),
        (LIMIT * 4 - LIMIT, false),
        (LIMIT * 4 - (LIMIT + 1), false),
        (LIMIT * 4 - (LIMIT - 2), true),
        (LIMIT * 4 + 1 - LIMIT, false),
        (0, false),
        (END, false),
        (END - 1, true),
        (END, false),
        (END - 1, false),
        (END - 2, true),
        (END + 1, false),
        (END + 2, false),
        (END - 2, false),
        (END - 3, true),
        (0, false),
    ];
    for (counter, accepted) in sequence {
        expect(&mut window, counter, accepted);
    }
}

#[test]
fn a_whole_window_of_counters_is_accepted_in_either_order() {
    let window_size = LIMIT - 1;
    let rising = |from, to| (from..=to).collect::<Vec<u64>>();
    let falling = |from, to| (to..=from).rev().collect::<Vec<u64>>();
    for (counters, then) in [
        (rising(1, window_size), vec![(0, true), (0, false)]),
        (rising(2, window_size + 1), vec![(1, true), (0, false)]),
        (falling(window_size, 0), vec![]),
        (falling(window_size + 1, 1), vec![(0, false)]),
        (falling(window_size, 1), vec![(window_size + 1, true), (0, false)]),
        (falling(window_size, 1), vec![(0, true), (window_size + 1, true)]),
    ] {
        let mut window = ReplayWindow::new(WORDS, END);
        for counter in counters {
            expect(&mut window, counter, true);
        }
        for (counter, accepted) in then {
            expect(&mut window, counter, accepted);
        }
    }
}

#[test]
fn a_session_without_traffic_takes_no_kibibyte() {
    let mut window = ReplayWindow::new(WORDS, END);
    assert_eq!(window.words.len(), 0);
    expect(&mut window, 0, true);
    expect(&mut window, 511, true);
    assert_eq!(size_of_val(&*window.words), 64);
    expect(&mut window, u64::from(u32::MAX), true);
    assert_eq!(size_of_val(&*window.words), 1024);
    window.reduce(REDUCED_WORDS);
    assert_eq!(size_of_val(&*window.words), 256);
    expect(&mut window, u64::from(u32::MAX) + 1_000_000, true);
    assert_eq!(size_of_val(&*window.words), 256);
}

#[test]
fn a_jump_of_whole_rings_leaves_no_old_bits() {
    let mut window = ReplayWindow::new(WORDS, END);
    for counter in 0..8_192 {
        expect(&mut window, counter, true);
    }
    expect(&mut window, 8_192 * 3 - 1, true);
    for counter in 8_192 * 3 - 8_129..8_192 * 3 - 1 {
        expect(&mut window, counter, true);
    }
}

#[test]
fn a_reduced_window_remembers_the_newest_counters() {
    for greatest in [100, 2_047, 2_048, 5_000, 8_191, 8_192, 100_003] {
        let mut window = ReplayWindow::new(WORDS, END);
        for counter in (0..=greatest).filter(|counter| counter % 3 == greatest % 3) {
            expect(&mut window, counter, true);
        }
        window.reduce(REDUCED_WORDS);
        for counter in 0..=greatest {
            let accepted = greatest - counter <= 2_048 - 64 && counter % 3 != greatest % 3;
            expect(&mut window, counter, accepted);
        }
    }
}

#[test]
fn a_window_of_two_words_remembers_64_counters() {
    let mut window = ReplayWindow::new(2, u64::MAX);
    expect(&mut window, 1_000, true);
    expect(&mut window, 936, true);
    expect(&mut window, 935, false);
    expect(&mut window, 936, false);
    assert_eq!(window.words.len(), 2);
}

/// Model of the window, with a set instead of a ring.
#[derive(Default)]
struct Model {
    seen: BTreeSet<u64>,
    reduced: bool,
}

impl Model {
    fn accept(&mut self, counter: u64) -> bool {
        let size = (if self.reduced { REDUCED_WORDS } else { WORDS } as u64 - 1) * 64;
        let greatest = self.seen.last().copied().unwrap_or_default();
        let in_window = counter.saturating_add(size) >= greatest && counter < END;
        in_window && self.seen.insert(counter)
    }

    fn reduce(&mut self) {
        self.reduced = true;
    }
}

proptest! {
    #[test]
    fn no_counter_passes_twice_and_none_of_the_window_is_refused(
        steps in prop::collection::vec((prop_oneof![0..40_u64, 0..9_000_u64, 0..100_000_u64], any::<bool>()), 1..400),
        start in prop_oneof![Just(0), 0..20_000_u64, Just(END - 50_000), any::<u64>()],
        reduce_at in 0..800_usize,
    ) {
        let (mut window, mut model) = (ReplayWindow::new(WORDS, END), Model::default());
        let mut position = start;
        for (index, (distance, forward)) in steps.into_iter().enumerate() {
            if index == reduce_at {
                window.reduce(REDUCED_WORDS);
                model.reduce();
            }
            let counter = if forward {
                position = position.saturating_add(distance);
                position
            } else {
                position.saturating_sub(distance)
            };
            let accepted = model.accept(counter);
            prop_assert_eq!(window.is_new(counter), accepted, "counter {}", counter);
            prop_assert_eq!(window.check_and_record(counter), accepted, "counter {}", counter);
        }
    }
}
