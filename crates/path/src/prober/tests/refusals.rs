use super::*;

/// A session that is in use, over a path that has just answered.
fn in_use() -> Bed {
    let mut bed = Bed::new(true, &[public(1), public(2)]);
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.session(public(1));
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.session(public(1));
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.requests();
    bed
}

#[test]
fn a_message_brings_the_next_request_forward_and_decides_nothing() {
    let mut bed = in_use();
    assert_eq!(bed.requests(), []);
    assert_eq!(bed.prober.unreachable(bed.now, public(1)), Hint::Check);
    let selected = bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    assert_eq!((selected, bed.prober.works(bed.now)), (vec![], true), "it was answered");
    // What is not answered is left, sooner than without.
    let [with, without] = [true, false].map(|is_told| {
        let mut bed = in_use();
        if is_told {
            bed.prober.unreachable(bed.now, public(1));
        }
        let start = bed.now;
        while bed.prober.select(bed.now).is_none() {
            for (to, id) in bed.requests() {
                if to == public(2) {
                    bed.prober.handle_answer(bed.now, to, id);
                }
            }
            bed.now += MILLISECOND;
            assert!(bed.now - start < 10 * SECOND);
        }
        bed.now - start
    });
    assert!(with + 500 * MILLISECOND <= without, "{with:?}, {without:?}");
}

#[test]
fn messages_about_other_addresses_and_floods_of_them_do_next_to_nothing() {
    let mut bed = in_use();
    for other in [public(2), public(9), private(1)] {
        assert_eq!(bed.prober.unreachable(bed.now, other), Hint::Ignore);
    }
    assert_eq!(bed.requests(), []);
    let mut under_way = Vec::new();
    let mut sent = 0;
    for _ in 0..1000 {
        bed.prober.unreachable(bed.now, public(1));
        let requests = bed.requests();
        sent += requests.len();
        under_way.extend(requests.into_iter().map(|(to, id)| (bed.now + 20 * MILLISECOND, to, id)));
        let now = bed.now;
        under_way.retain(|(at, to, id)| *at > now || !bed.prober.handle_answer(now, *to, *id));
        assert_eq!(bed.prober.select(bed.now), None);
        bed.now += MILLISECOND;
    }
    assert!(sent <= 5, "{sent}");
}

#[test]
fn an_idle_session_is_observed_and_not_asked() {
    let mut bed = in_use();
    bed.run(120 * SECOND, &[public(1)], MILLISECOND);
    assert_eq!(bed.prober.unreachable(bed.now, public(1)), Hint::Observe);
    assert_eq!(bed.requests(), []);
    assert_eq!(Prober::new(true).unreachable(bed.now, public(1)), Hint::Ignore, "no session");
}
