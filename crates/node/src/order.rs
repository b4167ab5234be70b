//! One verb at a time for one container, any number for different ones.
//!
//! A DEL that overtakes an ADD of the same container would leave its link behind. The ticket is held while the ADD
//! waits for a block: it makes nobody wait but verbs of this very container, which have to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

/// Hands out turns by container ID.
#[derive(Debug, Default)]
pub struct Order(Mutex<HashMap<String, Arc<Turn<()>>>>);

/// The right to work on one container; dropped, the next one's turn has come.
#[derive(Debug)]
pub struct Ticket {
    _turn: OwnedMutexGuard<()>,
}

impl Order {
    /// Waits for the turn of this caller.
    pub async fn enter(&self, container: &str) -> Ticket {
        Ticket { _turn: self.turn(container).lock_owned().await }
    }

    /// The turn, if nobody has it or waits for it.
    pub fn try_enter(&self, container: &str) -> Option<Ticket> {
        self.turn(container).try_lock_owned().ok().map(|turn| Ticket { _turn: turn })
    }

    fn turn(&self, container: &str) -> Arc<Turn<()>> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody waits or works on these any more.
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry(container.to_owned()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn verbs_of_one_container_wait_and_others_do_not() {
        let order = Order::default();
        let first = order.enter("a").await;
        let mut second = Box::pin(order.enter("a"));
        assert!(futures::poll!(&mut second).is_pending());
        assert!(order.try_enter("a").is_none());
        assert!(order.try_enter("c").is_some());
        let other = order.enter("b").await;
        drop(first);
        assert!(futures::poll!(&mut second).is_ready());
        drop(other);
    }

    #[tokio::test]
    async fn finished_containers_are_forgotten() {
        let order = Order::default();
        for id in 0..100 {
            drop(order.enter(&id.to_string()).await);
        }
        drop(order.enter("last").await);
        assert_eq!(order.0.lock().unwrap().len(), 1);
    }
}
