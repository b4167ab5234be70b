//! Breakdown of the time of one ADD and one DEL when nothing else runs.
//!
//! The whole is measured from outside. Of it, starting the process is what the operation VERSION costs, which calls no server;
//! what the node program needs is the difference of its own metrics; the call between the two is what is left. The
//! steps of the kernel work are the spans of `fairlead_dataplane::pods`, run in this process in the node's namespace:
//! same code, same links. All are means, so that the parts add up.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use fairlead_address::DualStackAddrs;
use fairlead_dataplane::pods::{self, PodSpec, Removal};
use fairlead_dataplane::routing_ids::RoutingIds;
use testbed_lab::Host;
use tracing::Subscriber;
use tracing::span::Id;
use tracing_subscriber::layer::{Context as LayerContext, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use super::bed::Bed;
use super::load::Load;
use super::subject::Family;
use super::{CASE, OURS, rounds};
use crate::report::{Measurement, milliseconds};
use crate::{Effort, progress};

/// Pods of each round.
const PODS: usize = 50;
/// Address and port where `fairlead node` serves its metrics.
const METRICS: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 9384);
/// The module whose spans are the steps.
const STEPS: &str = "fairlead_dataplane::pods";

/// Milliseconds of each part, one sample a round, in the order they were met.
#[derive(Debug, Default)]
struct Parts(Vec<(String, Vec<f64>)>);

impl Parts {
    fn push(&mut self, name: &str, milliseconds: f64) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, samples)) => samples.push(milliseconds),
            None => self.0.push((name.to_owned(), vec![milliseconds])),
        }
    }
}

pub(super) fn measure(bed: &Bed, effort: Effort) -> Result<Vec<Measurement>> {
    let spans = Spans::default();
    // Threads that the data plane starts need it too, so it is the process's.
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(spans.clone()))
        .context("another subscriber is installed")?;
    let mut parts = Parts::default();
    for round in 1..=rounds(effort) {
        progress(&format!("    where the time goes, round {round} of {}", rounds(effort)));
        for family in [Family::Ipv4, Family::Dual] {
            outside(bed, family, &mut parts)?;
            steps(bed, family, &spans, &mut parts)?;
        }
    }
    parts.0.into_iter().map(|(name, samples)| Measurement::new(CASE, OURS, name, "ms", samples)).collect()
}

fn outside(bed: &Bed, family: Family, parts: &mut Parts) -> Result<()> {
    let plugin = bed.ours(family);
    let host = bed.own_host()?;
    let start = mean(&host.run(|| Load::run(1, PODS, |_| plugin.version()))??);
    let before = Served::read(host)?;
    let (add, del) = bed.attach_and_detach(&plugin, 1, PODS)?;
    let served = Served::read(host)?.since(&before);
    for (operation, whole, serving) in [("ADD", mean(&add), served.add), ("DEL", mean(&del), served.del)] {
        let name = |part: &str| format!("{operation} {family}, mean: {part}");
        parts.push(&name("whole"), whole);
        parts.push(&name("process start and end"), start);
        parts.push(&name("call"), whole - start - serving);
        parts.push(&name("node program"), serving);
        if operation == "ADD" {
            parts.push(&name("node program, address"), served.address);
        }
    }
    Ok(())
}

fn mean(load: &Load) -> f64 {
    load.milliseconds.iter().sum::<f64>() / load.milliseconds.len() as f64
}

/// Milliseconds by the node program's own metrics; totals, or means of what [`Served::since`] tells apart.
#[derive(Debug, Default, Clone, Copy)]
struct Served {
    add: f64,
    adds: f64,
    del: f64,
    dels: f64,
    address: f64,
}

impl Served {
    fn read(host: &Host) -> Result<Self> {
        let text = host.run(scrape)??;
        let figure = |name: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            let figure = line.with_context(|| format!("the node program has no metric {name}"))?;
            figure.parse().with_context(|| format!("metric {name} is {figure:?}"))
        };
        Ok(Self {
            add: figure("fairlead_cni_add_duration_seconds_sum")? * 1000.0,
            adds: figure("fairlead_cni_add_duration_seconds_count")?,
            del: figure("fairlead_cni_del_duration_seconds_sum")? * 1000.0,
            dels: figure("fairlead_cni_del_duration_seconds_count")?,
            address: figure("fairlead_ipam_block_wait_seconds_sum")? * 1000.0,
        })
    }

    fn since(&self, before: &Self) -> Self {
        let (adds, dels) = (self.adds - before.adds, self.dels - before.dels);
        Self {
            add: (self.add - before.add) / adds,
            adds,
            del: (self.del - before.del) / dels,
            dels,
            address: (self.address - before.address) / adds,
        }
    }
}

