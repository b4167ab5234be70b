use std::time::Duration;

use fairlead_keys::PrivateKey;
use proptest::prelude::*;

use super::*;
use crate::identity::tests::low_order_points;
use crate::message::{INITIATION_LENGTH, RESPONSE_LENGTH};
use crate::random::tests::Seeded;

const STAMP: Tai64n = Tai64n([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);

fn identity(number: u8) -> Identity {
    Identity::new(&PrivateKey([number; 32]))
}

/// Identity 1 initiates with identity 2.
fn initiation(seed: u64) -> (Initiator, Initiation) {
    initiate(&identity(1), &identity(2).public(), 0x1111_1111, STAMP, &mut Seeded(seed)).unwrap()
}

fn response(initiation: &[u8], psk: Option<&[u8; 32]>) -> (Response, SessionKeys) {
    let received = read_initiation(&identity(2), initiation).unwrap();
    received.respond(psk, 0x2222_2222, &mut Seeded(2)).unwrap()
}

fn assert_agree(initiator: &SessionKeys, responder: &SessionKeys) {
    assert_eq!((initiator.send, initiator.receive), (responder.receive, responder.send));
    assert_ne!(initiator.send, initiator.receive);
    assert_eq!(
        (initiator.local_index, initiator.remote_index),
        (responder.remote_index, responder.local_index)
    );
    assert!(initiator.is_initiator && !responder.is_initiator);
}

#[test]
fn both_sides_come_to_the_same_keys() {
    for psk in [None, Some([0; 32]), Some([7; 32])] {
        let (initiator, initiation) = initiation(1);
        let received = read_initiation(&identity(2), &initiation).unwrap();
        assert_eq!(
            (received.peer, received.timestamp, received.sender_index),
            (identity(1).public(), STAMP, 0x1111_1111)
        );
        let (response, responder) = received.respond(psk.as_ref(), 0x2222_2222, &mut Seeded(2)).unwrap();
        let keys = initiator.finish(&response, psk.as_ref()).unwrap();
        assert_agree(&keys, &responder);
        assert_eq!((initiator.index(), keys.remote_index), (keys.local_index, 0x2222_2222));
    }
}

/// WireGuard paper 5.4: a key of zeros is the same as none.
#[test]
fn a_preshared_key_of_zeros_is_none() {
    let (initiator, initiation) = initiation(1);
    let (response, responder) = response(&initiation, Some(&[0; 32]));
    assert_agree(&initiator.finish(&response, None).unwrap(), &responder);
}

/// WireGuard paper 5.4.2 and 5.4.3.
#[test]
fn messages_have_the_layout_of_the_paper() {
    let (_, initiation) = initiation(1);
    assert_eq!(
        (initiation.len(), &initiation[..8]),
        (INITIATION_LENGTH, &[1, 0, 0, 0, 0x11, 0x11, 0x11, 0x11][..])
    );
    let ephemeral = KeyPair::draw(&mut Seeded(1));
    assert_eq!(initiation[8..40], ephemeral.public);
    assert_eq!(initiation[116..], [0; 32]);
    let (response, _) = response(&initiation, None);
    let header = [2, 0, 0, 0, 0x22, 0x22, 0x22, 0x22, 0x11, 0x11, 0x11, 0x11];
    assert_eq!((response.len(), &response[..12]), (RESPONSE_LENGTH, &header[..]));
    assert_eq!(response[12..44], KeyPair::draw(&mut Seeded(2)).public);
    assert_eq!(response[60..], [0; 32]);
}

#[test]
fn another_responder_cannot_read_the_initiation() {
    let (_, initiation) = initiation(1);
    assert_eq!(read_initiation(&identity(3), &initiation).unwrap_err(), Error::Authentication);
}

#[test]
fn different_preshared_keys_do_not_finish() {
    let keys = [None, Some(&[7; 32]), Some(&[8; 32])];
    for (ours, theirs) in keys.iter().flat_map(|ours| keys.iter().map(move |theirs| (*ours, *theirs))) {
        let (initiator, initiation) = initiation(1);
        let (response, _) = response(&initiation, theirs);
        let finished = initiator.finish(&response, ours).map(|_| ());
        assert_eq!(finished, if ours == theirs { Ok(()) } else { Err(Error::Authentication) });
    }
}

#[test]
fn a_wrong_response_leaves_the_handshake_for_the_true_one() {
    let (initiator, first) = initiation(1);
    let (_, other) = initiation(9);
    let (true_response, responder) = response(&first, None);
    let (of_other, _) = response(&other, None);
    assert_eq!(initiator.finish(&of_other, None).unwrap_err(), Error::Authentication);
    let mut elsewhere = true_response;
    elsewhere[8] ^= 1;
    assert_eq!(initiator.finish(&elsewhere, None).unwrap_err(), Error::UnknownIndex);
    for point in low_order_points() {
        let mut low_order = true_response;
        low_order[12..44].copy_from_slice(&point);
        assert_eq!(initiator.finish(&low_order, None).unwrap_err(), Error::LowOrderKey);
    }
    assert_eq!(initiator.finish(&first, None).unwrap_err(), Error::Malformed);
    assert_eq!(initiator.finish(&true_response[..91], None).unwrap_err(), Error::Malformed);
    assert_agree(&initiator.finish(&true_response, None).unwrap(), &responder);
    // A copy leads to the same keys: the caller drops the initiator after the first.
    assert_agree(&initiator.finish(&true_response, None).unwrap(), &responder);
}

/// Without the responder's private key, the ephemeral key of its response is of no use to another host.
#[test]
fn a_host_that_only_saw_the_handshake_cannot_answer() {
    let (initiator, initiation) = initiation(1);
    let (mut response, _) = response(&initiation, None);
    response[12..44].copy_from_slice(&KeyPair::new([5; 32]).public);
    assert_eq!(initiator.finish(&response, None).unwrap_err(), Error::Authentication);
}

#[test]
fn a_peer_with_a_key_of_low_order_is_refused() {
    let refused = |point| initiate(&identity(1), &PublicKey(point), 1, STAMP, &mut Seeded(1)).unwrap_err();
    for point in low_order_points() {
        assert_eq!(refused(point), Error::LowOrderKey);
        let (_, mut initiation) = initiation(1);
        initiation[8..40].copy_from_slice(&point);
        assert_eq!(read_initiation(&identity(2), &initiation).unwrap_err(), Error::LowOrderKey);
    }
}

/// The initiator encrypts what it calls its static key, so the responder meets it only after the first tag was right.
#[test]
fn an_initiator_that_calls_itself_a_point_of_low_order_is_refused() {
    for point in low_order_points() {
        let mut local = KeyPair::new([1; 32]);
        local.public = point;
        let liar = Identity::of(local);
        let (_, initiation) = initiate(&liar, &identity(2).public(), 1, STAMP, &mut Seeded(1)).unwrap();
        assert_eq!(read_initiation(&identity(2), &initiation).unwrap_err(), Error::LowOrderKey);
    }
}

/// `tai64n_now` of `drivers/net/wireguard/noise.c`.
#[test]
fn time_stamps_are_of_tai_and_as_coarse_as_the_kernels() {
    let at = |nanoseconds| Tai64n::from(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds));
    assert_eq!(at(0).0, [0x40, 0, 0, 0, 0, 0, 0, 0x25, 0, 0, 0, 0]);
    assert_eq!(at(1_700_000_000_999_999_999).0, [0x40, 0, 0, 0, 0x65, 0x53, 0xf1, 0x25, 0x3b, 0, 0, 0]);
    assert_eq!(at((1 << 24) - 1), at(0));
    assert_eq!(at(1 << 24).0[8..], [1, 0, 0, 0]);
    assert_eq!(Tai64n::from(SystemTime::UNIX_EPOCH - Duration::from_secs(9)), at(0));
}

