//! Values: an affiliate as it is in etcd. Who may write to etcd may write anything, so everything is checked.

use std::time::Duration;

use fairlead_wire::discovery::{address_bytes, parse_address};
use prost::Message;
use prost::bytes::Bytes;

use crate::core::{Refusal, SharedAffiliate, Source, Stored};

const VERSION: u32 = 1;

/// Times to live, in milliseconds, count from the write.
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(bytes = "bytes", tag = "2")]
    data: Bytes,
    #[prost(uint64, tag = "3")]
    ttl: u64,
    #[prost(message, repeated, tag = "4")]
    endpoints: Vec<ValueEndpoint>,
    /// The address of the client that created the affiliate: 4 or 16 bytes, or none.
    #[prost(bytes = "bytes", tag = "5")]
    source: Bytes,
    /// Age of the lease at the write, in milliseconds.
    #[prost(uint64, tag = "6")]
    lease_age: u64,
}

#[derive(Clone, PartialEq, Message)]
struct ValueEndpoint {
    #[prost(bytes = "bytes", tag = "1")]
    sealed: Bytes,
    #[prost(uint64, tag = "2")]
    ttl: u64,
}

/// Reason why a key or value in etcd is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The key is none of an affiliate.
    #[error("the key is not that of an affiliate")]
    Key,
    /// Without a lease etcd would keep it although its replica and its client are gone.
    #[error("the key has no lease, or one that is over")]
    Lease,
    /// The value is more than this server accepts from clients.
    #[error("{0}")]
    Limit(Refusal),
    /// The value is not readable.
    #[error("the value cannot be decoded")]
    Value,
    /// A newer program wrote it.
    #[error("the value has a version that this program does not know")]
    Version,
}

impl Rejection {
    /// All of their values in metrics.
    pub(super) const LABELS: [&str; 5] = ["key", "lease", "limit", "value", "version"];

    /// Value of the reason's label in metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Lease => "lease",
            Self::Limit(_) => "limit",
            Self::Value => "value",
            Self::Version => "version",
        }
    }
}

/// The value of an affiliate that is attached to a lease of this age.
pub(super) fn encode(affiliate: &SharedAffiliate, lease_age: Duration) -> Vec<u8> {
    let stored = &affiliate.stored;
    let endpoints = stored.endpoints.iter();
    let value = Value {
        version: VERSION,
        data: stored.data.clone(),
        ttl: milliseconds(stored.ttl),
        endpoints: endpoints
            .map(|(sealed, ttl)| ValueEndpoint { sealed: sealed.clone(), ttl: milliseconds(*ttl) })
            .collect(),
        source: affiliate.source.ip().map(address_bytes).unwrap_or_default().into(),
        lease_age: milliseconds(lease_age),
    };
    value.encode_to_vec()
}

