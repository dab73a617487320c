//! Lanes that come up and go down, and what becomes of the writes that were on them.

use super::Worker;
use super::mail::ToControl;
use super::peers::LostFrame;
use super::sending::REPLAYS_MAX;
use crate::fabric::{DownLane, Event, Fabric, NewLane, PeerIndex, Posting, RoomTag, WorkStatus};
use crate::failure::FailureKind;
use crate::ids::{Epoch, Incarnation, LaneId, Micros};
use crate::mutations::{self, Mutation};
use crate::room::links::{Asked, Fate, Tally};
use crate::room::release::{PeerWrites, ReleaseReaction};
use crate::wire::frame::RejectReason;
use crate::wire::message::Message;

impl<F: Fabric> Worker<F> {
    pub(super) fn lane_up(&mut self, peer: Incarnation, mut lane: NewLane) {
        let index = self.peers.find(peer);
        let known = index.and_then(|index| Some((index, self.peers.get_mut(index)?)));
        let cause = match known {
            Some((index, known)) => {
                if known.links.up(lane.id) {
                    let say = lane.say.take();
                    self.fabric.add_lane(index, lane);
                    // Behind the revocations that went before, and only now that it is counted here.
                    if let Some(message) = say {
                        self.peers.tell(index, message);
                    }
                    return;
                }
                "the peer gave it up before it was up here"
            }
            None => "its peer is gone",
        };
        let (lane, cause) = (lane.number, cause.to_owned());
        self.to_control.push_back(ToControl::LaneDown { peer, lane, cause });
    }

    pub(super) fn lane_down(&mut self, now: Micros, down: DownLane) {
        let DownLane { peer, id, number, cause, culprit, lost, tally } = down;
        self.stats.lanes_lost += 1;
        if let Some((tag, status)) = culprit
            && let Some(kind) = status.blames_room()
        {
            let causes = vec![cause.clone()];
            if mutations::is(Mutation::BlameAll) {
                for (_, posting) in &lost {
                    self.suspect(now, posting.tag, Some(number), kind, causes.clone());
                }
            }
            self.suspect(now, tag, Some(number), kind, causes);
        }
        let Some(known) = self.peers.get_mut(peer) else { return };
        let incarnation = known.incarnation;
        let rooms = &mut self.sending.rooms;
        let lost = lost.into_iter().map(|(seq, posting)| {
            let stands = rooms.get_exact(posting.tag.slot, posting.tag.generation).is_some()
                || mutations::is(Mutation::ReplayEnded);
            let over = LostFrame::Over(posting.frame.epoch);
            (seq, if stands { LostFrame::Standing(posting) } else { over })
        });
        let answer = known.links.down(id, lost.collect(), tally);
        if !known.gone {
            self.peers.tell(peer, Message::LaneLost { lane: id });
            if let Some(tally) = answer {
                self.peers.tell(peer, Message::LaneTally { lane: id, tally: Some(tally) });
            }
        }
        let report = ToControl::LaneDown { peer: incarnation, lane: number, cause };
        self.to_control.push_back(report);
        if mutations::is(Mutation::ReplayBeforeTally) {
            self.told_lane_tally(now, peer, id, Some(&Tally::default()));
        }
        self.release_receivers_of(now, peer);
        self.bury(peer);
    }

    /// A frame of a room names memory that is not registered, here or at the peer.
    pub(super) fn unsendable(&mut self, now: Micros, tag: RoomTag, status: WorkStatus, addr: u64) {
        let whose =
            if status == WorkStatus::LocalProtection { "this engine's" } else { "the peer's" };
        let cause =
            format!("a page of it lies at {addr:#x}, which is not in {whose} registered memory");
        if let Some(kind) = status.blames_room() {
            self.suspect(now, tag, None, kind, vec![cause]);
        }
    }