#[test]
fn debug_shows_no_secret() {
    let (initiator, initiation) = initiation(1);
    let received = read_initiation(&identity(2), &initiation).unwrap();
    let text = format!("{initiator:?} {received:?}");
    let (_, keys) = response(&initiation, None);
    let all = format!("{text} {keys:?}");
    for secret in [keys.send, keys.receive, [1; 32], [2; 32]] {
        assert!(!all.contains(&format!("{secret:?}")), "{all}");
    }
    assert!(all.contains("286331153") && all.contains("572662306"), "{all}");
}

#[test]
fn handshakes_can_move_between_threads() {
    fn assert_send<T: Send + Sync>() {}
    assert_send::<(Identity, Initiator, ReceivedInitiation, SessionKeys)>();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_keys_agree(one: [u8; 32], two: [u8; 32], psk: Option<[u8; 32]>, indexes: (u32, u32), seed: u64, stamp: [u8; 12]) {
        let (one, two) = (Identity::new(&PrivateKey(one)), Identity::new(&PrivateKey(two)));
        let mut random = Seeded(seed);
        let (initiator, initiation) =
            initiate(&one, &two.public(), indexes.0, Tai64n(stamp), &mut random).unwrap();
        let received = read_initiation(&two, &initiation).unwrap();
        prop_assert_eq!((received.peer, received.timestamp), (one.public(), Tai64n(stamp)));
        let (response, responder) = received.respond(psk.as_ref(), indexes.1, &mut random).unwrap();
        assert_agree(&initiator.finish(&response, psk.as_ref()).unwrap(), &responder);
    }

    /// The indexes are not in it: only `mac1` covers those.
    #[test]
    fn no_bit_of_a_message_can_be_changed(at in 0..(108 + 48) * 8_usize) {
        let (initiator, mut initiation) = initiation(1);
        let (byte, bit) = (at / 8, 1 << (at % 8));
        // The last bit of a public key is ignored in the computation (RFC 7748, 5), but hashed.
        if byte < 108 {
            initiation[8 + byte] ^= bit;
            prop_assert_eq!(read_initiation(&identity(2), &initiation).unwrap_err(), Error::Authentication);
        } else {
            let (mut response, _) = response(&initiation, None);
            response[12 + byte - 108] ^= bit;
            prop_assert_eq!(initiator.finish(&response, None).unwrap_err(), Error::Authentication);
        }
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0..4_u8) {
        let (initiator, _) = initiation(1);
        for length in [bytes.len(), INITIATION_LENGTH, RESPONSE_LENGTH] {
            let mut bytes = bytes.clone();
            bytes.resize(length, 0);
            bytes.iter_mut().zip([kind, 0, 0, 0]).for_each(|(to, from)| *to = from);
            prop_assert!(read_initiation(&identity(2), &bytes).is_err());
            prop_assert!(initiator.finish(&bytes, None).is_err());
        }
    }
}
