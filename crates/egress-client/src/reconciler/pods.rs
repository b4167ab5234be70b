//! State of each attachment: what it should have, what it has, and what is to be done next. Without I/O; time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::client::intent::Intent;
use fairlead_egress::client::plan::{Desired, Plan};
use fairlead_egress::problem::{EgressProblem, EgressReason};
use fairlead_ipam::Key;
use fairlead_limits::Backoff;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::super::sandboxes::Sandbox;
use super::job::{Job, Work};

/// Pods that are worked on at a time.
const MAX_JOBS: usize = 8;
/// Pause before a container with a CNI operation is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// Pauses after failures: the first, doubled up to the last.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));

/// One attachment.
struct Pod {
    sandbox: Arc<Sandbox>,
    intent: Intent,
    /// The last plan: what stays while another cannot be made.
    plan: Option<Plan>,
    /// Egresses of the last plan of an earlier program, of which the pod stays a client until this one has a plan.
    adopted: BTreeSet<EgressName>,
    wanted: Option<Work>,
    applied: Option<Work>,
    /// Whether it is to be compared with the kernel, as others may have changed it.
    is_suspect: bool,
    turn: Turn,
    backoff: Backoff,
    /// Error of the kernel at the last attempt.
    refused: Option<String>,
    /// Problems of which an Event was published.
    told: Vec<EgressProblem>,
    watch: Option<Watch>,
}

/// Time at which an attachment is worked on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// As soon as there is work.
    Any,
    /// Not before this time: the last attempt failed, or a CNI operation had the container.
    NotBefore(Instant),
    /// Now.
    Running,
}

impl Turn {
    fn after(now: Instant, pause: Duration) -> Self {
        now.checked_add(pause).map_or(Self::Any, Self::NotBefore)
    }
}

/// A task that reports changes of a namespace; it ends with this handle.
struct Watch {
    task: AbortHandle,
    /// It reports changes of nftables, too.
    nftables: bool,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Problem of a pod with gateways.
pub(super) enum PodProblem<'a> {
    /// Problem with what the pod asks for.
    Asked(&'a EgressProblem),
    /// Error of the kernel.
    Refused(&'a str),
}

impl PodProblem<'_> {
    /// Whether it is of this kind.
    pub(super) fn contains_reason(&self, reason: EgressReason) -> bool {
        matches!(self, Self::Asked(problem) if problem.reason == reason)
    }
}

impl fmt::Display for PodProblem<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked(problem) => write!(f, "{}: {problem}", problem.reason.as_str()),
            Self::Refused(error) => f.write_str(error),
        }
    }
}

impl Pod {
    fn new(sandbox: Arc<Sandbox>, intent: Intent, is_of_this_program: bool) -> Self {
        // What this program's ADD made has nothing of egress unless it is a client or a gateway.
        let applied = (is_of_this_program && intent == Intent::Nothing).then_some(Work::Nothing);
        Self {
            adopted: sandbox.planned(),
            sandbox,
            intent,
            plan: None,
            wanted: None,
            applied,
            is_suspect: false,
            turn: Turn::Any,
            backoff: BACKOFF,
            refused: None,
            told: Vec::new(),
            watch: None,
        }
    }

    fn problems(&self) -> impl Iterator<Item = &EgressProblem> {
        let (single, several): (Option<&EgressProblem>, &[EgressProblem]) = match &self.intent {
            Intent::Client(plan) => (None, &plan.problems),
            Intent::Gateway(problem) => (problem.as_ref(), &[]),
            Intent::Keep(problem) => (Some(problem), &[]),
            Intent::Ended | Intent::Nothing | Intent::Unknown => (None, &[]),
        };
        single.into_iter().chain(several)
    }

    /// Egresses at whose gateways the pod is to be registered; `None` where it is to have no tunnels, or that is not known yet.
    fn usable(&self) -> Option<&BTreeSet<EgressName>> {
        match (&self.intent, &self.plan) {
            (Intent::Client(_) | Intent::Keep(_), Some(plan)) => Some(&plan.usable),
            (Intent::Keep(_), None) if !self.adopted.is_empty() => Some(&self.adopted),
            _ => None,
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let has_work = self.wanted.is_some() && (self.is_suspect || self.wanted != self.applied);
        has_work
            && match self.turn {
                Turn::Any => true,
                Turn::NotBefore(at) => at <= now,
                Turn::Running => false,
            }
    }
}

/// All attachments.
#[derive(Default)]
pub(super) struct Pods {
    all: BTreeMap<Key, Pod>,
    /// Whether attachments of an earlier program have been seen.
    is_adopted: bool,
    /// Pods in the node's network of which an Event was published.
    on_host: BTreeSet<(String, String)>,
}

impl Pods {
    /// Takes over what is to be done with each attachment.
    pub(super) fn set(&mut self, attachments: &BTreeMap<Key, Arc<Sandbox>>, intents: BTreeMap<Key, Intent>) {
        self.all.retain(|key, pod| attachments.get(key).is_some_and(|now| now.is_same_place(&pod.sandbox)));
        let is_of_this_program = std::mem::replace(&mut self.is_adopted, true);
        for (key, intent) in intents {
            let Some(sandbox) = attachments.get(&key) else { continue };
            let new = || Pod::new(Arc::clone(sandbox), intent.clone(), is_of_this_program);
            let pod = self.all.entry(key).or_insert_with(new);
            pod.sandbox = Arc::clone(sandbox);
            match &intent {
                Intent::Client(plan) => pod.plan = Some(plan.clone()),
                Intent::Nothing | Intent::Gateway(_) => {
                    pod.plan = None;
                    pod.adopted.clear();
                }
                Intent::Ended | Intent::Keep(_) | Intent::Unknown => {}
            }
            pod.intent = intent;
        }
    }

