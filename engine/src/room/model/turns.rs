//! What comes of a step; and the model, as `stateright` takes it.

use stateright::{Model, Property};

use super::setup::Setup;
use super::steps::Step;
use super::world::{FENCE_AT, NOW, Turn, World, Wrong};
use crate::failure::FailureKind;
use crate::ids::{Role, RoomState};
use crate::room::receiver::ReceiverEvent;
use crate::room::release::ReleaseEvent;
use crate::room::sender::SenderEvent;

impl Turn<'_> {
    pub(super) fn take(&mut self, step: Step) {
        match step {
            Step::Grant { plan } => self.grant(plan),
            Step::Open { plan } => self.open(plan),
            Step::Finish { plan } => self.finish(plan),
            Step::Verified { life } => self.step_receiver(NOW, life, ReceiverEvent::Verified),
            Step::AbortSender { plan } => {
                self.world.faults.aborts -= 1;
                self.step_sender(NOW, plan, SenderEvent::Fault(FailureKind::Aborted));
            }
            Step::AbortReceiver { life } => {
                self.world.faults.aborts -= 1;
                self.step_receiver(NOW, life, ReceiverEvent::Fault(FailureKind::Aborted));
            }
            Step::Post { plan, lane } => self.post(plan, lane),
            Step::Repost { peer, lane } => self.repost(peer, lane),
            Step::Begin { lane } => self.begin(lane),
            Step::Leave { lane } => self.leave(lane),
            Step::Land { lane } => self.land(lane),
            Step::Acknowledge { lane } => self.acknowledge(lane),
            Step::LaneUp { lane } => {
                if let Some(peer) = self.world.in_session(Role::Receiver) {
                    self.lane_up(Role::Receiver, peer, lane);
                }
            }
            Step::LaneDown { role, lane, fault } => {
                self.world.faults.lanes -= u8::from(fault);
                self.lane_down(role, lane);
            }
            Step::Deliver { role, at } => self.deliver(role, at),
            Step::SessionDown { role, fault } => {
                self.world.faults.sessions -= u8::from(fault);
                self.session_down(role);
            }
            Step::SessionUp { role } => self.session_up(role),
            Step::PeerGone { role, peer, fault } => {
                self.world.faults.give_ups -= u8::from(fault);
                let kind = if fault { FailureKind::PeerSilent } else { FailureKind::PeerRestarted };
                self.peer_gone(role, peer, kind);
            }
            Step::Crash { role } => self.crash(role),
            Step::Unexplained { plan } => {
                if let Some(room) = self.world.send_room(plan) {
                    room.suspect = false;
                }
                self.step_sender(NOW, plan, SenderEvent::Fault(FailureKind::GrantRevoked));
            }
            Step::SenderDeadline { plan } => {
                if let Some(room) = self.world.send_room(plan) {
                    let at = room.core.deadline();
                    self.step_sender(at, plan, SenderEvent::Tick);
                }
            }
            Step::ReceiverDeadline { life } => {
                if let Some(room) = self.world.recv_room(life) {
                    let at = room.core.deadline();
                    self.step_receiver(at, life, ReceiverEvent::Tick);
                }
            }
            Step::SenderFence { plan } => self.sender_fence_tick(plan),
            Step::ReceiverFence { life } => self.step_release(FENCE_AT, life, ReleaseEvent::Tick),
        }
        self.settle_sources();
    }

    /// Promise 6, of one step.
    fn compare(&mut self, before: &World) {
        let rank = |state: RoomState| match state {
            RoomState::Bootstrapping => 0,
            RoomState::WaitingForInput => 1,
            RoomState::Transferring => 2,
            RoomState::Failed | RoomState::Success => 3,
        };
        let mut wrong = None;
        for (before, after) in before.sending.iter().zip(&self.world.sending) {
            let (Some(before), Some(after)) = (before, after) else { continue };
            if rank(after.core.state()) < rank(before.core.state()) {
                wrong = Some(Wrong::Backwards);
            } else if !before.core.is_live() && before.core != after.core {
                wrong = Some(Wrong::ChangedAfterTheEnd);
            }
        }
        for before in &before.receiving {
            let Some(after) = self.world.recv_room(before.life) else { continue };
            if rank(after.core.state()) < rank(before.core.state()) {
                wrong = Some(Wrong::Backwards);
            } else if !before.core.is_live() && before.core != after.core {
                wrong = Some(Wrong::ChangedAfterTheEnd);
            }
        }
        if let Some(wrong) = wrong {
            self.wrong(wrong);
        }
    }
}

impl Model for Setup {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        if world.witness.wrong.is_none() {
            self.progress(world, steps);
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut turn = Turn { setup: self, world: last.clone() };
        self.with_mutation(|| turn.take(step));
        turn.compare(last);
        Some(turn.world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        super::promises::promises(self)
    }
}
