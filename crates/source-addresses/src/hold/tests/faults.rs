//! Faults and other events of simulations.

#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) seed: u64,
    pub(super) slots: u32,
    /// Thousandths by which the clock of each gateway is fast.
    pub(super) drift: Vec<i64>,
}

/// Numbers of gateways; the next number is the API server.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    Crash(usize),
    Start(usize),
    Cut(usize, usize),
    OneWay(usize, usize),
    Join(usize, usize),
    Isolate(usize),
    Heal,
    Stall(usize, u64),
    /// Percent of the messages between gateways that are lost.
    Loss(u32),
    /// Longest delay of answers of the API server, and of what its watches show.
    Slow(u64),
    /// Whether the network behind a gateway answers its probes.
    Healthy(usize, bool),
    Drain(usize),
    /// Slots of which a gateway has copies of connections, from now on.
    Copies(usize, Vec<u32>),
    /// A backup of the API server's data is made.
    Save,
    /// The API server has only what was there then.
    Restore,
}
