//! The decode engine's rooms: `worker::receiving` without memory, texts and clocks.

use super::sending::writes;
use super::setup::Rule;
use super::world::{
    CELLS, FENCE_AT, Frame, Life, NOW, RECEIVER_DEADLINE, RecvRoom, Turn, Verdict, Word, World,
    Wrong, epoch, side,
};
use crate::failure::FailureKind;
use crate::ids::{Micros, Role};
use crate::room::receiver::{Receiver, ReceiverEvent, ReceiverReaction};
use crate::room::release::{PeerWrites, Release, ReleaseEvent, ReleaseReaction};

const HERE: Role = Role::Receiver;

impl World {
    pub(super) fn recv_room(&mut self, life: Life) -> Option<&mut RecvRoom> {
        self.receiving.iter_mut().find(|room| room.life == life)
    }

    /// `Worker::slot_of`.
    fn has_room(&mut self, peer: u8, life: Life) -> bool {
        self.recv_room(life).is_some_and(|room| room.peer == peer)
    }
}

impl Turn<'_> {
    fn page_of(&self, life: Life) -> u8 {
        self.setup.plans[usize::from(self.world.plan_of(life))].page
    }

    /// `Worker::grant`.
    pub(super) fn grant(&mut self, plan: u8) {
        let Some(peer) = self.world.peer_of(HERE) else { return };
        let life = self.world.witness.receivers.len() as Life;
        self.world.witness.receivers.push((plan, Verdict::Live));
        let core = Receiver::new(epoch(life), RECEIVER_DEADLINE);
        let release = Release::new();
        self.world.receiving.push(RecvRoom { life, core, peer, release, fenced: false });
        self.tell(HERE, peer, Word::Grant { life });
    }

    /// A frame has come whole. Without a gate its bytes are in the page, whatever this side thinks.
    pub(super) fn arrived(&mut self, peer: u8, frame: Frame) -> bool {
        let live = |room: &mut RecvRoom| room.core.is_live() && room.peer == peer;
        let counts = self.world.recv_room(frame.life).is_some_and(live);
        if self.setup.guarded && !counts {
            return false;
        }
        let page = self.page_of(frame.life);
        if self.world.owner(self.setup, page) == Some(frame.life) {
            let bytes = (!frame.filler).then_some(frame.life);
            self.world.pages[usize::from(page)][usize::from(frame.cell)] = bytes;
        } else {
            self.wrong(Wrong::LandedAfterRelease);
        }
        if counts {
            self.step_receiver(NOW, frame.life, ReceiverEvent::Placed(writes(1)));
        }
        true
    }

    /// `Worker::told_finished`.
    pub(super) fn told_finished(&mut self, peer: u8, life: Life, sent: u64) {
        if !self.world.has_room(peer, life) {
            return self.answer_unknown(peer, life);
        }
        let (epoch, sent, verify) = (epoch(life), writes(sent), self.setup.verify);
        self.step_receiver(NOW, life, ReceiverEvent::ToldFinished { epoch, sent, verify });
    }

    /// `Worker::receiver_told_failed`.
    pub(super) fn receiver_told_failed(&mut self, peer: u8, life: Life) {
        if !self.world.has_room(peer, life) {
            return self.answer_unknown(peer, life);
        }
        self.step_receiver(NOW, life, ReceiverEvent::ToldFailed(epoch(life)));
    }

    /// `Worker::answer_unknown`.
    fn answer_unknown(&mut self, peer: u8, life: Life) {
        let verdict = self.find_verdict(HERE, peer, life);
        let answer = verdict.unwrap_or(Word::Failed { life, to: Role::Sender });
        self.tell(HERE, peer, answer);
    }

    /// `Worker::step_receiver` and `react_receiver`.
    pub(super) fn step_receiver(&mut self, now: Micros, life: Life, event: ReceiverEvent) {
        let Some(room) = self.world.recv_room(life) else { return };
        let peer = room.peer;
        let failed = Word::Failed { life, to: Role::Sender };
        let (verdict, word, tell) = match room.core.on(now, event) {
            // A checksum is taken in its own time.
            ReceiverReaction::Nothing | ReceiverReaction::Late | ReceiverReaction::Verify => return,
            ReceiverReaction::Repeat => return self.answer_unknown(peer, life),
            ReceiverReaction::Done(_) => (Verdict::Done, Word::Landed { life }, true),
            ReceiverReaction::FailAsTold { answer } => (Verdict::Failed, failed, answer),
            ReceiverReaction::Fail(_) => (Verdict::Failed, failed, true),
        };
        self.keep_verdict(HERE, peer, life, word.clone());
        self.end_receiver(life, verdict);
        if tell {
            self.tell(HERE, peer, word);
        }
        let ended =
            ReleaseEvent::Ended { peer: self.peer_writes(peer, verdict), fence_at: FENCE_AT };
        self.step_release(NOW, life, ended);
        // `Fabric::revoke`: quiet here at once, which is when it is most dangerous.
        self.step_release(NOW, life, ReleaseEvent::QuietHere);
    }

    /// `RoomCell::end`, seen by the observer: done means that every byte counted is there.
    fn end_receiver(&mut self, life: Life, verdict: Verdict) {
        let (_, witness) = &mut self.world.witness.receivers[usize::from(life)];
        let before = std::mem::replace(witness, verdict);
        if before != Verdict::Live {
            self.wrong(Wrong::EndedTwice);
        }
        let counted = self.world.recv_room(life).map_or(0, |room| room.core.arrived().page_writes);
        let page = self.world.pages[usize::from(self.page_of(life))];
        let there = page.iter().filter(|cell| **cell == Some(life)).count() as u64;
        if verdict == Verdict::Done && there != counted {
            self.wrong(Wrong::DoneWithoutItsBytes);
        }
    }

    /// `Worker::peer_writes`.
    fn peer_writes(&self, peer: u8, verdict: Verdict) -> PeerWrites {
        let links = &self.world.engines[side(HERE)].peers[usize::from(peer)].links;
        let over = verdict == Verdict::Done || self.setup.guarded || links.none_stand();
        if over || self.setup.broken == Some(Rule::WaitForWrites) {
            PeerWrites::Over
        } else {
            PeerWrites::OnLanesBefore(links.next_serial())
        }
    }

    /// `Worker::told_drained`.
    pub(super) fn told_drained(&mut self, peer: u8, life: Life) {
        if self.world.has_room(peer, life) {
            self.step_release(NOW, life, ReleaseEvent::Drained);
        }
    }

    /// `Worker::release_receivers_of`.
    pub(super) fn release_receivers_of(&mut self, peer: u8) {
        let down = self.world.peer(HERE, peer).links.down_before();
        let of_peer = self.world.receiving.iter().filter(|room| room.peer == peer);
        for life in of_peer.map(|room| room.life).collect::<Vec<_>>() {
            self.step_release(NOW, life, ReleaseEvent::LanesDownBefore(down));
        }
    }

    /// `Worker::step_release` and `react_release`.
    pub(super) fn step_release(&mut self, now: Micros, life: Life, event: ReleaseEvent) {
        let Some(room) = self.world.recv_room(life) else { return };
        let peer = room.peer;
        match room.release.on(now, event) {
            ReleaseReaction::Nothing => {}
            ReleaseReaction::Fence => {
                room.fenced = true;
                self.fence(HERE, peer);
            }
            ReleaseReaction::Quiet => {
                // The page is its owner's, who will overwrite it.
                let page = self.page_of(life);
                self.world.pages[usize::from(page)] = [None; CELLS];
                self.world.receiving.retain(|room| room.life != life);
            }
        }
    }

    /// `Worker::fail_receivers_of`.
    pub(super) fn fail_receivers_of(&mut self, peer: u8, kind: FailureKind) {
        let of_peer = self.world.receiving.iter().filter(|room| room.peer == peer);
        for life in of_peer.map(|room| room.life).collect::<Vec<_>>() {
            self.step_receiver(NOW, life, ReceiverEvent::Fault(kind));
        }
    }

    /// `Worker::resume_receivers`.
    pub(super) fn resume_receivers(&mut self, peer: u8) {
        let live = |room: &&RecvRoom| room.peer == peer && room.core.is_live();
        let lives: Vec<Life> = self.world.receiving.iter().filter(live).map(|r| r.life).collect();
        for life in lives {
            self.tell(HERE, peer, Word::Grant { life });
        }
    }

    /// An engine crashes; the decode engine's pages go with it.
    pub(super) fn lose_rooms(&mut self, role: Role) {
        if role == Role::Sender {
            return self.lose_senders();
        }
        for room in std::mem::take(&mut self.world.receiving) {
            let (_, verdict) = &mut self.world.witness.receivers[usize::from(room.life)];
            if *verdict == Verdict::Live {
                *verdict = Verdict::Lost;
            }
        }
        self.world.pages.fill([None; CELLS]);
    }
}
