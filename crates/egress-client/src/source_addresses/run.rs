//! The task: hears, decides, and brings it to the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_cluster::caches::Cache;
use fairlead_cluster::pods::SlimPod;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::source_addresses::{self, Found, Source, Uplink};
use fairlead_dataplane::uplink::Ignored;
use fairlead_egress::EgressName;
use fairlead_source_addresses::announcements::holds::HeardHold;
use fairlead_source_addresses::announcements::pace::{Pace, PacedHolders};
use fairlead_source_addresses::announcements::plan::{self, Adopted, Announced, Host, Plan, Problem};
use fairlead_source_addresses::announcements::{Gateway, Permitted};
use tokio::time::{Instant as Time, sleep, sleep_until};

use super::facts;
use super::metrics::AnnounceMetrics;
use super::outputs::{Report, Shown, SourceAddresses};
use super::schedule::Schedule;
use crate::objects::CachedEgress;
use crate::registrar::Registrar;
use crate::registrar::slices::CachedSlice;

/// Time between two comparisons with the kernel while something is announced: entries that others delete are not reported.
const SWEEP_INTERVAL: Duration = Duration::from_millis(500);
/// The same after a refusal of the kernel.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Least pause between two steps, so that a gateway that says something else all the time does not keep the kernel busy.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// Dependencies of the announcer.
pub(crate) struct AnnounceDeps {
    pub(crate) registrar: Registrar,
    pub(crate) egresses: Arc<Cache<CachedEgress>>,
    /// The gateways of all Egresses.
    pub(crate) slices: Arc<Cache<CachedSlice>>,
    /// The pods of this node.
    pub(crate) pods: Arc<Cache<SlimPod>>,
    pub(crate) sources: SourceAddresses,
    pub(crate) ids: RoutingIds,
    pub(crate) metrics: AnnounceMetrics,
    /// Names of the mesh's devices, which are no uplinks.
    pub(crate) mesh_devices: Box<dyn Fn() -> Vec<String> + Send + Sync>,
}

/// Inputs of the plan, except for the kernel's.
#[derive(Debug, Clone, PartialEq)]
struct Inputs {
    permitted: Permitted,
    gateways: Vec<Gateway>,
    /// Holds, without the times at which they end.
    holds: Vec<(EgressName, String, IpAddr, u64, bool)>,
}

/// Last comparison with the kernel.
struct Compared {
    inputs: Inputs,
    kept: BTreeSet<IpAddr>,
    sources: Vec<Source>,
    /// Whether the kernel has refused something, so that it may have more than this.
    has_failed: bool,
    again: Instant,
}

struct Announcer {
    deps: AnnounceDeps,
    adopted: Adopted,
    /// Limits, for each Egress, on changes of the holders that the controller names, and of the addresses that are announced here.
    holders: PacedHolders,
    pace: Pace,
    announced: BTreeMap<IpAddr, Announced>,
    links: BTreeMap<IpAddr, Vec<String>>,
    schedule: Schedule,
    compared: Option<Compared>,
}

/// Links and addresses of this node, as they were read.
struct Links<'a>(&'a Found);

impl Host for Links<'_> {
    fn link_of(&self, pod: IpAddr) -> Option<u32> {
        self.0.link_of(pod)
    }

    fn has(&self, address: IpAddr) -> bool {
        self.0.has(address)
    }
}

