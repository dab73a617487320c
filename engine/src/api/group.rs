//! Rooms of one request with several peers: one decode rank fed by several prefill ranks, or the
//! reverse. What each pair of ranks moves follows from their layouts.

use super::handle::{RoomHandle, RoomReport, min_state};
use super::recv::RecvRoom;
use super::send::SendRoom;
use crate::failure::Failure;
use crate::ids::RoomState;

/// The rooms of one id with several peers. Done when all are; one that fails fails it.
#[derive(Debug)]
pub struct Group<R: RoomHandle>(Vec<R>);

impl<R: RoomHandle> Group<R> {
    pub(super) const fn new(rooms: Vec<R>) -> Self {
        Self(rooms)
    }

    /// The rooms, in the order of the peers they were made for (or in which they were opened).
    #[must_use]
    pub fn rooms(&self) -> &[R] {
        &self.0
    }

    /// The least of its rooms' states.
    #[must_use]
    pub fn state(&self) -> RoomState {
        min_state(self.0.iter()).unwrap_or(RoomState::Success)
    }

    /// Why the group failed: the first of its rooms' failures in room order.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        self.0.iter().find_map(RoomHandle::failure)
    }

    /// What is known of each room.
    #[must_use]
    pub fn reports(&self) -> Vec<RoomReport> {
        self.0.iter().map(RoomHandle::report).collect()
    }

    /// Gives every room up.
    pub fn abort(&self, reason: &str) {
        self.0.iter().for_each(|room| room.abort(reason));
    }

    /// Aborts the others when one has failed: the request is lost, its pages are wanted back.
    fn settle(&self) {
        if let Some(failure) = self.failure() {
            let reason = format!("another room of its group failed: {}", failure.kind);
            self.0
                .iter()
                .filter(|room| !room.state().is_terminal())
                .for_each(|room| room.abort(&reason));
        }
    }
}

macro_rules! waits {
    ($room:ty) => {
        impl Group<$room> {
            /// Waits for the end of all rooms. When one fails, the others are aborted.
            ///
            /// # Errors
            /// The failure that came first, of those seen together the first in room order.
            pub async fn done(&self) -> Result<Vec<RoomReport>, Failure> {
                let mut first = None;
                let mut waits: Vec<_> =
                    self.0.iter().map(|room| Box::pin(room.core.verdict())).collect();
                while !waits.is_empty() {
                    let (verdict, index) = std::future::poll_fn(|context| {
                        for (index, wait) in waits.iter_mut().enumerate() {
                            if let std::task::Poll::Ready(verdict) = wait.as_mut().poll(context) {
                                return std::task::Poll::Ready((verdict, index));
                            }
                        }
                        std::task::Poll::Pending
                    })
                    .await;
                    drop(waits.swap_remove(index));
                    if let Err(failure) = verdict {
                        first.get_or_insert(failure);
                        self.settle();
                    }
                }
                match first {
                    None => Ok(self.reports()),
                    Some(failure) => Err(failure),
                }
            }

            /// Waits until no page of any room is touched any more.
            pub async fn released(&self) {
                for room in &self.0 {
                    room.released().await;
                }
            }
        }
    };
}

waits!(SendRoom);
waits!(RecvRoom);