    /// The peer's end of a lane is down.
    pub(super) fn told_lane_lost(&mut self, peer: PeerIndex, lane: LaneId) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        match known.links.asked(lane) {
            Asked::Close => {
                self.fabric.close_lane(peer, lane, "the peer closed it");
                if mutations::is(Mutation::TallyBeforeDown) {
                    let tally = Some(Tally::default());
                    self.peers.tell(peer, Message::LaneTally { lane, tally });
                }
            }
            // Once a session: an answer is longer than its question.
            Asked::Answer(_) if !known.may_answer(lane) => self.stats.late_events += 1,
            Asked::Answer(tally) => self.peers.tell(peer, Message::LaneTally { lane, tally }),
        }
    }

    /// The peer says how far it counted on a lane that is down at both ends.
    pub(super) fn told_lane_tally(
        &mut self,
        now: Micros,
        peer: PeerIndex,
        lane: LaneId,
        tally: Option<&Tally>,
    ) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        let mut fates = Vec::new();
        if !known.links.told(lane, tally, |frame, fate| fates.push((frame, fate))) {
            // Nothing was lost with it, or it was answered before.
            self.stats.late_events += u64::from(!known.links.was_here(lane));
            return;
        }
        let mut again: Vec<Posting> = Vec::new();
        let mut over: Vec<Epoch> = Vec::new();
        for (frame, fate) in fates {
            let posting = match frame {
                LostFrame::Standing(posting) => posting,
                LostFrame::Over(epoch) => {
                    if !over.contains(&epoch) {
                        over.push(epoch);
                    }
                    continue;
                }
            };
            let tag = posting.tag;
            match fate {
                Fate::Placed => {
                    if !posting.again {
                        self.event(now, Event::Sent { tag });
                    }
                    let landed = posting.landed();
                    self.event(now, Event::Acked { tag, landed });
                }
                // The receiver's reason is on its way, or was here.
                Fate::Rejected => self.rejected(now, tag, None, RejectReason::Revoked),
                Fate::Again if posting.tries == REPLAYS_MAX => {
                    let cause = format!(
                        "a write was sent again {REPLAYS_MAX} times, and its lane went down each time"
                    );
                    self.suspect(now, tag, None, FailureKind::LaneLost, vec![cause]);
                }
                Fate::Again => again.push(Posting { tries: posting.tries + 1, ..posting }),
                Fate::Unknown => {
                    let cause = "a lane went down with writes of this room under way, and the peer \
                                 does not know which of them it placed";
                    self.suspect(now, tag, None, FailureKind::LaneLost, vec![cause.to_owned()]);
                }
            }
        }
        for posting in again.into_iter().rev() {
            self.replay(peer, posting);
        }
        for epoch in over {
            self.say_drained(peer, epoch);
        }
    }

    /// Posts a frame again that went down with a lane, if its room still stands.
    pub(super) fn replay(&mut self, peer: PeerIndex, posting: Posting) {
        let tag = posting.tag;
        if mutations::is(Mutation::ReplayEnded) {
            return self.post_first(peer, posting);
        }
        let Some(room) = self.sending.rooms.get_exact(tag.slot, tag.generation) else { return };
        if !room.core.may_replay() || room.is_suspect() {
            return;
        }
        room.replayed += 1;
        self.stats.frames_replayed += 1;
        self.post_first(peer, posting);
    }

    /// Posts a frame before all others of its peer.
    pub(super) fn post_first(&mut self, peer: PeerIndex, posting: Posting) {
        if let Some(known) = self.peers.get_mut(peer).filter(|known| !known.gone) {
            known.returned.push_front(posting);
            if !self.posting.contains(&peer) {
                self.posting.push(peer);
            }
        }
    }

    /// Tells the receiver that nothing of a failed room is on its way any more, once that is so: its
    /// sources are quiet, and of lanes that went down with its writes the receiver's end is closed. Of
    /// epochs from before a peer was given up nobody can tell; the receiver closes its lanes for them.
    pub(super) fn say_drained(&mut self, peer: PeerIndex, epoch: Epoch) {
        let Some(known) = self.peers.get(peer) else { return };
        if (known.forgotten.is_none_or(|forgotten| epoch > forgotten)
            || mutations::is(Mutation::DrainedOfForgotten))
            && !self.sending.has_epoch(peer, epoch)
            && (!known.links.holds(|frame| frame.epoch() == epoch)
                || mutations::is(Mutation::DrainedUnaccounted))
        {
            self.peers.tell(peer, Message::Drained { epoch });
        }
    }

    /// What a peer may still write in the pages of a room that ends now.
    pub(super) fn peer_writes(&self, peer: PeerIndex, done: bool) -> PeerWrites {
        if mutations::is(Mutation::ReleaseUndrained) {
            return PeerWrites::Over;
        }
        match self.peers.get(peer) {
            Some(known) if !done && !self.fabric.is_guarded(peer) && !known.links.none_stand() => {
                PeerWrites::OnLanesBefore(known.links.next_serial())
            }
            _ => PeerWrites::Over,
        }
    }

    /// Does what a room's release asks for; says whether its pages are quiet.
    pub(super) fn react_release(
        &mut self,
        peer: PeerIndex,
        source: Option<RoomTag>,
        reaction: ReleaseReaction,
    ) -> bool {
        if reaction == ReleaseReaction::Fence {
            let cause = "fenced: the peer did not let go of the pages of a room that had ended";
            let closed = self.fabric.fence(peer, source, cause);
            self.stats.fences += u64::from(closed > 0);
        }
        reaction == ReleaseReaction::Quiet
    }
}
