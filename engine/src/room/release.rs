//! When a room's pages are quiet: nothing is read from, or placed in, them any more.
//!
//! ```text
//! Live ──ended──▶ Waiting ──quiet here, and the peer's writes over──▶ Quiet
//!                    └──fence_after──▶ Waiting, every lane to the peer closed ──▶ Quiet
//! ```
//!
//! Quiet *here* is the fabric's word: no operation of this engine touches the pages. A receiver on a
//! fabric that lands writes without asking (RDMA) also needs the peer's writes to be over: the sender
//! has said *drained*, or every lane that stood when the room ended is down at this end. Waiting for
//! the peer has a limit; then this side closes the lanes alone.

use crate::ids::Micros;
use crate::mutations::{self, Mutation};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Release {
    phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Live,
    Waiting { here: bool, peer: PeerWrites, fence_at: Micros },
    Quiet,
}

/// What may still come from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PeerWrites {
    /// Nothing: the pages are sources, the fabric asks before it places, or all writes have landed.
    Over,
    /// Writes on lanes with a serial number below this.
    OnLanesBefore(u64),
}

/// What happens to pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseEvent {
    /// The room has ended.
    Ended { peer: PeerWrites, fence_at: Micros },
    /// The fabric touches the pages no more.
    QuietHere,
    /// The peer says that no write of the room is on its way any more.
    Drained,
    /// Of the lanes to the peer, those below this serial number are down.
    LanesDownBefore(u64),
    /// Time has passed.
    Tick,
}

/// What is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseReaction {
    /// Nothing.
    Nothing,
    /// Close every lane to the peer.
    Fence,
    /// The pages are quiet: hand them out.
    Quiet,
}

impl Release {
    pub(crate) const fn new() -> Self {
        Self { phase: Phase::Live }
    }

    pub(crate) const fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live)
    }

    pub(crate) const fn is_quiet(&self) -> bool {
        matches!(self.phase, Phase::Quiet)
    }

    pub(crate) fn on(&mut self, now: Micros, event: ReleaseEvent) -> ReleaseReaction {
        use ReleaseEvent as Event;
        match (&mut self.phase, event) {
            (Phase::Live, Event::Ended { peer, fence_at }) => {
                self.phase = Phase::Waiting { here: false, peer, fence_at };
                return ReleaseReaction::Nothing;
            }
            (Phase::Live | Phase::Quiet, _) | (Phase::Waiting { .. }, Event::Ended { .. }) => {
                return ReleaseReaction::Nothing;
            }
            (Phase::Waiting { here, .. }, Event::QuietHere) => *here = true,
            (Phase::Waiting { peer, .. }, Event::Drained) => *peer = PeerWrites::Over,
            (Phase::Waiting { peer, .. }, Event::LanesDownBefore(down)) => {
                if matches!(peer, PeerWrites::OnLanesBefore(serial) if *serial <= down) {
                    *peer = PeerWrites::Over;
                }
            }
            (Phase::Waiting { fence_at, .. }, Event::Tick)
                if now >= *fence_at && !mutations::is(Mutation::NeverFence) =>
            {
                // Once: lanes that come up later carry nothing of this room.
                *fence_at = Micros(u64::MAX);
                return ReleaseReaction::Fence;
            }
            (Phase::Waiting { .. }, Event::Tick) => {}
        }
        if matches!(self.phase, Phase::Waiting { here: true, peer: PeerWrites::Over, .. }) {
            self.phase = Phase::Quiet;
            return ReleaseReaction::Quiet;
        }
        ReleaseReaction::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FENCE_AT: Micros = Micros(500_000);

    fn ended(peer: PeerWrites) -> Release {
        let mut release = Release::new();
        let event = ReleaseEvent::Ended { peer, fence_at: FENCE_AT };
        assert_eq!(release.on(Micros(0), event), ReleaseReaction::Nothing);
        release
    }

    #[test]
    fn nothing_is_quiet_while_the_room_is_live() {
        let mut release = Release::new();
        let events =
            [ReleaseEvent::QuietHere, ReleaseEvent::Drained, ReleaseEvent::LanesDownBefore(9)];
        for event in events {
            assert_eq!(release.on(FENCE_AT, event), ReleaseReaction::Nothing);
        }
        assert_eq!(release, Release::new());
    }

    #[test]
    fn pages_the_peer_can_write_need_its_word_or_every_old_lane_down() {
        for over in [ReleaseEvent::Drained, ReleaseEvent::LanesDownBefore(3)] {
            let mut release = ended(PeerWrites::OnLanesBefore(3));
            let now = Micros(1);
            assert_eq!(release.on(now, ReleaseEvent::QuietHere), ReleaseReaction::Nothing);
            let some = ReleaseEvent::LanesDownBefore(2);
            assert_eq!(release.on(now, some), ReleaseReaction::Nothing, "one old lane stands");
            assert_eq!(release.on(now, over), ReleaseReaction::Quiet);
        }
    }

    #[test]
    fn the_peers_word_alone_is_not_enough() {
        let mut release = ended(PeerWrites::OnLanesBefore(3));
        assert_eq!(release.on(Micros(1), ReleaseEvent::Drained), ReleaseReaction::Nothing);
        assert_eq!(release.on(Micros(1), ReleaseEvent::QuietHere), ReleaseReaction::Quiet);
    }

    #[test]
    fn a_silent_peer_is_fenced_off_once_when_the_time_is_over() {
        let mut release = ended(PeerWrites::OnLanesBefore(1));
        assert_eq!(release.on(Micros(499_999), ReleaseEvent::Tick), ReleaseReaction::Nothing);
        assert_eq!(release.on(FENCE_AT, ReleaseEvent::Tick), ReleaseReaction::Fence);
        assert_eq!(release.on(Micros(900_000), ReleaseEvent::Tick), ReleaseReaction::Nothing);
    }

    #[test]
    fn pages_are_handed_out_once() {
        let mut release = ended(PeerWrites::Over);
        assert_eq!(release.on(Micros(1), ReleaseEvent::QuietHere), ReleaseReaction::Quiet);
        for event in [ReleaseEvent::QuietHere, ReleaseEvent::Drained, ReleaseEvent::Tick] {
            assert_eq!(release.on(FENCE_AT, event), ReleaseReaction::Nothing);
        }
    }
}
