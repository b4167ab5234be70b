//! Randomness, which is an argument of everything that needs it.

/// A source of random bytes that are fit for keys.
pub trait Random {
    /// Overwrites all of `bytes` with random ones.
    fn fill(&mut self, bytes: &mut [u8]);
}

/// The cryptographic generator of AWS-LC, which the kernel seeds.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    /// Aborts the process if the generator fails. That happens only where the kernel refuses `getrandom(2)`, and no caller could
    /// go on: a predictable key would give the traffic away without any other sign.
    fn fill(&mut self, bytes: &mut [u8]) {
        if aws_lc_rs::rand::fill(bytes).is_err() {
            std::process::abort();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Bytes that are the same at every run, and different for every seed.
    pub(crate) struct Seeded(pub(crate) u64);

    impl Random for Seeded {
        fn fill(&mut self, bytes: &mut [u8]) {
            for byte in bytes {
                // SplitMix64.
                self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                *byte = ((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 56) as u8;
            }
        }
    }

    #[test]
    fn the_system_gives_other_bytes_every_time() {
        let mut bytes = [[0; 32]; 2];
        bytes.iter_mut().for_each(|bytes| SystemRandom.fill(bytes));
        assert_ne!(bytes[0], bytes[1]);
        assert!(bytes.iter().all(|bytes| *bytes != [0; 32]));
    }
}