    /// Intent for an attachment so far; `None` if it is new.
    pub(super) fn intent(&self, key: &Key) -> Option<&Intent> {
        self.all.get(key).map(|pod| &pod.intent)
    }

    /// Whether the clients are not known yet.
    pub(super) fn is_any_unknown(&self) -> bool {
        self.all.values().any(|pod| pod.intent == Intent::Unknown)
    }

    /// The Egresses of each client that can be used.
    pub(super) fn usable(&self) -> impl Iterator<Item = (&Key, &BTreeSet<EgressName>)> {
        self.all.iter().filter_map(|(key, pod)| Some((key, pod.usable()?)))
    }

    /// The Egresses of an attachment that can be used; `None` while they are not known.
    pub(super) fn usable_by(&self, key: &Key) -> Option<BTreeSet<EgressName>> {
        let pod = self.all.get(key).filter(|pod| pod.intent != Intent::Unknown)?;
        Some(pod.usable().cloned().unwrap_or_default())
    }

    /// Number of pods that have tunnels or should have some.
    pub(super) fn clients(&self) -> usize {
        self.usable().count()
    }

    /// Computes what each namespace should have; `None` of a client leaves it as it is.
    pub(super) fn set_wanted(&mut self, desired: impl Fn(&Sandbox, &Plan) -> Option<Desired>) {
        for pod in self.all.values_mut() {
            let of_client = |pod: &Pod| {
                let plan = pod.plan.as_ref()?;
                desired(&pod.sandbox, plan).map(Work::Client).or_else(|| pod.applied.clone())
            };
            pod.wanted = match &pod.intent {
                Intent::Client(_) | Intent::Keep(_) => of_client(pod),
                Intent::Gateway(_) => Some(Work::Gateway),
                Intent::Nothing => Some(Work::Nothing),
                Intent::Ended | Intent::Unknown => None,
            };
            let needs_nftables = pod.wanted.as_ref().is_some_and(Work::has_nftables);
            let is_unneeded = pod.wanted.as_ref().is_none_or(|work| *work == Work::Nothing);
            let is_enough = |watch: &Watch| !is_unneeded && (watch.nftables || !needs_nftables);
            pod.watch = pod.watch.take().filter(is_enough);
        }
    }

    /// A namespace has changed.
    pub(super) fn compare(&mut self, key: &Key) {
        if let Some(pod) = self.all.get_mut(key) {
            pod.is_suspect = !matches!(pod.wanted, None | Some(Work::Nothing));
        }
    }

    /// Any may have changed.
    pub(super) fn compare_all(&mut self) {
        for pod in self.all.values_mut() {
            pod.is_suspect |= !matches!(pod.wanted, None | Some(Work::Nothing));
        }
    }

    /// Jobs that are to be begun now; at most [`MAX_JOBS`] run at a time.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Job> {
        let running = self.all.values().filter(|pod| pod.turn == Turn::Running).count();
        let due = self.all.iter_mut().filter(|(_, pod)| pod.is_due(now));
        let job = |(key, pod): (&Key, &mut Pod)| {
            let work = pod.wanted.clone()?;
            pod.turn = Turn::Running;
            pod.is_suspect = false;
            let wants_signal = pod.watch.is_none() && work != Work::Nothing;
            let is_check = pod.applied.as_ref() == Some(&work);
            Some(Job { key: key.clone(), sandbox: Arc::clone(&pod.sandbox), work, is_check, wants_signal })
        };
        due.take(MAX_JOBS.saturating_sub(running)).filter_map(job).collect()
    }

    /// Time at which to look again, at the latest `sweep`.
    pub(super) fn next(&self, sweep: Instant) -> Instant {
        let waiting = self.all.values().filter(|pod| pod.is_suspect || pod.wanted != pod.applied);
        let times = waiting.filter_map(|pod| match pod.turn {
            Turn::NotBefore(at) => Some(at),
            Turn::Any | Turn::Running => None,
        });
        times.min().map_or(sweep, |at| at.min(sweep))
    }

