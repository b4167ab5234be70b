//! The embedded WireGuard is handed over to the next process, as at an upgrade of the node program, while TCP takes all that the machine
//! has: what happens meanwhile to a datagram every millisecond.
//!
//! Both ends are handed over in turns, the one that encrypts what TCP sends and the one that decrypts it, each time to a new process of
//! this program.

mod probe;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use fairlead_tunnel::Device;
use testbed_lab::Lab;
use tokio::signal::unix::{SignalKind, signal};

use super::iperf;
use super::load::Load;
use super::pair::{CONFIGURATION, End, INTERFACE, LEFT, Pair, RIGHT, TIMEOUT};
use super::plots::{self, Chart};
use super::subject::{Subject, device_with_handover};
use crate::report::{Measurement, milliseconds};
use crate::{Effort, Options, print, progress};
use probe::{Datagram, Delays};

pub(crate) const CASE: &str = "handover";
/// Output of a device process when `wg(8)` can configure it, and it can be told to hand over.
const STARTED: &str = "started";
/// TCP connections at once.
const STREAMS: u8 = 4;
/// Seconds that TCP sends: longer than everything below together.
const LOAD_SECONDS: u8 = 9;
/// TCP's start, before the probe's.
const LOAD_START: Duration = Duration::from_millis(500);
/// The probe's start, before the old process is told to hand over.
const BEFORE: Duration = Duration::from_secs(3);
/// Half of the second around the moment when the new process takes over.
const HALF: Duration = Duration::from_millis(500);
/// Time from that moment to the probe's end.
const AFTER: Duration = Duration::from_millis(2_500);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Each end by what it does for the load.
const ENDS: [(u8, &str); 2] = [(LEFT, "end that sends"), (RIGHT, "end that receives")];
/// Phases that are compared: the seconds before a hand-over, the second around it, and the seconds after.
const PHASES: [&str; 3] = ["before", AROUND, "after"];
const AROUND: &str = "hand-over";

const CHARTS: [Chart; 1] = [Chart {
    file: "handover.svg",
    title: "Hand-over under full load: round trips of a probe",
    unit: "ms",
    metric: "",
    highlighted: AROUND,
}];

/// When what happened.
#[derive(Debug, Clone, Copy)]
struct Moments {
    /// The old process was told to hand over.
    told: Instant,
    /// The new one is configured, and so takes the sockets.
    configured: Instant,
    /// The old one has ended.
    ended: Instant,
}

/// One hand-over.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// In the order of [`PHASES`].
    delays: [Delays; 3],
    /// When the first and the last of all that were lost was sent, in milliseconds after the new process was configured.
    lost_between: Option<[f64; 2]>,
    /// Time from the order to hand over until the old process ended.
    seconds: f64,
    gigabits_per_second: f64,
}

/// A quantity of a hand-over: name, unit, and value.
type Quantity<T> = (&'static str, &'static str, fn(&T) -> f64);

/// Measures hand-overs of both ends.
pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let rounds = options.rounds.unwrap_or(if options.effort == Effort::Quick { 2 } else { 5 });
    iperf::check_installed()?;
    let lab = Lab::new()?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let mut bed = Bed::start(&lab, directory.path())?;
    let mut samples = ENDS.map(|_| Vec::new());
    for round in 1..=rounds {
        for ((number, name), samples) in ENDS.into_iter().zip(&mut samples) {
            let what = format!("{name}, hand-over {round} of {rounds}");
            let sample = bed.hand_over(number).with_context(|| what.clone())?;
            progress(&format!("    {what}: {}", sample.describe()));
            samples.push(sample);
        }
    }
    let mut measurements = Vec::new();
    for ((_, name), samples) in ENDS.iter().zip(&samples) {
        measurements.extend(rows(name, samples)?);
    }
    plots::write(CASE, &CHARTS, &measurements);
    for ((_, name), samples) in ENDS.iter().zip(&samples) {
        let lost: usize = samples.iter().map(Sample::lost).sum();
        progress(&format!("    {name}: {lost} datagrams were lost around {rounds} hand-overs (goal: 0)"));
    }
    Ok(measurements)
}

/// The device as the process that is handed over: on SIGTERM it waits for the next one at this path, as the node program does.
pub(super) fn serve(device: Device, path: PathBuf) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut termination = runtime.block_on(async { signal(SignalKind::terminate()) })?;
    print(STARTED)?;
    runtime.block_on(termination.recv());
    let pending = device.hand_over(path)?;
    ensure!(pending.wait(TIMEOUT), "no process has taken the device over in {TIMEOUT:?}");
    Ok(())
}

/// Two ends with a device process each.
struct Bed {
    pair: Pair,
    /// Path of the socket where an old process waits for the next one.
    socket: PathBuf,
    outputs: PathBuf,
}

