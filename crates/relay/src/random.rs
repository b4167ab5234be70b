//! Random bytes that no other program can guess.

use std::io;

/// Random bytes from the cryptography library.
///
/// # Errors
/// The system gives no random bytes.
pub(crate) fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| io::Error::other("the system gives no random bytes"))?;
    Ok(bytes)
}
