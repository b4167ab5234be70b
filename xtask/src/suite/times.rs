//! Times of jobs on a machine with two processors: by that they are ordered, and as many run at once as it has time for.
//!
//! `times.tsv` is a copy of what a run writes to `target/test-times.tsv`. It needs to be right only roughly.

use std::collections::BTreeMap;

use super::LOAD;

/// Package, module of integration tests (`-`: unit tests), seconds, processor seconds.
const TABLE: &str = include_str!("times.tsv");

/// Wall-clock and processor time of a job, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Time {
    pub(crate) seconds: f64,
    pub(crate) cpu: f64,
}

impl Time {
    /// Processors in use while it runs, in hundredths: at least 5, at most 200. What keeps one processor busy all the time counts as what jobs may
    /// use of it: one thread never needs more, and two such jobs go together.
    pub(crate) fn share(self) -> u32 {
        let share = (self.cpu / self.seconds.max(0.1) * 100.0).clamp(5.0, 200.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let share = share as u32;
        if share <= 100 { share.min(LOAD) } else { share }
    }
}

/// Times by package and module.
#[derive(Debug, Default)]
pub(crate) struct Times(BTreeMap<(String, String), Time>);

impl Times {
    /// The table of this program.
    pub(crate) fn kept() -> Self {
        let row = |line: &str| {
            let mut fields = line.split('\t');
            let key = (fields.next()?.to_owned(), fields.next()?.trim_matches('-').to_owned());
            let time = Time { seconds: fields.next()?.parse().ok()?, cpu: fields.next()?.parse().ok()? };
            Some((key, time))
        };
        Self(TABLE.lines().filter_map(row).collect())
    }

    /// The time of a module; an empty one stands for the unit tests.
    pub(crate) fn of(&self, package: &str, module: &str) -> Option<Time> {
        self.0.get(&(package.to_owned(), module.to_owned())).copied()
    }

    pub(crate) fn insert(&mut self, package: &str, module: &str, time: Time) {
        self.0.insert((package.to_owned(), module.to_owned()), time);
    }

    /// As [`Self::kept`] reads it.
    pub(crate) fn table(&self) -> String {
        let row = |((package, module), time): (&(String, String), &Time)| {
            let module = if module.is_empty() { "-" } else { module };
            format!("{package}\t{module}\t{:.1}\t{:.1}\n", time.seconds, time.cpu)
        };
        self.0.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_table_is_read_and_written_back() {
        let times = Times::kept();
        assert_eq!(times.0.len(), TABLE.lines().count());
        assert_eq!(times.table(), TABLE);
    }

    #[test]
    fn the_share_of_a_job_is_what_it_uses_of_a_processor() {
        let share = |seconds, cpu| Time { seconds, cpu }.share();
        assert_eq!((share(10.0, 5.0), share(10.0, 0.0), share(0.0, 9.0)), (50, 5, 200));
        assert_eq!((share(10.0, 8.9), share(10.0, 9.9), share(10.0, 15.0)), (89, LOAD, 150));
    }
}
