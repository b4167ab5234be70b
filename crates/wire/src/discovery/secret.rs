//! Encryption with the secret of a cluster.

use std::fmt;
use std::net::SocketAddr;

use aes_gcm::aead::AeadInPlace as _;
use aes_gcm::aes::cipher::{BlockDecrypt as _, BlockEncrypt as _, KeyInit as _};
use aes_gcm::aes::{Aes256, Block};
use aes_gcm::{Aes256Gcm, Nonce, Tag};
use prost::Message as _;

use super::{MAX_DATA, MAX_ENDPOINT, address_bytes, parse_address, plaintext};

const NONCE: usize = 12;
const TAG: usize = 16;
const BLOCK: usize = 16;

/// The 32 bytes that all nodes of a cluster share. `Debug` does not show them.
///
/// Affiliates are encrypted with AES-256-GCM under a random nonce. Endpoints are encrypted block by block (ECB), so that a server
/// recognizes one that it has: that is the published protocol. They have no tag; a forged one is told only by its contents.
#[derive(Clone)]
pub struct ClusterSecret {
    data: Aes256Gcm,
    endpoints: Aes256,
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterSecret").finish_non_exhaustive()
    }
}

/// Reason why an encrypted blob cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum OpenError {
    /// The decrypted bytes mean nothing.
    #[error("it was not encrypted with the secret of this cluster, or is no endpoint")]
    Contents,
    /// The tag does not match.
    #[error("it was not encrypted with the secret of this cluster")]
    Decryption,
    /// No such blob has this length.
    #[error("its length is wrong")]
    Length,
}

impl ClusterSecret {
    /// Makes the ciphers from the secret's bytes.
    pub fn new(secret: [u8; 32]) -> Self {
        Self { data: Aes256Gcm::new(&secret.into()), endpoints: Aes256::new(&secret.into()) }
    }

    /// Encrypts an affiliate. The nonce is random, and different each time.
    ///
    /// # Errors
    /// The plaintext is too long for the protocol.
    pub fn seal_data(&self, nonce: [u8; NONCE], plaintext: &[u8]) -> Result<Vec<u8>, OpenError> {
        if plaintext.len() > MAX_DATA - NONCE - TAG {
            return Err(OpenError::Length);
        }
        let mut sealed = plaintext.to_vec();
        let tag = self.data.encrypt_in_place_detached(&Nonce::from(nonce), &[], &mut sealed);
        let tag = tag.map_err(|_| OpenError::Length)?;
        Ok([nonce.as_slice(), &sealed, &tag].concat())
    }

