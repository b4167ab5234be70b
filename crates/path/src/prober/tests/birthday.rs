//! Paths that birthday attempts have found.

use super::*;

/// The node behind the port-restricted NAT finds another port, the one behind the symmetric NAT the same endpoint by another socket.
#[test]
fn a_session_whose_path_failed_moves_at_once_to_what_an_attempt_found_and_to_nothing_else() {
    let lost = public(1);
    for found in [lost, public(2)] {
        let mut bed = relayed(true, &[lost]);
        bed.run(SECOND, &[lost], 20 * MILLISECOND);
        bed.session(lost);
        let selected = bed.run(4 * SECOND, &[RELAY], 20 * MILLISECOND);
        assert_eq!(selected, [(RELAY, EndpointReason::PathFailed)]);
        bed.session(RELAY);
        bed.prober.network_changed(bed.now);
        assert_eq!(bed.run(SECOND, &[RELAY, lost], 20 * MILLISECOND), [], "the path may fail again");
        bed.prober.add_found(bed.now, found);
        let selected = bed.run(SECOND / 2, &[RELAY, found], 20 * MILLISECOND);
        assert_eq!(selected, [(found, EndpointReason::BetterPath)]);
    }
}