/// Reads the value of an affiliate whose lease is that old now. One whose time is over has a time to live of zero.
pub(super) fn decode(
    (cluster, affiliate): (String, String),
    value: Bytes,
    lease_age: Duration,
) -> Result<SharedAffiliate, Rejection> {
    let value = Value::decode(value).map_err(|_| Rejection::Value)?;
    if value.version != VERSION {
        return Err(Rejection::Version);
    }
    let source = match (value.source.is_empty(), parse_address(&value.source)) {
        (true, _) => Source::unknown(),
        (false, Some(ip)) => Source::of(ip),
        (false, None) => return Err(Rejection::Value),
    };
    let since = milliseconds(lease_age).saturating_sub(value.lease_age);
    let left = |ttl: u64| Duration::from_millis(ttl.saturating_sub(since));
    let endpoints = value.endpoints.into_iter().filter(|endpoint| endpoint.ttl > since);
    let stored = Stored {
        cluster: cluster.into(),
        affiliate: affiliate.into(),
        data: value.data,
        ttl: left(value.ttl),
        endpoints: endpoints.map(|endpoint| (endpoint.sealed, left(endpoint.ttl))).collect(),
    };
    Ok(SharedAffiliate { stored, source })
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;
    use crate::core::{Discovery, Limits};

    const SECOND: Duration = Duration::from_secs(1);

    fn name() -> (String, String) {
        ("c".to_owned(), "a".to_owned())
    }

    fn affiliate() -> SharedAffiliate {
        let endpoint = |n: u8, seconds: u32| (Bytes::from(vec![n; 16]), seconds * SECOND);
        let stored = Stored {
            cluster: "c".into(),
            affiliate: "a".into(),
            data: Bytes::from_static(b"data"),
            ttl: 60 * SECOND,
            endpoints: vec![endpoint(1, 60), endpoint(2, 10)],
        };
        SharedAffiliate { stored, source: Source::of("2001:db8::1".parse().unwrap()) }
    }

    #[test]
    fn what_is_written_is_read_with_what_is_left_of_its_time() {
        let value: Bytes = encode(&affiliate(), 40 * SECOND).into();
        let read = |age: u32| decode(name(), value.clone(), age * SECOND).unwrap();
        assert_eq!(read(40), affiliate());
        assert_eq!(read(0), affiliate(), "etcd has extended the lease");
        let mut later = affiliate();
        later.stored.ttl = 40 * SECOND;
        later.stored.endpoints = vec![(Bytes::from(vec![1; 16]), 40 * SECOND)];
        assert_eq!(read(60), later);
        assert_eq!(read(1000).stored.ttl, Duration::ZERO);
    }

    /// Values that replicas of commit 5a83802c write: an affiliate whose client is known, and one without anything.
    const KEPT: &str = include_str!("../../../fixtures/5a83802c/etcd-values.txt");

    #[test]
    fn values_are_as_they_were() {
        let bare = Stored { data: Bytes::new(), ttl: SECOND, endpoints: Vec::new(), ..affiliate().stored };
        let bare = SharedAffiliate { stored: bare, source: Source::unknown() };
        let mut written = String::new();
        for (affiliate, age) in [(affiliate(), 40 * SECOND), (bare, Duration::ZERO)] {
            let value = encode(&affiliate, age);
            let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
            written.push_str(&format!("{hex}\n"));
            assert_eq!(decode(name(), value.into(), age), Ok(affiliate));
        }
        assert_eq!(written, KEPT);
    }

    proptest! {
        /// Neither the codec nor the core panics, and what is not acceptable changes nothing.
        #[test]
        fn hostile_values_are_left_out(value in proptest::collection::vec(any::<u8>(), 0..200), age in any::<u64>()) {
            let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
            if let Ok(affiliate) = decode(name(), value.into(), Duration::from_millis(age))
                && discovery.adopt(&affiliate, 7, now).is_err()
            {
                prop_assert_eq!(discovery.totals(), crate::core::Totals::default());
            }
        }
    }

    #[test]
    fn values_that_are_none_have_a_reason() {
        let value = |change: &dyn Fn(&mut Value)| {
            let mut value = Value::decode(encode(&affiliate(), SECOND).as_slice()).unwrap();
            change(&mut value);
            decode(name(), value.encode_to_vec().into(), SECOND)
        };
        assert_eq!(value(&|value| value.version = 2), Err(Rejection::Version));
        assert_eq!(value(&|value| value.source = Bytes::from_static(b"abc")), Err(Rejection::Value));
        assert_eq!(decode(name(), Bytes::from_static(b"\xff"), SECOND), Err(Rejection::Value));
        for refused in [
            value(&|value| value.data = vec![0; 2049].into()),
            value(&|value| value.ttl = u64::MAX),
            value(&|value| value.endpoints = vec![ValueEndpoint { sealed: vec![1; 17].into(), ttl: 9000 }]),
            value(&|value| {
                value.endpoints = vec![ValueEndpoint { sealed: vec![1; 16].into(), ttl: 9000 }; 65]
            }),
            value(&|value| {
                value.endpoints = vec![ValueEndpoint { sealed: vec![1; 16].into(), ttl: u64::MAX }]
            }),
        ] {
            let mut discovery = Discovery::new(Limits::default());
            let outcome = discovery.adopt(&refused.unwrap(), 7, Instant::now());
            let refusal = outcome.expect_err("it is not acceptable");
            assert!(Rejection::LABELS.contains(&Rejection::Limit(refusal).label()));
            assert_eq!(discovery.totals().affiliates, 0);
        }
    }
}