    /// The plaintext of an affiliate.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_data(&self, sealed: &[u8]) -> Result<Vec<u8>, OpenError> {
        if sealed.len() > MAX_DATA {
            return Err(OpenError::Length);
        }
        let (nonce, rest) = sealed.split_first_chunk::<NONCE>().ok_or(OpenError::Length)?;
        let (ciphertext, tag) = rest.split_last_chunk::<TAG>().ok_or(OpenError::Length)?;
        let mut plaintext = ciphertext.to_vec();
        let opened =
            self.data.decrypt_in_place_detached(&Nonce::from(*nonce), &[], &mut plaintext, &Tag::from(*tag));
        opened.map(|()| plaintext).map_err(|_| OpenError::Decryption)
    }

    /// Encrypts an endpoint, always to the same bytes: 16 for IPv4, 32 for IPv6.
    pub fn seal_endpoint(&self, endpoint: SocketAddr) -> Vec<u8> {
        let ip = address_bytes(endpoint.ip());
        let message = plaintext::Endpoint { ip, port: endpoint.port().into() }.encode_to_vec();
        // At most 2 + 16 + 4 bytes.
        let length = u8::try_from(message.len()).unwrap_or(u8::MAX);
        let padded = std::iter::once(length).chain(message);
        let mut sealed: Vec<u8> = padded.collect();
        sealed.resize(sealed.len().next_multiple_of(BLOCK), 0);
        let (blocks, _) = sealed.as_chunks_mut::<BLOCK>();
        for block in blocks {
            let mut work = Block::from(*block);
            self.endpoints.encrypt_block(&mut work);
            *block = work.into();
        }
        sealed
    }

    /// Decrypts an endpoint. Whether the address can be one of a peer is not judged here.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_endpoint(&self, sealed: &[u8]) -> Result<SocketAddr, OpenError> {
        if sealed.is_empty() || sealed.len() > MAX_ENDPOINT {
            return Err(OpenError::Length);
        }
        let (blocks, []) = sealed.as_chunks::<BLOCK>() else { return Err(OpenError::Length) };
        let mut opened = Vec::with_capacity(MAX_ENDPOINT);
        for block in blocks {
            let mut work = Block::from(*block);
            self.endpoints.decrypt_block(&mut work);
            opened.extend_from_slice(&work);
        }
        let (length, rest) = opened.split_first().ok_or(OpenError::Length)?;
        let message = rest.get(..usize::from(*length)).ok_or(OpenError::Contents)?;
        let message = plaintext::Endpoint::decode(message).map_err(|_| OpenError::Contents)?;
        let ip = parse_address(&message.ip).ok_or(OpenError::Contents)?;
        let port = u16::try_from(message.port).ok().filter(|port| *port != 0);
        Ok(SocketAddr::new(ip, port.ok_or(OpenError::Contents)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn secret() -> ClusterSecret {
        let mut bytes = [0; 32];
        bytes.iter_mut().zip(0..).for_each(|(byte, n)| *byte = n);
        ClusterSecret::new(bytes)
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Made with Go's `crypto/aes` and the published module `discovery-api` v0.1.8, under the secret 00 01 02 … 1f.
    const ENDPOINTS: [(&str, &str); 3] = [
        ("192.0.2.1:51820", "1945e54a18084c4f1c2a3e349c1f8fc8"),
        ("[2001:db8::1]:51820", "e2702633ca89239d5ee036a316dde237d604c19a74d2f45c1e624c2d38c4cca0"),
        ("10.0.0.1:1", "9ef584e6aac9eefb84dac582b332d2b8"),
    ];
    /// The plaintext `affiliate` under the nonce 00 01 … 0b, by Go's `crypto/cipher`.
    const DATA: &str = "000102030405060708090a0b2664b072a98ca36fe826c4fa3b73adb11ff0f06dc25b06a175";

    #[test]
    fn the_bytes_are_those_of_go() {
        for (endpoint, sealed) in ENDPOINTS {
            let bytes = secret().seal_endpoint(endpoint.parse().unwrap());
            assert_eq!(hex(&bytes), sealed, "{endpoint}");
            assert_eq!(secret().open_endpoint(&bytes), Ok(endpoint.parse().unwrap()));
        }
        let nonce = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
        let sealed = secret().seal_data(nonce, b"affiliate").unwrap();
        assert_eq!(hex(&sealed), DATA);
        assert_eq!(secret().open_data(&sealed).unwrap(), b"affiliate");
    }

    proptest! {
        #[test]
        fn what_is_encrypted_is_decrypted(
            ip: std::net::IpAddr,
            port in 1_u16..,
            nonce: [u8; 12],
            data in vec(any::<u8>(), 0..100),
        ) {
            let endpoint = SocketAddr::new(ip.to_canonical(), port);
            let sealed = secret().seal_endpoint(SocketAddr::new(ip, port));
            prop_assert_eq!(sealed.len(), if endpoint.is_ipv4() { 16 } else { 32 });
            prop_assert_eq!(secret().open_endpoint(&sealed), Ok(endpoint));
            let sealed = secret().seal_data(nonce, &data).unwrap();
            prop_assert_eq!(sealed.len(), data.len() + super::super::DATA_OVERHEAD);
            prop_assert_eq!(secret().open_data(&sealed), Ok(data));
        }

        #[test]
        fn hostile_blobs_are_errors(bytes in vec(any::<u8>(), 0..80)) {
            let _ = secret().open_endpoint(&bytes);
            prop_assert!(secret().open_data(&bytes).is_err());
        }

        #[test]
        fn a_changed_affiliate_is_refused(data in vec(any::<u8>(), 0..50), at: prop::sample::Index, bit in 0..8_u8) {
            let mut sealed = secret().seal_data([7; 12], &data).unwrap();
            let at = at.index(sealed.len());
            sealed[at] ^= 1 << bit;
            prop_assert_eq!(secret().open_data(&sealed), Err(OpenError::Decryption));
        }
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        for length in [0, 1, 15, 17, 33, 48, 64] {
            assert_eq!(secret().open_endpoint(&vec![0; length]), Err(OpenError::Length), "{length}");
        }
        for length in [0, 11, 27, MAX_DATA + 1] {
            assert_eq!(secret().open_data(&vec![0; length]), Err(OpenError::Length), "{length}");
        }
        assert_eq!(secret().seal_data([0; 12], &[0; MAX_DATA - 27]), Err(OpenError::Length));
        assert_eq!(secret().seal_data([0; 12], &[0; MAX_DATA - 28]).unwrap().len(), MAX_DATA);
    }

    #[test]
    fn an_endpoint_has_a_port_and_an_address() {
        let seal = |ip: &[u8], port| {
            let message = plaintext::Endpoint { ip: ip.to_vec(), port }.encode_to_vec();
            let mut block = [0; BLOCK];
            block[0] = u8::try_from(message.len()).unwrap();
            block[1..=message.len()].copy_from_slice(&message);
            let mut block = Block::from(block);
            secret().endpoints.encrypt_block(&mut block);
            block.to_vec()
        };
        assert!(secret().open_endpoint(&seal(&[10, 0, 0, 1], 1)).is_ok());
        for (ip, port) in [(&[10, 0, 0, 1][..], 0), (&[10, 0, 0, 1], 65_536), (&[10, 0, 0], 1), (&[], 1)] {
            assert_eq!(secret().open_endpoint(&seal(ip, port)), Err(OpenError::Contents));
        }
    }

    #[test]
    fn a_secret_is_not_shown() {
        assert_eq!(format!("{:?}", secret()), "ClusterSecret { .. }");
    }
}