/// The node program's metrics, asked from its own network namespace.
pub(crate) fn scrape() -> Result<String> {
    let mut stream = TcpStream::connect(METRICS).context("the node program serves no metrics")?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("cannot read the node program's metrics")?;
    Ok(text)
}

/// Makes and removes links as the node program does, with the clock on every step.
fn steps(bed: &Bed, family: Family, spans: &Spans, parts: &mut Parts) -> Result<()> {
    let netns = bed.sandbox()?;
    let spec = PodSpec {
        container_id: "steps".to_owned(),
        ifname: "eth0".to_owned(),
        netns,
        pool: "bench".to_owned(),
        addresses: DualStackAddrs {
            ipv4: (family != Family::Ipv6).then_some(Ipv4Addr::new(10, 99, 0, 1)),
            ipv6: (family != Family::Ipv4).then_some(Ipv6Addr::new(0xfd00, 0x99, 0, 0, 0, 0, 0, 1)),
        },
        mtu: Some(1500),
        link_name: None,
        ids: RoutingIds::default(),
    };
    for operation in ["ADD", "DEL"] {
        spans.take();
        bed.own_host()?.run(|| -> Result<()> {
            for _ in 0..PODS {
                let made = || pods::add(&spec).map(drop);
                let removed = || pods::remove(&spec.container_id, &spec.ifname).map(drop);
                let (timed, other): (&dyn Fn() -> pods::Result<()>, &dyn Fn() -> pods::Result<()>) =
                    if operation == "ADD" { (&made, &removed) } else { (&removed, &made) };
                if operation == "DEL" {
                    spans.pause(other)?;
                }
                timed()?;
                if operation == "ADD" {
                    spans.pause(other)?;
                }
            }
            Ok(())
        })??;
        for (step, elapsed) in spans.take() {
            parts.push(
                &format!("{operation} {family}, mean: kernel, {step}"),
                milliseconds(elapsed) / PODS as f64,
            );
        }
    }
    let gone = bed.own_host()?.run(|| until_gone(&spec))??;
    parts.push(&format!("DEL {family}, mean: kernel, until gone"), milliseconds(gone) / PODS as f64);
    Ok(())
}

/// Time for which the links are still there once their deletion begins, which is as long as DEL waits.
fn until_gone(spec: &PodSpec) -> Result<Duration> {
    let mut all = Duration::ZERO;
    for _ in 0..PODS {
        pods::add(spec)?;
        let removal = Removal::find(&spec.container_id, &spec.ifname)?;
        let start = Instant::now();
        all += thread::scope(|scope| -> Result<Duration> {
            let acknowledged = scope.spawn(|| removal.apply());
            while !removal.is_over() && !acknowledged.is_finished() {
                thread::sleep(Duration::from_micros(50));
            }
            let gone = start.elapsed();
            acknowledged.join().map_err(|_| anyhow!("a thread panicked"))??;
            Ok(gone)
        })?;
    }
    Ok(all)
}

/// Sums up how long the data plane was in each of its spans.
#[derive(Debug, Clone, Default)]
struct Spans(Arc<Mutex<Sums>>);

#[derive(Debug, Default)]
struct Sums {
    paused: bool,
    by_name: BTreeMap<&'static str, Duration>,
}

impl Spans {
    fn sums(&self) -> std::sync::MutexGuard<'_, Sums> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> BTreeMap<&'static str, Duration> {
        std::mem::take(&mut self.sums().by_name)
    }

    fn pause<T>(&self, work: impl FnOnce() -> T) -> T {
        self.sums().paused = true;
        let done = work();
        self.sums().paused = false;
        done
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_enter(&self, id: &Id, context: LayerContext<'_, S>) {
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(Instant::now());
        }
    }

    fn on_exit(&self, id: &Id, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let entered = span.extensions().get::<Instant>().copied();
        let mut sums = self.sums();
        if let (Some(entered), false) = (entered, sums.paused)
            && span.metadata().target().starts_with(STEPS)
        {
            *sums.by_name.entry(span.name()).or_default() += entered.elapsed();
        }
    }
}
