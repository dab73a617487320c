//! The fabric between the engines, and `worker::lanes` above it.

use super::sending::writes;
use super::setup::Rule;
use super::world::{End, Frame, Lane, Life, LostFrame, NOW, Turn, Word, Wrong, lane_id, side};
use crate::ids::Role;
use crate::room::links::{Asked, Fate, Tally};
use crate::room::sender::SenderEvent;

impl Turn<'_> {
    pub(super) fn lane(&mut self, lane: u8) -> &mut Lane {
        &mut self.world.lanes[usize::from(lane)]
    }

    /// `Fabric::post`.
    pub(super) fn put(&mut self, lane: u8, frame: Frame) {
        self.lane(lane).waiting.push_back(frame);
    }

    /// Where steps are coarse, a frame leaves when it is posted.
    pub(super) fn hurry(&mut self, lane: u8) {
        if !self.setup.fine {
            self.begin(lane);
            self.leave(lane);
        }
    }

    /// The first frame that waits is begun: from now on it can land, all of it or a part. A part is
    /// not told apart: whatever a part could spoil, the whole can.
    pub(super) fn begin(&mut self, lane: u8) {
        let Some(frame) = self.lane(lane).waiting.pop_front() else { return };
        if self.world.send_room(frame.room).is_none() {
            self.wrong(Wrong::ReadAfterRelease);
        }
        let lane = self.lane(lane);
        lane.begun += 1;
        lane.ledger.push_back((lane.begun, frame, false));
        lane.wire.push_back(frame);
    }

    /// The first begun frame is known to have left: `Event::Sent`, unless it was said before.
    pub(super) fn leave(&mut self, lane: u8) {
        let ledger = &mut self.lane(lane).ledger;
        let Some((_, frame, left)) = ledger.iter_mut().find(|(_, _, left)| !left) else { return };
        *left = true;
        let frame = *frame;
        if !frame.again {
            self.step_sender(NOW, frame.room, SenderEvent::Sent);
        }
    }

    /// `Fabric::retract`: what is not begun is dropped. A fabric that is guarded (`tcp`) fills up the rest
    /// of a frame; not of one that is sent again, which the receiver may count: its lane is closed.
    pub(super) fn retract(&mut self, room: u8) {
        let fills_all = self.setup.broken == Some(Rule::FillNoFrameAgain);
        for at in 0..self.world.lanes.len() as u8 {
            let guarded = self.setup.guarded;
            let lane = self.lane(at);
            lane.waiting.retain(|frame| frame.room != room);
            let leaving =
                lane.ledger.iter_mut().filter(|(_, frame, left)| frame.room == room && !left);
            for (_, frame, left) in leaving.filter(|_| guarded) {
                if frame.again && !fills_all {
                    if let End::Up { peer } = lane.ends[side(Role::Sender)] {
                        lane.ends[side(Role::Sender)] = End::Closing { peer };
                    }
                    continue;
                }
                *left = true;
                let on_wire = lane.wire.iter_mut().find(|sent| *sent == frame);
                on_wire.into_iter().for_each(|frame| frame.filler = true);
            }
        }
    }

    /// The first frame on the wire lands, and is counted. That the two are apart (RDMA counts what its
    /// completion queue says) makes no difference: a lane's end is down only when all is counted.
    pub(super) fn land(&mut self, lane: u8) {
        let Some(peer) = self.lane(lane).ends[side(Role::Receiver)].peer() else { return };
        let Some(frame) = self.lane(lane).wire.pop_front() else { return };
        self.lane(lane).tally.completed += 1;
        if !self.arrived(peer, frame) {
            let tally = &mut self.lane(lane).tally;
            tally.rejected.push(tally.completed);
        }
    }

    /// What landed is acknowledged, and what was drained refused.
    pub(super) fn acknowledge(&mut self, lane: u8) {
        let Tally { completed, rejected } = self.lane(lane).tally.clone();
        while let Some((seq, frame, left)) =
            self.lane(lane).ledger.pop_front_if(|(seq, ..)| *seq <= completed)
        {
            if !left && !frame.again {
                self.step_sender(NOW, frame.room, SenderEvent::Sent);
            }
            if rejected.contains(&seq) {
                self.suspect(frame.room);
            } else {
                self.step_sender(NOW, frame.room, SenderEvent::Acked(writes(1)));
            }
        }
    }

    /// `Worker::suspect`.
    fn suspect(&mut self, room: u8) {
        if let Some(room) = self.world.send_room(room).filter(|room| room.core.is_live()) {
            room.suspect = true;
        }
    }

    /// `Worker::lane_up`. The control plane makes lanes over a session.
    pub(super) fn lane_up(&mut self, role: Role, peer: u8, lane: u8) {
        if self.lane(lane).ends[side(role)] != End::Unborn {
            return;
        }
        let up = self.world.peer(role, peer).links.up(lane_id(lane));
        self.lane(lane).ends[side(role)] = if up { End::Up { peer } } else { End::Down };
        if role == Role::Receiver && up {
            self.tell(role, peer, Word::LaneReady { lane });
            if self.setup.broken == Some(Rule::LanesAfterWords)
                && let Some(peer) = self.world.in_session(Role::Sender)
            {
                self.lane_up(Role::Sender, peer, lane);
            }
        }
    }

    /// `Worker::lane_down`: an end is closed and quiet, and what came before was told.
    pub(super) fn lane_down(&mut self, role: Role, lane: u8) {
        let Some(peer) = self.lane(lane).ends[side(role)].peer() else { return };
        self.lane(lane).ends[side(role)] = End::Down;
        let (mut lost, mut tally) = (Vec::new(), Tally::default());
        match role {
            Role::Sender => {
                let lane = self.lane(lane);
                let (waiting, ledger) =
                    (std::mem::take(&mut lane.waiting), std::mem::take(&mut lane.ledger));
                // `Event::Returned`.
                for frame in waiting.into_iter().rev() {
                    self.replay(peer, frame);
                }
                let again = |(seq, frame, left): (u64, Frame, bool)| {
                    (seq, Frame { again: frame.again | left, ..frame })
                };
                let sending = &self.world.sending;
                let stands = |frame: Frame| match sending[usize::from(frame.room)] {
                    Some(_) => LostFrame::Standing(frame),
                    None => LostFrame::Over(frame.life),
                };
                let unanswered = ledger.into_iter().map(again);
                if self.setup.broken == Some(Rule::ReplayAfterTally) {
                    for (_, frame) in unanswered.rev() {
                        self.replay(peer, frame);
                    }
                } else {
                    lost = unanswered.map(|(seq, frame)| (seq, stands(frame))).collect();
                }
            }
            Role::Receiver => tally = self.lane(lane).tally.clone(),
        }
        let known = self.world.peer(role, peer);
        let (answer, gone) = (known.links.down(lane_id(lane), lost, tally), known.gone);
        if !gone {
            self.tell(role, peer, Word::LaneLost { lane });
            if let Some(tally) = answer {
                self.tell(role, peer, Word::LaneTally { lane, tally: Some(tally) });
            }
        }
        if role == Role::Receiver {
            self.release_receivers_of(peer);
        }
    }

    /// `Fabric::close_lane`; [`Turn::lane_down`] follows.
    fn close_lane(&mut self, role: Role, peer: u8, lane: u8) {
        let end = &mut self.lane(lane).ends[side(role)];
        if *end == (End::Up { peer }) {
            *end = End::Closing { peer };
        }
    }

    /// `Fabric::close_peer`.
    pub(super) fn close_peer(&mut self, role: Role, peer: u8) {
        for lane in 0..self.world.lanes.len() as u8 {
            self.close_lane(role, peer, lane);
        }
    }

    /// `Worker::react_release`.
    pub(super) fn fence(&mut self, role: Role, peer: u8) {
        if self.setup.broken != Some(Rule::Fence) {
            self.close_peer(role, peer);
        }
    }

    /// `Worker::told_lane_lost`.
    pub(super) fn told_lane_lost(&mut self, role: Role, peer: u8, lane: u8) {
        if self.setup.broken == Some(Rule::AnswerAfterClosing) && role == Role::Receiver {
            let tally = Some(self.lane(lane).tally.clone());
            self.tell(role, peer, Word::LaneTally { lane, tally });
        }
        match self.world.peer(role, peer).links.asked(lane_id(lane)) {
            Asked::Close => self.close_lane(role, peer, lane),
            Asked::Answer(tally) => self.tell(role, peer, Word::LaneTally { lane, tally }),
        }
    }

    /// `Worker::told_lane_tally`.
    pub(super) fn told_lane_tally(&mut self, peer: u8, lane: u8, tally: Option<Tally>) {
        let mut fates = Vec::new();
        let links = &mut self.world.peer(Role::Sender, peer).links;
        if !links.told(lane_id(lane), tally.as_ref(), |frame, fate| fates.push((frame, fate))) {
            return;
        }
        let mut again: Vec<Frame> = Vec::new();
        let mut over: Vec<Life> = Vec::new();
        for (frame, fate) in fates {
            let frame = match frame {
                LostFrame::Standing(frame) => frame,
                LostFrame::Over(life) => {
                    over.push(life);
                    continue;
                }
            };
            match fate {
                Fate::Placed => {
                    if !frame.again {
                        self.step_sender(NOW, frame.room, SenderEvent::Sent);
                    }
                    self.step_sender(NOW, frame.room, SenderEvent::Acked(writes(1)));
                }
                Fate::Again => again.push(frame),
                Fate::Rejected | Fate::Unknown => self.suspect(frame.room),
            }
        }
        for frame in again.into_iter().rev() {
            self.replay(peer, frame);
        }
        over.dedup();
        for life in over {
            self.say_drained(peer, life);
        }
    }

    /// `Worker::replay`, and what `Event::Returned` does.
    fn replay(&mut self, peer: u8, frame: Frame) {
        let stands = self.setup.broken == Some(Rule::ReplayStandingRooms)
            || self
                .world
                .send_room(frame.room)
                .is_some_and(|room| room.core.may_replay() && !room.suspect);
        let known = self.world.peer(Role::Sender, peer);
        if stands && !known.gone {
            known.returned.insert(0, frame);
        }
    }

    /// Posts a frame that a lane gave back or lost.
    pub(super) fn repost(&mut self, peer: u8, lane: u8) {
        let returned = &mut self.world.peer(Role::Sender, peer).returned;
        if !returned.is_empty() {
            let frame = returned.remove(0);
            self.put(lane, frame);
            self.hurry(lane);
        }
    }

    /// An engine crashes: its ends of lanes are gone. What left may still land.
    pub(super) fn lose_lanes(&mut self, role: Role) {
        for lane in &mut self.world.lanes {
            if lane.ends[side(role)].peer().is_some() {
                lane.ends[side(role)] = End::Down;
            }
            if role == Role::Sender {
                lane.waiting.clear();
                lane.ledger.clear();
            }
        }
    }
}
