use proptest::prelude::*;

use super::{Header, REJECT_AFTER_MESSAGES, ReceiveKey, SendKey};
use crate::error::Error;

const KEY: [u8; 32] = [7; 32];

fn datagram(packet: &[u8]) -> Vec<u8> {
    [&[0xff; 16], packet, &[0xff; 16]].concat()
}

/// Makes a data message of the datagram, and returns its counter.
fn seal(key: &SendKey, datagram: &mut [u8]) -> Result<u64, Error> {
    let counter = key.assign_counter(datagram)?;
    key.encrypt(datagram)?;
    Ok(counter)
}

#[test]
fn a_data_message_has_the_form_of_the_paper() {
    let key = SendKey::new(&KEY, 0x0403_0201);
    let mut message = datagram(b"");
    assert_eq!(seal(&key, &mut message), Ok(0));
    assert_eq!(message[..16], [4, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(message.len(), 32, "a keepalive");
    assert_eq!(seal(&key, &mut message), Ok(1));
    assert_eq!(message[..16], [4, 0, 0, 0, 1, 2, 3, 4, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(key.messages(), 2);
}

/// RFC 8439 has no vector with an empty AAD and a nonce of WireGuard's form, so another implementation is the reference.
#[test]
fn the_cipher_is_that_of_the_rfc_with_the_counter_as_nonce() {
    use chacha20poly1305::aead::{AeadInPlace, KeyInit};
    let key = SendKey::new(&KEY, 1);
    key.set_messages(0x0123_4567_89ab_cdef);
    let mut message = datagram(&[5; 48]);
    seal(&key, &mut message).unwrap();

    let nonce = [0, 0, 0, 0, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01];
    let mut expected = [5; 48];
    let tag = chacha20poly1305::ChaCha20Poly1305::new(&KEY.into())
        .encrypt_in_place_detached(&nonce.into(), b"", &mut expected)
        .unwrap();
    assert_eq!(message[16..64], expected);
    assert_eq!(message[64..], tag[..]);
}

#[test]
fn a_used_up_counter_never_wraps_around() {
    let key = SendKey::new(&KEY, 1);
    key.set_messages(REJECT_AFTER_MESSAGES - 1);
    let mut message = datagram(b"");
    assert_eq!(seal(&key, &mut message), Ok(REJECT_AFTER_MESSAGES - 1));
    for _ in 0..20_000 {
        assert_eq!(seal(&key, &mut message), Err(Error::CounterExhausted));
    }
    assert_eq!(key.messages(), REJECT_AFTER_MESSAGES);
    assert_eq!(REJECT_AFTER_MESSAGES, 0xffff_ffff_ffff_dfff, "2^64 - 2^13 - 1");
}

#[test]
fn a_counter_encrypts_once_and_only_what_it_was_assigned_to() {
    let key = SendKey::new(&KEY, 1);
    let mut message = datagram(b"packet");
    for no_counter in [0, 0xff] {
        assert_eq!(key.encrypt(&mut [no_counter; 48]), Err(Error::Malformed));
    }
    let other = SendKey::new(&KEY, 2);
    other.assign_counter(&mut message).unwrap();
    assert_eq!(key.encrypt(&mut message), Err(Error::Malformed), "it has the counter of another session");
    seal(&key, &mut message).unwrap();
    let sent = message.clone();
    assert_eq!(key.encrypt(&mut message), Err(Error::Malformed));
    assert_eq!(message, sent, "and it stays as it was");
}

#[test]
fn messages_may_be_encrypted_in_another_order() {
    let (send, receive) = (SendKey::new(&KEY, 1), ReceiveKey::new(&KEY, 1));
    let mut messages = [datagram(b"first"), datagram(b"second")];
    for (counter, message) in (0..).zip(&mut messages) {
        assert_eq!(send.assign_counter(message), Ok(counter));
    }
    for (message, packet) in messages.iter_mut().zip([b"first".as_slice(), b"second"]).rev() {
        send.encrypt(message).unwrap();
        let decrypted = receive.decrypt(message).unwrap();
        assert_eq!((decrypted.index(), &message[decrypted.inner()]), (1, packet));
    }
}

#[test]
fn threads_that_share_a_key_never_use_a_counter_twice() {
    let key = SendKey::new(&KEY, 1);
    let count = || (0..2_000).map(|_| seal(&key, &mut datagram(b"")).unwrap()).collect::<Vec<_>>();
    let mut counters = std::thread::scope(|scope| {
        let threads = [(); 3].map(|()| scope.spawn(count));
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    counters.sort_unstable();
    assert_eq!(counters, (0..6_000).collect::<Vec<_>>());
}

#[test]
fn no_key_is_shown() {
    let shown = format!("{:?} {:?}", SendKey::new(&KEY, 1), ReceiveKey::new(&KEY, 2));
    assert_eq!(shown, "SendKey { remote_index: 1, messages: 0, .. } ReceiveKey { local_index: 2, .. }");
}

proptest! {
    #[test]
    fn what_is_sealed_is_opened(
        key in any::<[u8; 32]>(),
        packet in prop::collection::vec(any::<u8>(), 0..2_000),
        sent in 0..REJECT_AFTER_MESSAGES,
        index in any::<u32>(),
    ) {
        let send = SendKey::new(&key, index);
        send.set_messages(sent);
        let mut message = datagram(&packet);
        prop_assert_eq!(seal(&send, &mut message), Ok(sent));
        prop_assert_eq!(Header::of_kind(4, &message), Ok(Header { index, counter: sent }));
        let inner = ReceiveKey::new(&key, index).decrypt(&mut message).unwrap().inner();
        prop_assert_eq!(&message[inner], packet.as_slice());
    }

    #[test]
    fn a_changed_message_is_refused(
        packet in prop::collection::vec(any::<u8>(), 0..200),
        position in any::<prop::sample::Index>(),
        bit in 0..8_u8,
    ) {
        let mut message = datagram(&packet);
        seal(&SendKey::new(&KEY, 1), &mut message).unwrap();
        let position = position.index(message.len());
        message[position] ^= 1 << bit;
        let opened = ReceiveKey::new(&KEY, 1).decrypt(&mut message);
        match position {
            0..4 => prop_assert_eq!(opened, Err(Error::Malformed)),
            4..8 => prop_assert_eq!(opened, Err(Error::UnknownIndex)),
            _ => prop_assert_eq!(opened, Err(Error::Authentication)),
        }
    }

    #[test]
    fn hostile_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..100), data in any::<bool>()) {
        if data && bytes.len() >= 4 {
            bytes[..4].copy_from_slice(&[4, 0, 0, 0]);
        }
        prop_assert!(ReceiveKey::new(&KEY, 1).decrypt(&mut bytes).is_err());
        let room = bytes.len() >= 32;
        prop_assert_eq!(seal(&SendKey::new(&KEY, 1), &mut bytes).is_ok(), room);
    }
}