/// Never ends.
pub(super) async fn run(deps: AnnounceDeps) -> Infallible {
    let (mut holds, mut heard) = (deps.registrar.hold_changes(), deps.registrar.changes());
    let (mut listed, mut slices, mut pods) =
        (deps.egresses.subscribe(), deps.slices.subscribe(), deps.pods.subscribe());
    let adopted = Adopted::new(deps.sources.announced.borrow().clone());
    let mut announcer = Announcer {
        deps,
        adopted,
        holders: PacedHolders::default(),
        pace: Pace::default(),
        announced: BTreeMap::new(),
        links: BTreeMap::new(),
        schedule: Schedule::default(),
        compared: None,
    };
    loop {
        holds.mark_unchanged();
        heard.mark_unchanged();
        listed.mark_unchanged();
        slices.mark_unchanged();
        pods.mark_unchanged();
        let next = announcer.step().await;
        sleep(MIN_PAUSE).await;
        let reached = async {
            match next {
                Some(next) => sleep_until(Time::from_std(next)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = reached => {}
            Ok(()) = holds.changed() => {}
            Ok(()) = heard.changed(), if !announcer.adopted.is_empty() => {}
            Ok(()) = listed.changed() => {}
            Ok(()) = slices.changed() => {}
            Ok(()) = pods.changed() => {}
        }
    }
}

impl Announcer {
    /// Returns when something is to be done without a change.
    async fn step(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let permitted = facts::permitted(self.deps.egresses.store.state().iter().map(|egress| &egress.info));
        let has_facts = self.deps.egresses.has_answer() && self.deps.slices.has_answer();
        let mut holders_again = None;
        if has_facts {
            let slices = self.deps.slices.store.state();
            let (holders, again) = self.holders.take(&permitted, now);
            self.deps
                .sources
                .set_nodes(facts::nodes(holders, slices.iter().map(|slice| slice.gateways.places())));
            holders_again = again;
        }
        let pods = self.deps.pods.store.state();
        let gateways = facts::gateways(&permitted, pods.iter().map(AsRef::as_ref));
        let local = gateways.iter().map(|gateway| (gateway.egress.clone(), gateway.uid.clone()));
        self.deps.registrar.set_local_gateways(local.collect());
        let awaited = (has_facts && self.deps.pods.has_answer())
            .then(|| plan::awaited(&permitted, &gateways, &self.deps.registrar.heard_local_gateways()));
        let holds = self.deps.registrar.local_holds(now);
        let timeless = |hold: &HeardHold| {
            (hold.egress.clone(), hold.gateway.clone(), hold.address, hold.term, hold.is_ready)
        };
        let inputs = Inputs { permitted, gateways, holds: holds.iter().map(timeless).collect() };
        self.compare(inputs, &holds, awaited.as_ref(), now).await;
        self.tell(now).await;
        let ends = holds.iter().map(|hold| hold.until);
        let compare = self.compared.as_ref().map(|compared| compared.again);
        let others = [holders_again, self.schedule.next(), self.adopted.end(), compare];
        ends.chain(others.into_iter().flatten()).min()
    }

    /// Compares with the kernel, unless that was done of the same a moment ago. Where nothing is or was announced, the kernel is left
    /// alone.
    async fn compare(
        &mut self,
        inputs: Inputs,
        holds: &[HeardHold],
        awaited: Option<&BTreeSet<IpAddr>>,
        now: Instant,
    ) {
        let kept = self.adopted.kept(&Plan::default(), awaited, now);
        let last = self.compared.as_ref();
        let had_nothing =
            last.is_none_or(|last| !last.has_failed && last.sources.is_empty() && last.kept.is_empty());
        if holds.is_empty() && kept.is_empty() && had_nothing {
            self.compared = None;
            self.deps.sources.set_announced(BTreeSet::new());
            return self.report(&BTreeSet::new());
        }
        if last.is_some_and(|last| last.inputs == inputs && last.kept == kept && last.again > now) {
            return;
        }
        let (ids, ignored) = (self.deps.ids, self.ignored());
        let read = tokio::task::spawn_blocking(move || Found::read(ids, ignored)).await;
        match finished(read) {
            Ok(found) => {
                let Inputs { permitted, gateways, .. } = &inputs;
                let mut plan = plan::plan(permitted, gateways, holds, &self.announced, &Links(&found));
                let again = plan::hold_down(&mut plan, &self.announced, &mut self.pace, now);
                let kept = self.adopted.kept(&plan, awaited, now);
                self.apply(inputs, plan, kept, found, now).await;
                if let (Some(again), Some(compared)) = (again, &mut self.compared) {
                    compared.again = compared.again.min(again);
                }
            }
            Err(error) => self.refused(&error, inputs, kept, now),
        }
    }

    /// Brings the plan to the kernel, and lets the others know it.
    async fn apply(
        &mut self,
        inputs: Inputs,
        plan: Plan,
        kept: BTreeSet<IpAddr>,
        found: Found,
        now: Instant,
    ) {
        let ids = self.deps.ids;
        let sources: Vec<Source> = plan.announced.values().map(|announced| announced.source).collect();
        let (wanted, left) = (sources.clone(), kept.clone());
        let apply = move || {
            let done = source_addresses::sync(ids, &wanted, &left, &found);
            let on_uplinks = |source: &Source| {
                let address = source.address;
                found.uplinks(address).into_iter().map(move |uplink| (address, uplink))
            };
            (done, wanted.iter().flat_map(on_uplinks).collect::<Vec<(IpAddr, Uplink)>>())
        };
        let (done, mut here) = finished(tokio::task::spawn_blocking(apply).await);
        let mut announced = plan.announced;
        if done.is_err() {
            // What may have no route yet is not to draw packets here.
            announced.retain(|address, _| self.announced.contains_key(address));
            here.retain(|(address, _)| announced.contains_key(address));
        }
        let last = self.compared.as_ref();
        let is_same = last.is_some_and(|last| (&last.sources, &last.kept) == (&sources, &kept));
        let (mut problems, has_failed) = (plan.problems, done.is_err());
        let again = if has_failed { RETRY_INTERVAL } else { SWEEP_INTERVAL };
        match done {
            Ok(done) if is_same && !done.is_empty() => {
                tracing::warn!(operations = ?done, "corrected what source addresses of egress gateways need");
                self.deps.metrics.corrected();
            }
            Ok(_) => {}
            Err(error) => drop(problems.insert(Problem::Refused { error: error.to_string() })),
        }
        self.schedule.set(&here, now);
        self.links = BTreeMap::new();
        for (address, uplink) in here {
            self.links.entry(address).or_default().push(uplink.name);
        }
        self.took(announced, &inputs.permitted);
        self.deps.sources.set_announced(self.announced.keys().chain(&kept).copied().collect());
        self.report(&problems);
        let again = now.checked_add(again).unwrap_or(now);
        self.compared = Some(Compared { inputs, kept, sources, has_failed, again });
    }

    /// The kernel cannot be read: what is there stays.
    fn refused(
        &mut self,
        error: &fairlead_netlink::Error,
        inputs: Inputs,
        kept: BTreeSet<IpAddr>,
        now: Instant,
    ) {
        self.report(&[Problem::Refused { error: error.to_string() }].into());
        let sources = self.announced.values().map(|announced| announced.source).collect();
        let again = now.checked_add(RETRY_INTERVAL).unwrap_or(now);
        self.compared = Some(Compared { inputs, kept, sources, has_failed: true, again });
    }

    fn took(&mut self, announced: BTreeMap<IpAddr, Announced>, permitted: &Permitted) {
        for (address, new) in &announced {
            let known = self.announced.get(address);
            if known.is_some_and(|known| known.source == new.source) {
                continue;
            }
            let is_takeover = plan::is_takeover(new, permitted);
            self.deps.metrics.began(is_takeover);
            let Announced { egress, pod, term, .. } = new;
            tracing::info!(%address, %egress, gateway = pod, term, is_takeover, "a source address is announced");
        }
        for (address, old) in self.announced.iter().filter(|(address, _)| !announced.contains_key(*address)) {
            tracing::info!(%address, egress = %old.egress, gateway = old.pod, "a source address is no longer announced");
        }
        self.deps.metrics.announced(announced.len());
        self.announced = announced;
    }

    /// Tells hosts beside this node what is due.
    async fn tell(&mut self, now: Instant) {
        let due = self.schedule.due(now);
        if due.is_empty() {
            return;
        }
        let send = move || {
            for (address, uplink) in due {
                if let Err(error) = source_addresses::announce(&uplink, address) {
                    let link = uplink.name;
                    tracing::warn!(%address, link, %error, "cannot announce a source address to the hosts of a network");
                }
            }
        };
        finished(tokio::task::spawn_blocking(send).await);
    }

    fn report(&self, problems: &BTreeSet<Problem>) {
        let shown = |announced: &Announced| Shown {
            address: announced.source.address,
            egress: announced.egress.to_string(),
            gateway: announced.pod.clone(),
            term: announced.term,
            links: self.links.get(&announced.source.address).cloned().unwrap_or_default(),
        };
        let problems = problems.iter().map(|problem| format!("{}: {problem}", problem.reason()));
        let announced = self.announced.values().map(shown).collect();
        self.deps.sources.set_report(Report { announced, problems: problems.collect() });
    }

    fn ignored(&self) -> Ignored {
        Ignored { links: (self.deps.mesh_devices)(), ..Ignored::default() }
    }
}

/// A panic on a thread that may block is one here.
fn finished<T>(outcome: Result<T, tokio::task::JoinError>) -> T {
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
