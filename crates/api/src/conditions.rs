//! Conditions in the status of objects, as Kubernetes's API conventions define them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Content of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding<'a> {
    /// Type of the condition, unique in an object.
    pub type_: &'a str,
    /// Whether it is true.
    pub holds: bool,
    /// Reason, as one CamelCase word.
    pub reason: &'a str,
    /// Reason, as a sentence.
    pub message: String,
}

/// Condition of pools and of the mesh: whether something else uses addresses that Fairlead hands out. Also a reason of it, and of the Event.
pub const RANGE_IN_USE: &str = "RangeInUse";
/// Reason of that condition: only the networks of pods in `spec.podCIDRs` of Nodes share addresses, which another network plugin may assign.
pub const RANGE_OF_POD_CIDRS: &str = "RangeOfPodCIDRs";
/// Reason of that condition: the range lies within a wider one of a Peer or of hosts beside a Node, of which no host may have its addresses.
pub const RANGE_WITHIN_WIDER: &str = "RangeWithinWider";

/// The condition of an object of this generation that has these `present` conditions. `lastTransitionTime` changes only with
/// the status.
pub fn condition(
    present: &[Condition],
    finding: Finding<'_>,
    observed_generation: Option<i64>,
    now: Time,
) -> Condition {
    let status = if finding.holds { "True" } else { "False" };
    let is_same = |before: &&Condition| before.type_ == finding.type_ && before.status == status;
    let before = present.iter().find(is_same);
    Condition {
        type_: finding.type_.to_owned(),
        status: status.to_owned(),
        reason: finding.reason.to_owned(),
        message: shortened(finding.message),
        observed_generation,
        last_transition_time: before.map_or(now, |before| before.last_transition_time.clone()),
    }
}

/// Whether a condition needs an Event: it has become true, or true for the reason `worst` after another one.
pub fn is_news(present: &[Condition], condition: &Condition, worst: &str) -> bool {
    let before = present.iter().find(|before| before.type_ == condition.type_ && before.status == "True");
    let is_worse = |before: &Condition| before.reason != condition.reason && condition.reason == worst;
    condition.status == "True" && before.is_none_or(is_worse)
}

/// Most bytes of a message. The schema counts characters, of which there are no more.
pub const MAX_CONDITION_MESSAGE: usize = 8192;

/// Cuts a message at a character: the API server would refuse the whole status.
fn shortened(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(MAX_CONDITION_MESSAGE));
    message
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn a_message_that_is_too_long_is_cut_at_a_character() {
        assert_eq!(shortened("short".to_owned()), "short");
        let long = format!("x{}", "ü".repeat(MAX_CONDITION_MESSAGE));
        assert_eq!(shortened(long).len(), MAX_CONDITION_MESSAGE - 1);
    }

    #[test]
    fn what_becomes_true_or_worse_is_news_and_what_becomes_better_is_none() {
        let of = |type_, holds, reason| {
            let finding = Finding { type_, holds, reason, message: String::new() };
            condition(&[], finding, None, Time(Timestamp::UNIX_EPOCH))
        };
        let [free, perhaps, certain] = [(false, "Free"), (true, "Perhaps"), (true, "Certain")]
            .map(|(holds, reason)| of("InUse", holds, reason));
        let other = of("Other", true, "Certain");
        for (before, now, expected) in [
            (&other, &free, false),
            (&other, &perhaps, true),
            (&free, &certain, true),
            (&perhaps, &perhaps, false),
            (&perhaps, &certain, true),
            (&certain, &certain, false),
            (&certain, &perhaps, false),
            (&certain, &free, false),
        ] {
            assert_eq!(is_news(std::slice::from_ref(before), now, "Certain"), expected, "{before:?} {now:?}");
        }
    }

    #[test]
    fn the_time_changes_with_the_status_alone() {
        let at = |seconds| Time(Timestamp::from_second(seconds).unwrap());
        let finding = |type_, holds, reason| Finding { type_, holds, reason, message: format!("{reason}.") };
        let first = condition(&[], finding("Ready", false, "Starting"), Some(1), at(1));
        assert_eq!((first.status.as_str(), &first.last_transition_time), ("False", &at(1)));
        let present = [condition(&[], finding("Other", false, "Unrelated"), Some(1), at(0)), first];
        let later = condition(&present, finding("Ready", false, "Waiting"), Some(2), at(2));
        assert_eq!((later.reason.as_str(), later.message.as_str()), ("Waiting", "Waiting."));
        assert_eq!((later.observed_generation, &later.last_transition_time), (Some(2), &at(1)));
        let ready = condition(&present, finding("Ready", true, "Connected"), Some(2), at(3));
        assert_eq!((ready.status.as_str(), &ready.last_transition_time), ("True", &at(3)));
    }
}
