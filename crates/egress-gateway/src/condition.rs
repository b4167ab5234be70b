//! Conditions that keep a gateway from getting new connections. Several tasks know a part of it; node programs are told one state.

use fairlead_wire::egress::State;
use tokio::sync::watch;

/// Conditions that keep a gateway from getting new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Condition {
    /// The gateway holds none of the source addresses of the Egress, or only such as were handed to it a moment ago.
    pub(crate) standby: bool,
    /// The gateway is to end.
    pub(crate) draining: bool,
    /// The targets that are probed do not answer.
    pub(crate) unhealthy: bool,
}

impl Condition {
    /// The state that node programs are told.
    pub(crate) fn state(self) -> State {
        match self {
            Self { standby: true, .. } => State::Standby,
            Self { draining: true, .. } => State::Draining,
            Self { unhealthy: true, .. } => State::Unhealthy,
            _ => State::Ready,
        }
    }
}

/// The condition of this gateway, as its tasks say it.
pub(crate) struct Conditions {
    condition: watch::Sender<Condition>,
    state: watch::Sender<State>,
}

impl Default for Conditions {
    fn default() -> Self {
        let condition = Condition::default();
        Self { condition: watch::Sender::new(condition), state: watch::Sender::new(condition.state()) }
    }
}

impl Conditions {
    /// The gateway ends when its flows have.
    pub(crate) fn drain(&self) {
        self.change(|condition| condition.draining = true);
    }

    /// It has source addresses, and holds none of them or is not ready for clients yet.
    pub(crate) fn set_standby(&self, standby: bool) {
        self.change(|condition| condition.standby = standby);
    }

    /// Whether what the Egress has probed answers.
    pub(crate) fn set_healthy(&self, is_healthy: bool) {
        self.change(|condition| condition.unhealthy = !is_healthy);
    }

    fn change(&self, change: impl FnOnce(&mut Condition)) {
        self.condition.send_modify(|condition| {
            change(condition);
            let wanted = condition.state();
            self.state.send_if_modified(|state| std::mem::replace(state, wanted) != wanted);
        });
    }

    /// The condition now.
    pub(crate) fn now(&self) -> Condition {
        *self.condition.borrow()
    }

    /// The state that node programs are told, and its changes.
    pub(crate) fn state(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_that_holds_nothing_says_so_before_all_else() {
        let of = |standby, draining, unhealthy| Condition { standby, draining, unhealthy }.state();
        assert_eq!(of(true, true, true), State::Standby);
        assert_eq!(of(false, true, true), State::Draining);
        assert_eq!((of(false, false, true), of(false, false, false)), (State::Unhealthy, State::Ready));
    }
}