    /// It was not done, and is tried again later. Returns whether the error is a new one.
    pub(super) fn retry(&mut self, key: &Key, error: Option<&str>, now: Instant) -> bool {
        let Some(pod) = self.all.get_mut(key) else { return false };
        pod.is_suspect = true;
        let Some(error) = error else {
            pod.turn = Turn::after(now, BUSY_PAUSE);
            return false;
        };
        pod.turn = Turn::after(now, pod.backoff.next_whole());
        // What was set is not known any more.
        pod.applied = None;
        let is_new = pod.refused.as_deref() != Some(error);
        pod.refused = Some(error.to_owned());
        is_new
    }

    /// It was done. Returns whether that ends a problem.
    pub(super) fn done(&mut self, key: &Key, work: Work, watch: Option<AbortHandle>) -> bool {
        let watch = watch.map(|task| Watch { task, nftables: work.has_nftables() });
        let Some(pod) = self.all.get_mut(key) else { return false };
        pod.turn = Turn::Any;
        pod.backoff = BACKOFF;
        pod.applied = Some(work);
        pod.watch = watch.or_else(|| pod.watch.take());
        pod.refused.take().is_some()
    }

    /// All problems.
    pub(super) fn problems(&self) -> impl Iterator<Item = (&Key, PodProblem<'_>)> {
        self.all.iter().flat_map(|(key, pod)| {
            let refused = pod.refused.as_deref().map(PodProblem::Refused);
            pod.problems().map(PodProblem::Asked).chain(refused).map(move |problem| (key, problem))
        })
    }

    /// Problems of which no Event was published since they came.
    pub(super) fn new_problems(&mut self) -> Vec<(Key, EgressProblem)> {
        let mut new = Vec::new();
        for (key, pod) in &mut self.all {
            let now: Vec<EgressProblem> = pod.problems().cloned().collect();
            let unsaid = now.iter().filter(|problem| !pod.told.contains(problem));
            new.extend(unsaid.map(|problem| (key.clone(), problem.clone())));
            pod.told = now;
        }
        new
    }

    /// Pods in the node's network that were not there the last time.
    pub(super) fn new_on_host(&mut self, pods: &[Arc<SlimPod>]) -> Vec<Arc<SlimPod>> {
        let name = |pod: &SlimPod| (pod.namespace().to_owned(), pod.name().to_owned());
        let new = pods.iter().filter(|pod| !self.on_host.contains(&name(pod))).cloned().collect();
        self.on_host = pods.iter().map(|pod| name(pod)).collect();
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandboxes::parse;

    fn key() -> Key {
        Key { container_id: "c1".to_owned(), ifname: "eth0".to_owned() }
    }

    /// The attachment as an earlier program has left it, which had moved the pod from `n/old` to `n/nat`.
    fn attachments() -> BTreeMap<Key, Arc<Sandbox>> {
        let file = r#"{
            "namespace": "shop", "pod": "web", "uid": "u1", "netns": "/ns", "ifname": "eth0", "addresses": ["10.1.0.5"],
            "mtu": 1420, "clients_of": ["n/nat", "n/old"], "planned": ["n/nat"]
        }"#;
        BTreeMap::from([(key(), Arc::new(parse(file.as_bytes()).unwrap()))])
    }

    fn usable(pods: &Pods) -> Vec<String> {
        pods.usable().flat_map(|(_, usable)| usable).map(EgressName::to_string).collect()
    }

    /// The gateways that are not told of it drop what it sends.
    #[test]
    fn a_client_of_an_earlier_program_stays_one_while_no_plan_can_be_made() {
        let attachments = attachments();
        let mut pods = Pods::default();
        let mut see = |intent: Intent| {
            pods.set(&attachments, BTreeMap::from([(key(), intent)]));
            (usable(&pods), pods.usable_by(&key()).map(|usable| usable.len()))
        };
        let keep = || Intent::Keep(EgressProblem::disabled());
        assert_eq!(see(Intent::Unknown), (vec![], None), "nothing is told, and nothing recorded");
        assert_eq!(see(keep()), (vec!["n/nat".to_owned()], Some(1)));
        assert_eq!(see(Intent::Ended), (vec![], Some(0)));
        assert_eq!(see(Intent::Client(Plan::nothing())), (vec![], Some(0)));
        assert_eq!(see(keep()), (vec![], Some(0)), "the plan of this program counts");
    }

    #[test]
    fn a_pod_that_asked_for_nothing_meanwhile_is_no_client_of_an_earlier_plan() {
        let attachments = attachments();
        let mut pods = Pods::default();
        for intent in [Intent::Nothing, Intent::Keep(EgressProblem::disabled())] {
            pods.set(&attachments, BTreeMap::from([(key(), intent)]));
            assert_eq!(usable(&pods), [""; 0]);
        }
    }
}