impl Bed {
    fn start(lab: &Lab, directory: &Path) -> Result<Self> {
        let (socket, outputs) = (directory.join("handover.sock"), directory.to_owned());
        // Nothing listens there yet, so both start as usual.
        let device = device_with_handover(&socket)?;
        let copy = || {
            let mut copy = Command::new(device.get_program());
            copy.args(device.get_args());
            Some(copy)
        };
        Ok(Self { pair: Pair::start(lab, Subject::Fairlead, copy)?, socket, outputs })
    }

    /// Hands an end over under load.
    fn hand_over(&mut self, number: u8) -> Result<Sample> {
        let _server = self.pair.serve()?;
        let mut client = self.pair.client(Load::Tcp(STREAMS), LOAD_SECONDS)?;
        thread::sleep(LOAD_START);
        let [left, right] = &mut self.pair.ends;
        let (from, to) = (left.namespace.clone(), right.namespace.clone());
        let end = if number == LEFT { left } else { right };
        let next = device_with_handover(&self.socket)?;
        let (moments, datagrams) = probe::during(&from, &to, self.pair.target, || {
            thread::sleep(BEFORE);
            let moments = hand_over(end, next, &self.socket, &self.outputs)?;
            thread::sleep(AFTER.saturating_sub(moments.configured.elapsed()));
            ensure!(client.is_running()?, "TCP ended before the probe");
            Ok(moments)
        })?;
        Sample::of(moments, &datagrams, client.finish()?.bits_per_second / 1e9)
    }
}

/// Has the device process of an end hand over to another one.
fn hand_over(end: &mut End, mut next: Command, socket: &Path, outputs: &Path) -> Result<Moments> {
    let old = end.device.take().context("there is no device")?;
    let old_output = old.output_path().to_owned();
    let told = Instant::now();
    let name = format!("{}-after-{}", end.namespace.name(), old.id());
    let ending = thread::spawn(move || old.stop(TIMEOUT));
    while !socket.exists() {
        ensure!(told.elapsed() < TIMEOUT, "the old process does not listen at {}", socket.display());
        thread::sleep(POLL_INTERVAL);
    }
    let mut new = end.namespace.spawn(&mut next, outputs.join(name))?;
    new.wait_for_output(STARTED, TIMEOUT)?;
    let configured = Instant::now();
    end.namespace.shell(&format!("wg setconf {INTERFACE} {CONFIGURATION}"))?;
    end.device = Some(new);
    let status = ending.join().map_err(|_| anyhow!("waiting for the old process panicked"))??;
    let output = || fs::read_to_string(&old_output).unwrap_or_default();
    ensure!(status.success(), "the old process ended with {status}: {}", output());
    Ok(Moments { told, configured, ended: Instant::now() })
}

impl Moments {
    /// When datagrams count for which of the [`PHASES`].
    fn windows(&self, datagrams: &[Datagram]) -> Result<[Range<Instant>; 3]> {
        let (Some(first), Some(last)) = (datagrams.first(), datagrams.last()) else {
            return Err(anyhow!("no datagram was sent"));
        };
        // A busy machine may take longer to start the new process.
        let begin = self.configured.checked_sub(HALF).map_or(self.told, |half| half.min(self.told));
        let end = self.configured + HALF;
        Ok([first.sent..begin, begin..end, end..last.sent])
    }
}

impl Sample {
    fn of(moments: Moments, datagrams: &[Datagram], gigabits_per_second: f64) -> Result<Self> {
        let [before, around, after] = moments.windows(datagrams)?;
        let within = |window| Delays::of(datagrams, &window);
        let delays = [within(before)?, within(around)?, within(after)?];
        let seconds = moments.ended.saturating_duration_since(moments.told).as_secs_f64();
        let lost_between = lost_between(datagrams, moments.configured);
        Ok(Self { delays, lost_between, seconds, gigabits_per_second })
    }

    /// Around the hand-over.
    fn lost(&self) -> usize {
        let [_, around, _] = &self.delays;
        around.lost
    }

    fn added_p99(&self) -> f64 {
        let [before, around, _] = &self.delays;
        around.p99 - before.p99
    }

    fn describe(&self) -> String {
        let phases = PHASES.iter().zip(&self.delays).map(|(phase, delays)| {
            let Delays { sent, lost, p99, longest, .. } = delays;
            format!("{phase}: p99 {p99:.2} ms, longest {longest:.2} ms, {lost} of {sent} lost")
        });
        let mut phases: Vec<_> = phases.collect();
        if let Some([first, last]) = self.lost_between {
            phases.push(format!(
                "the lost ones were sent {first:.0} to {last:.0} ms after the new process was configured"
            ));
        }
        format!("{} ({:.2} Gbit/s of TCP)", phases.join("; "), self.gigabits_per_second)
    }
}

/// When the first and the last lost datagram was sent, in milliseconds from a moment on.
fn lost_between(datagrams: &[Datagram], moment: Instant) -> Option<[f64; 2]> {
    let mut lost = datagrams.iter().filter(|datagram| datagram.delay.is_none());
    let first = lost.next()?;
    let last = lost.next_back().unwrap_or(first);
    let after = |datagram: &Datagram| {
        let later = milliseconds(datagram.sent.saturating_duration_since(moment));
        later - milliseconds(moment.saturating_duration_since(datagram.sent))
    };
    Some([after(first), after(last)])
}

