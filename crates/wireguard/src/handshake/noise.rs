//! The handshake's Noise pattern on `snow`, with our keys and our randomness.
//!
//! The library asks a [`CryptoResolver`] for key pairs; this one answers with pairs that exist already, so that randomness is an
//! argument, public keys and shared secrets are computed once, and points of low order are refused.

use std::sync::{Arc, OnceLock};

use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, HandshakeState};
use zeroize::Zeroizing;

use crate::error::Error;
use crate::identity::KeyPair;

/// `CONSTRUCTION` of WireGuard paper 5.4.
const CONSTRUCTION: &str = "Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";
/// `IDENTIFIER` of WireGuard paper 5.4.
const IDENTIFIER: &[u8] = b"WireGuard v1 zx2c4 Jason@zx2c4.com";
/// Position at which the pattern mixes in the preshared key: the 2 of `psk2`.
const PSK_POSITION: usize = 2;

/// The keys that one side brings into a handshake.
pub(super) struct Keys {
    /// Our static pair.
    pub(super) local: Arc<KeyPair>,
    /// Our ephemeral pair, which must be there before the first message is written.
    pub(super) ephemeral: OnceLock<KeyPair>,
    /// The responder, if we initiate.
    pub(super) responder: Option<Responder>,
}

/// The responder as its initiator knows it.
pub(super) struct Responder {
    public: [u8; 32],
    /// Secret of our static pair and `public`.
    static_secret: Zeroizing<[u8; 32]>,
    /// Secret of our ephemeral pair and `public`.
    ephemeral_secret: Zeroizing<[u8; 32]>,
}

impl Responder {
    /// Computes the secrets with the responder of this public key.
    pub(super) fn new(public: [u8; 32], local: &KeyPair, ephemeral: &KeyPair) -> Result<Self, Error> {
        Ok(Self { public, static_secret: local.agree(public)?, ephemeral_secret: ephemeral.agree(public)? })
    }
}

/// A handshake in which nothing was written or read yet. Who initiates is who knows the responder.
pub(super) fn start(keys: &Arc<Keys>) -> Result<HandshakeState, Error> {
    let params = CONSTRUCTION.parse().map_err(refused)?;
    let builder = Builder::with_resolver(params, Box::new(Resolver(Arc::clone(keys))))
        .local_private_key(keys.local.private())
        .and_then(|builder| builder.prologue(IDENTIFIER))
        .map_err(refused)?;
    match &keys.responder {
        Some(responder) => {
            builder.remote_public_key(&responder.public).and_then(Builder::build_initiator).map_err(refused)
        }
        None => builder.build_responder().map_err(refused),
    }
}

/// Sets the preshared key, which is all zeros if there is none (WireGuard paper 5.4).
pub(super) fn set_psk(state: &mut HandshakeState, psk: Option<&[u8; 32]>) -> Result<(), Error> {
    state.set_psk(PSK_POSITION, psk.unwrap_or(&[0; 32])).map_err(refused)
}

/// Converts an error of the library. Its other errors are for wrong use only.
pub(super) fn refused(error: snow::Error) -> Error {
    match error {
        snow::Error::Decrypt => Error::Authentication,
        snow::Error::Dh => Error::LowOrderKey,
        _ => Error::Noise,
    }
}

struct Resolver(Arc<Keys>);

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(NoRandom))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        let dh = || Box::new(Curve25519 { keys: Arc::clone(&self.0), role: Role::Unset }) as Box<dyn Dh>;
        matches!(choice, DHChoice::Curve25519).then(dh)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}

/// Keys are drawn before the library needs them.
struct NoRandom;

impl Random for NoRandom {
    fn try_fill_bytes(&mut self, _: &mut [u8]) -> Result<(), snow::Error> {
        Err(snow::Error::Rng)
    }
}

/// One of our pairs: the library sets the static one and generates the ephemeral one.
struct Curve25519 {
    keys: Arc<Keys>,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Ephemeral,
    Static,
    Unset,
}

impl Curve25519 {
    fn pair(&self) -> Option<&KeyPair> {
        match self.role {
            Role::Ephemeral => self.keys.ephemeral.get(),
            Role::Static => Some(&self.keys.local),
            Role::Unset => None,
        }
    }

    fn agree(&self, public: [u8; 32]) -> Result<Zeroizing<[u8; 32]>, Error> {
        match &self.keys.responder {
            Some(responder) if responder.public == public && self.role == Role::Static => {
                Ok(responder.static_secret.clone())
            }
            Some(responder) if responder.public == public && self.role == Role::Ephemeral => {
                Ok(responder.ephemeral_secret.clone())
            }
            _ => self.pair().ok_or(Error::Noise)?.agree(public),
        }
    }
}

impl Dh for Curve25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    /// The key is that of [`Keys::local`]: [`start`] gives no other.
    fn set(&mut self, _: &[u8]) {
        self.role = Role::Static;
    }

    fn generate(&mut self, _: &mut dyn Random) -> Result<(), snow::Error> {
        self.role = Role::Ephemeral;
        self.pair().map(|_| ()).ok_or(snow::Error::Rng)
    }

    fn pubkey(&self) -> &[u8] {
        self.pair().map_or(&[0; 32], |pair| &pair.public)
    }

    fn privkey(&self) -> &[u8] {
        self.pair().map_or(&[0; 32], |pair| pair.private())
    }

    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let public = *public.first_chunk().ok_or(snow::Error::Dh)?;
        let secret = self.agree(public).map_err(|_| snow::Error::Dh)?;
        *out.first_chunk_mut().ok_or(snow::Error::Dh)? = *secret;
        Ok(())
    }
}
