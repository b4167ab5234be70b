//! Pings from a pod in a VM: which of them were answered, and when.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use jiff::Timestamp;
use testbed_lab::eventually;

use crate::vm_node::VmNode;

/// Longest time in which a ping that is told to end prints its summary.
const END: Duration = Duration::from_secs(20);

/// A ping that runs until it is ended.
#[derive(Debug)]
pub struct VmPings {
    /// File in the VM that has its output; that with its process ID is beside it.
    output: String,
}

/// Answers to pings.
#[derive(Debug, Clone, PartialEq)]
pub struct Answers {
    /// Sequence number of each that was answered, and when, in seconds of the VM's clock; in the order of the numbers.
    answered: Vec<(u64, f64)>,
}

impl VmPings {
    /// Starts to ping an address from a pod of the VM.
    ///
    /// # Errors
    /// The VM does not answer.
    pub fn start(vm: &mut VmNode, pod: &str, to: IpAddr, interval: Duration) -> anyhow::Result<Self> {
        let output = format!("/tmp/pings-to-{to}");
        let seconds = interval.as_secs_f64();
        vm.shell(&format!(
            "ip netns exec {pod} ping -n -D -i {seconds} {to} >{output} 2>&1 &\necho $! >{output}.pid"
        ))?;
        Ok(Self { output })
    }

    /// Answers up to now.
    ///
    /// # Errors
    /// The VM does not answer.
    pub fn so_far(&self, vm: &mut VmNode) -> anyhow::Result<Answers> {
        Ok(Answers::read(&vm.shell(&format!("cat {}", self.output))?))
    }

    /// Ends it.
    ///
    /// # Errors
    /// It does not run, or does not end.
    pub fn end(self, vm: &mut VmNode) -> anyhow::Result<Answers> {
        let output = &self.output;
        vm.shell(&format!("kill -INT $(cat {output}.pid)"))?;
        eventually(END, || {
            let text = vm.shell(&format!("cat {output}"))?;
            ensure!(text.contains(" packets transmitted"), "ping has not ended: {text}");
            Ok(Answers::read(&text))
        })
    }
}

impl Answers {
    fn read(output: &str) -> Self {
        let mut answered: Vec<(u64, f64)> = output.lines().filter_map(answer).collect();
        answered.sort_unstable_by_key(|(number, _)| *number);
        answered.dedup_by_key(|(number, _)| *number);
        Self { answered }
    }

    /// Number of pings that were answered.
    pub fn count(&self) -> usize {
        self.answered.len()
    }

    /// When the first answer came, by the VM's clock.
    ///
    /// # Errors
    /// None came.
    pub fn first(&self) -> anyhow::Result<Timestamp> {
        let seconds = self.answered.iter().map(|(_, at)| *at).min_by(f64::total_cmp);
        let microseconds = (seconds.context("no ping was answered")? * 1e6).round();
        Ok(Timestamp::from_microsecond(microseconds as i64)?)
    }

    /// Number of pings that were lost between the first and the last that were answered: before, there was no session, and afterwards
    /// answers may have been under way.
    ///
    /// # Errors
    /// None was answered.
    pub fn lost(&self) -> anyhow::Result<u64> {
        let ends = self.answered.first().zip(self.answered.last());
        let ((first, _), (last, _)) = ends.context("no ping was answered")?;
        let answered = u64::try_from(self.answered.len())?;
        Ok((last - first + 1).saturating_sub(answered))
    }

    /// The longest time without an answer, in seconds.
    pub fn longest_gap(&self) -> f64 {
        let mut times: Vec<f64> = self.answered.iter().map(|(_, at)| *at).collect();
        times.sort_unstable_by(f64::total_cmp);
        times.iter().zip(times.iter().skip(1)).map(|(one, next)| next - one).fold(0.0, f64::max)
    }
}

/// Sequence number, and time of the answer, of a line of `ping -D`; `None` if it reports no answer.
fn answer(line: &str) -> Option<(u64, f64)> {
    let (at, rest) = line.strip_prefix('[')?.split_once(']')?;
    let number = rest.split_once("icmp_seq=")?.1.split(' ').next()?;
    rest.contains("time=").then_some((number.parse().ok()?, at.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "PING 10.4.0.2 (10.4.0.2) 56(84) bytes of data.\n\
        From 10.4.1.1 icmp_seq=1 Destination Net Unreachable\n\
        [1795517747.100000] 64 bytes from 10.4.0.2: icmp_seq=3 ttl=62 time=41 ms\n\
        [1795517747.900000] 64 bytes from 10.4.0.2: icmp_seq=6 ttl=62 time=3.1 ms\n\
        [1795517747.950000] 64 bytes from 10.4.0.2: icmp_seq=5 ttl=62 time=77 ms\n\
        [1795517747.960000] 64 bytes from 10.4.0.2: icmp_seq=5 ttl=62 time=78 ms (DUP!)\n";

    #[test]
    fn what_is_lost_is_missing_between_the_first_and_the_last_answer() {
        let answers = Answers::read(OUTPUT);
        assert_eq!((answers.count(), answers.lost().unwrap()), (3, 1));
        assert!((answers.longest_gap() - 0.8).abs() < 1e-6, "{answers:?}");
        assert_eq!(answers.first().unwrap().as_millisecond(), 1_795_517_747_100);
    }

    #[test]
    fn pings_without_an_answer_say_nothing_of_losses() {
        let answers = Answers::read("PING 10.4.0.2 (10.4.0.2) 56(84) bytes of data.\n");
        assert!(answers.lost().is_err() && answers.first().is_err() && answers.count() == 0);
    }
}