/// The rows of one end; the other phases are divided by the one before the hand-over.
fn rows(end: &str, samples: &[Sample]) -> Result<Vec<Measurement>> {
    let of_delays: [Quantity<Delays>; 4] = [
        ("p50", "ms", |delays| delays.p50),
        ("p99", "ms", |delays| delays.p99),
        ("longest", "ms", |delays| delays.longest),
        ("lost", "datagrams", |delays| delays.lost as f64),
    ];
    let of_samples: [Quantity<Sample>; 3] = [
        ("p99, added", "ms", Sample::added_p99),
        ("old process told to hand over until it ends", "s", |sample| sample.seconds),
        ("TCP beside it", "Gbit/s", |sample| sample.gigabits_per_second),
    ];
    let mut rows = Vec::new();
    for (name, unit, value) in of_delays {
        for (position, phase) in PHASES.into_iter().enumerate() {
            let of_phase =
                samples.iter().filter_map(|sample| sample.delays.get(position)).map(value).collect();
            let row = Measurement::new(CASE, phase, format!("{end}, {name}"), unit, of_phase)?;
            let [before, ..] = PHASES;
            rows.push(if phase == before { row } else { row.against(before) });
        }
    }
    for (name, unit, value) in of_samples {
        let values = samples.iter().map(value).collect();
        rows.push(Measurement::new(CASE, AROUND, format!("{end}, {name}"), unit, values)?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagrams(start: Instant, delay: impl Fn(u64) -> Option<u64>) -> Vec<Datagram> {
        let datagram = |number| Datagram {
            sent: start + Duration::from_millis(number),
            delay: delay(number).map(Duration::from_millis),
        };
        (0..6_000).map(datagram).collect()
    }

    fn moments(start: Instant, told: u64, configured: u64) -> Moments {
        let at = |number| start + Duration::from_millis(number);
        Moments { told: at(told), configured: at(configured), ended: at(configured + 1_100) }
    }

    #[test]
    fn the_second_around_the_hand_over_is_compared_with_what_comes_before() {
        let start = Instant::now();
        // From 20 ms before the new process takes over until 20 ms after.
        let slow = 3_080..3_120;
        let delay =
            |number| if number == 3_200 { None } else { Some(if slow.contains(&number) { 50 } else { 4 }) };
        let sample = Sample::of(moments(start, 3_000, 3_100), &datagrams(start, delay), 5.0).unwrap();
        let [before, around, after] = sample.delays;
        assert_eq!((before.sent, before.lost, before.longest), (2_600, 0, 4.0));
        assert_eq!((around.sent, around.lost, around.p50, around.longest), (1_000, 1, 4.0, 50.0));
        assert_eq!((after.sent, after.lost, after.longest), (2_399, 0, 4.0));
        assert_eq!((sample.lost(), sample.lost_between), (1, Some([100.0, 100.0])));
        assert!(
            (sample.added_p99() - 46.0).abs() < 1e-9 && (sample.seconds - 1.2).abs() < 1e-9,
            "{sample:?}"
        );
    }

    #[test]
    fn losses_are_told_with_their_time() {
        let start = Instant::now();
        let delay = |number| if [90, 95, 130].contains(&number) { None } else { Some(1) };
        let moment = start + Duration::from_millis(100);
        assert_eq!(lost_between(&datagrams(start, delay), moment), Some([-10.0, 30.0]));
        assert_eq!(lost_between(&datagrams(start, |_| Some(1)), moment), None);
    }

    #[test]
    fn a_slow_start_of_the_new_process_is_part_of_the_hand_over() {
        let start = Instant::now();
        let windows = moments(start, 3_000, 4_000).windows(&datagrams(start, |_| Some(1))).unwrap();
        let [before, around, _] = windows;
        assert_eq!((before.end, around.start), (start + BEFORE, start + BEFORE));
        assert_eq!(around.end - around.start, Duration::from_millis(1_500));
        assert!(moments(start, 0, 1).windows(&[]).is_err());
    }

    #[test]
    fn rows_name_the_end_and_the_phase() {
        let start = Instant::now();
        let sample = Sample::of(moments(start, 3_000, 3_100), &datagrams(start, |_| Some(4)), 5.0).unwrap();
        let rows = rows("end that sends", &[sample, sample]).unwrap();
        let shown: Vec<_> = rows.iter().map(|row| (row.metric.as_str(), row.subject, row.peer)).collect();
        assert_eq!(shown[3], ("end that sends, p99", "before", None));
        assert_eq!(shown[4], ("end that sends, p99", AROUND, Some("before")));
        assert_eq!(shown[12], ("end that sends, p99, added", AROUND, None));
        assert_eq!((rows.len(), rows[12].samples.as_slice()), (15, [0.0, 0.0].as_slice()));
        assert!(sample.describe().contains("hand-over: p99 4.00 ms, longest 4.00 ms, 0 of 1000 lost"));
    }
}
