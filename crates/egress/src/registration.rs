//! Tokens by which a node program proves to a gateway which node it runs on (`fairlead_wire::egress`).
//!
//! It asks the API server for a token of its own ServiceAccount, bound to its pod, whose audience names the gateway's Egress and the
//! public key of the certificate that the gateway has just presented. The gateway has the API server review the token for this
//! audience. So a gateway cannot use the tokens that it receives at another one, and a server between both cannot use them at all.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::EgressName;

/// Longer tokens are refused unread. Those of Kubernetes have about 1 KiB.
pub const MAX_TOKEN: usize = 8 << 10;
/// Longest time for which a token counts, whatever it says: Kubernetes extends no token of a pod further.
pub const MAX_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Shortest time for which a token counts: a node program needs a moment to send another.
pub const MIN_LIFETIME: Duration = Duration::from_secs(60);

/// SHA-256 (FIPS 180-4) of the SubjectPublicKeyInfo of a certificate (RFC 5280, section 4.1), in DER.
pub type PublicKeyHash = [u8; 32];

/// The audience of tokens for a gateway of this Egress with this key.
pub fn audience(egress: &EgressName, key: &PublicKeyHash) -> String {
    let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("egress.coil.cybozu.com/{}/{}/{key}", egress.namespace, egress.name)
}

/// Claims of a token (RFC 7519); nothing is verified. `None` if the text is no token, or longer than [`MAX_TOKEN`].
pub fn claims(token: &str) -> Option<serde_json::Value> {
    let payload = token.split('.').nth(1).filter(|_| token.len() <= MAX_TOKEN)?;
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

/// Time for which a token that the API server has just accepted still counts, by its claims `iat` and `exp` (RFC 7519, section 4.1), at
/// `now` in seconds since the epoch. With a wrong clock here, at most as long as it was issued for, and at least [`MIN_LIFETIME`]. `None` if
/// it has no such claims.
pub fn lifetime(token: &str, now: u64) -> Option<Duration> {
    let (issued, expires) = issue(token)?;
    let whole = expires.saturating_sub(issued);
    // It has just been accepted: by a clock after its end, that clock is wrong and says nothing of what is left.
    let left = if now < expires { expires.saturating_sub(now).min(whole) } else { whole };
    Some(Duration::from_secs(left).clamp(MIN_LIFETIME, MAX_LIFETIME))
}

/// Lifetime of a token that was issued just now, whatever the clock here says. `None` as for [`lifetime`].
pub fn issued_for(token: &str) -> Option<Duration> {
    let (issued, expires) = issue(token)?;
    Some(Duration::from_secs(expires.saturating_sub(issued)))
}

/// Least error in seconds of a clock that shows `now` while the API server accepts the token: positive if it is ahead of the API server's,
/// negative if it is behind. Zero if by this clock the token was issued within [`MIN_LIFETIME`]; `None` if it shows neither, as an older
/// token does.
pub fn clock_error(token: &str, now: u64) -> Option<i64> {
    let (issued, expires) = issue(token)?;
    if now.abs_diff(issued) <= MIN_LIFETIME.as_secs() {
        return Some(0);
    }
    let error = match (now.checked_sub(expires), issued.checked_sub(now)) {
        (Some(ahead), _) => i64::try_from(ahead).ok()?,
        (None, Some(behind)) => i64::try_from(behind).ok()?.checked_neg()?,
        (None, None) => return None,
    };
    (error.unsigned_abs() > MIN_LIFETIME.as_secs()).then_some(error)
}

/// The claims `iat` and `exp`.
fn issue(token: &str) -> Option<(u64, u64)> {
    let claims = claims(token)?;
    let seconds = |claim| claims.get(claim)?.as_u64();
    Some((seconds("iat")?, seconds("exp")?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    #[test]
    fn a_token_counts_until_it_expires_whatever_the_clock_says() {
        let of = |now| lifetime(&token(r#"{"iat":1000,"exp":1600,"aud":["a"]}"#), now).unwrap().as_secs();
        assert_eq!([1000, 1100, 1590, 5000, 0].map(of), [600, 500, 60, 600, 600]);
        assert_eq!(lifetime(&token(r#"{"iat":0,"exp":18446744073709551615}"#), 0), Some(MAX_LIFETIME));
        for wrong in [r#"{"exp":1600}"#, r#"{"iat":"a","exp":1}"#, "[]", "", r#"{"iat":-1,"exp":1}"#] {
            assert_eq!(lifetime(&token(wrong), 0), None, "{wrong}");
        }
        assert_eq!(lifetime("opaque", 0), None);
        assert_eq!(
            lifetime(&token(&format!(r#"{{"iat":0,"exp":9,"a":"{}"}}"#, "a".repeat(MAX_TOKEN))), 0),
            None
        );
    }

    #[test]
    fn a_clock_that_no_valid_token_agrees_with_is_wrong() {
        let token = token(r#"{"iat":10000,"exp":13600}"#);
        let of = |now| clock_error(&token, now);
        assert_eq!([10_000, 10_060, 9_940].map(of), [Some(0); 3], "clocks differ a little");
        assert_eq!([10_061, 13_599, 13_660].map(of), [None; 3], "the token is older, or the clock is wrong");
        assert_eq!([17_200, 6_400].map(of), [Some(3600), Some(-3600)]);
        assert_eq!(issued_for(&token), Some(Duration::from_secs(3600)));
        assert_eq!((clock_error("opaque", 0), issued_for("opaque")), (None, None));
    }

    proptest! {
        #[test]
        fn no_token_counts_longer_than_a_day(token in "[A-Za-z0-9_.-]{0,80}", iat: u64, exp: u64, now: u64) {
            let _ = lifetime(&token, now);
            let token = super::tests::token(&format!(r#"{{"iat":{iat},"exp":{exp}}}"#));
            let _ = (clock_error(&token, now), issued_for(&token));
            let lifetime = lifetime(&token, now).unwrap();
            prop_assert!(lifetime >= MIN_LIFETIME && lifetime <= MAX_LIFETIME);
        }
    }

    #[test]
    fn an_audience_names_egress_and_key() {
        let egress = EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() };
        let mut key = [0; 32];
        key[..2].copy_from_slice(&[0x0a, 0xff]);
        let expected = format!("egress.coil.cybozu.com/internet-egress/nat/0aff{}", "00".repeat(30));
        assert_eq!(audience(&egress, &key), expected);
    }
}
