//! What can happen next.

use super::setup::{Channel, Plan, Setup, Ticks};
use super::world::{
    Bound, End, FENCE_AT, Lane, Life, NOW, RecvRoom, SendRoom, Turn, Verdict, World, side,
};
use crate::ids::Role;
use crate::room::receiver::ReceiverEvent;
use crate::room::release::{Release, ReleaseEvent, ReleaseReaction};
use crate::room::sender::SenderEvent;

/// One thing that happens. Lanes, plans, grants and peers by number; *unexplained* stays a refused write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Grant { plan: u8 },
    Open { plan: u8 },
    Finish { plan: u8 },
    Verified { life: Life },
    AbortSender { plan: u8 },
    AbortReceiver { life: Life },
    Post { plan: u8, lane: u8 },
    Repost { peer: u8, lane: u8 },
    Begin { lane: u8 },
    Leave { lane: u8 },
    Land { lane: u8 },
    Acknowledge { lane: u8 },
    LaneUp { lane: u8 },
    LaneDown { role: Role, lane: u8, fault: bool },
    Deliver { role: Role, at: u8 },
    SessionDown { role: Role, fault: bool },
    SessionUp { role: Role },
    PeerGone { role: Role, peer: u8, fault: bool },
    Crash { role: Role },
    Unexplained { plan: u8 },
    SenderDeadline { plan: u8 },
    ReceiverDeadline { life: Life },
    SenderFence { plan: u8 },
    ReceiverFence { life: Life },
}

const ROLES: [Role; 2] = [Role::Sender, Role::Receiver];

impl Setup {
    /// What goes on by itself, deadlines included.
    pub(super) fn progress(&self, world: &World, steps: &mut Vec<Step>) {
        self.with_mutation(|| {
            self.callers(world, steps);
            self.fabric(world, steps);
            self.control(world, steps);
            if self.ticks == Ticks::Any || steps.iter().all(Step::is_fault) {
                deadlines(world, steps);
            }
        });
    }

    fn plans(&self) -> std::ops::Range<u8> {
        0..self.plans.len() as u8
    }

    fn callers(&self, world: &World, steps: &mut Vec<Step>) {
        let known = |plan: u8| &self.plans[usize::from(plan)];
        for plan in self.plans() {
            let Plan { id, page, source, .. } = *known(plan);
            let of_id = |&earlier: &u8| known(earlier).id == id;
            // An id is free when its room has ended, pages when their room is released.
            let life = |plan| world.witness.receivers.iter().position(|life| life.0 == plan);
            let over_there = |earlier: u8| {
                let live = |room: &RecvRoom| {
                    life(earlier) == Some(usize::from(room.life)) && room.core.is_live()
                };
                life(earlier).is_some() && !world.receiving.iter().any(live)
            };
            let in_page = |&earlier: &u8| known(earlier).page == page;
            let can_grant = life(plan).is_none()
                && world.peer_of(Role::Receiver).is_some()
                && world.owner(self, page).is_none()
                && (0..plan).filter(in_page).all(|earlier| life(earlier).is_some())
                && (0..plan).filter(of_id).all(over_there);
            if can_grant {
                steps.push(Step::Grant { plan });
            }
            let opened = |plan: u8| world.witness.senders[usize::from(plan)].0 != Verdict::Unborn;
            let room = |plan: u8| world.sending[usize::from(plan)].as_ref();
            let live = |plan: u8| room(plan).is_some_and(|room| room.core.is_live());
            let of_source = |&earlier: &u8| known(earlier).source == source;
            let can_open = !opened(plan)
                && (0..plan).filter(of_id).all(|earlier| opened(earlier) && !live(earlier))
                && (0..plan).filter(of_source).all(|p| opened(p) && room(p).is_none());
            if can_open {
                steps.push(Step::Open { plan });
            }
            let may_finish = |room: &SendRoom| room.bound.is_some() && !room.finish_asked;
            if self.fine && live(plan) && room(plan).is_some_and(may_finish) {
                steps.push(Step::Finish { plan });
            }
            if live(plan) && world.faults.aborts > 0 {
                steps.push(Step::AbortSender { plan });
            }
        }
        for RecvRoom { life, core, .. } in &world.receiving {
            if core.is_live() && world.faults.aborts > 0 {
                steps.push(Step::AbortReceiver { life: *life });
            }
            let mut verified = core.clone();
            verified.on(NOW, ReceiverEvent::Verified);
            if verified != *core {
                steps.push(Step::Verified { life: *life });
            }
        }
    }

    fn fabric(&self, world: &World, steps: &mut Vec<Step>) {
        for (plan, room) in world.sending.iter().enumerate() {
            let Some(SendRoom { core, bound: Some(Bound { peer, .. }), posted, suspect, .. }) =
                room
            else {
                continue;
            };
            let returned = &world.engines[0].peers[usize::from(*peer)].returned;
            let more = core.may_post()
                && !suspect
                && *posted < self.plans[plan].frames
                && returned.is_empty();
            if more {
                let lanes = distinct(world, Turn::open_lanes(world, *peer));
                steps.extend(lanes.map(|lane| Step::Post { plan: plan as u8, lane }));
            }
        }
        for (peer, known) in world.engines[0].peers.iter().enumerate() {
            if !known.returned.is_empty() {
                let lanes = distinct(world, Turn::open_lanes(world, peer as u8));
                steps.extend(lanes.map(|lane| Step::Repost { peer: peer as u8, lane }));
            }
        }
        let standing = |role: Role| {
            let up = |lane: &&Lane| lane.ends[side(role)].peer().is_some();
            world.lanes.iter().filter(up).count()
        };
        let missing = ROLES.into_iter().any(|role| standing(role) < usize::from(self.lanes));
        let next = world.lanes.iter().position(|lane| lane.ends[1] == End::Unborn);
        if let (true, Some(lane), Some(_)) = (missing, next, world.in_session(Role::Receiver)) {
            steps.push(Step::LaneUp { lane: lane as u8 });
        }
        for (at, lane) in world.lanes.iter().enumerate() {
            let [prefill, decode] = lane.ends;
            let at = at as u8;
            if matches!(prefill, End::Up { .. }) && !lane.waiting.is_empty() {
                steps.push(Step::Begin { lane: at });
            }
            if prefill.peer().is_some() && lane.ledger.iter().any(|(.., left)| !left) {
                steps.push(Step::Leave { lane: at });
            }
            if decode.peer().is_some() && !lane.wire.is_empty() {
                steps.push(Step::Land { lane: at });
            }
            let landed = |(seq, ..): &(u64, _, _)| *seq <= lane.tally.completed;
            if prefill.peer().is_some() && lane.ledger.front().is_some_and(landed) {
                steps.push(Step::Acknowledge { lane: at });
            }
            for role in ROLES {
                // A write that nobody answers ends its lane.
                let unanswered =
                    role == Role::Sender && decode == End::Down && !lane.ledger.is_empty();
                let fault = match lane.ends[side(role)] {
                    End::Up { .. } if unanswered => false,
                    End::Closing { .. } => false,
                    End::Up { .. } if world.faults.lanes > 0 => true,
                    _ => continue,
                };
                steps.push(Step::LaneDown { role, lane: at, fault });
            }
        }
    }

    fn control(&self, world: &World, steps: &mut Vec<Step>) {
        for role in ROLES {
            let engine = &world.engines[side(role)];
            let words = match self.channel {
                Channel::Session => u8::from(world.hears(role)),
                Channel::Chaos => engine.inbox.len() as u8,
            };
            steps.extend((0..words).map(|at| Step::Deliver { role, at }));
            if world.is_cut_off(role) {
                steps.push(Step::SessionDown { role, fault: false });
            } else if world.in_session(role).is_some() && world.faults.sessions > 0 {
                steps.push(Step::SessionDown { role, fault: true });
            }
            if world.may_connect(role) {
                steps.push(Step::SessionUp { role });
            }
            let there = world.engines[side(role.other())].incarnation;
            for (at, peer) in engine.peers.iter().enumerate().filter(|(_, peer)| !peer.gone) {
                let fault = peer.incarnation == there;
                if !fault || world.faults.give_ups > 0 {
                    steps.push(Step::PeerGone { role, peer: at as u8, fault });
                }
            }
            if world.faults.crashes[side(role)] > 0 {
                steps.push(Step::Crash { role });
            }
        }
        for (plan, room) in world.sending.iter().enumerate() {
            if room.as_ref().is_some_and(|room| room.suspect && room.core.is_live()) {
                steps.push(Step::Unexplained { plan: plan as u8 });
            }
        }
    }
}

/// A lane on which nothing has happened is like any other one.
fn distinct(world: &World, lanes: impl Iterator<Item = u8>) -> impl Iterator<Item = u8> {
    let untouched = |lane: &Lane| lane.begun == 0 && lane.waiting.is_empty();
    let mut seen = Vec::new();
    lanes.filter(move |&at| {
        let lane = &world.lanes[usize::from(at)];
        let new = !untouched(lane) || !seen.contains(&lane.ends);
        seen.push(lane.ends);
        new
    })
}

/// Every deadline that would change something.
fn deadlines(world: &World, steps: &mut Vec<Step>) {
    let fences = |release: &Release| {
        release.clone().on(FENCE_AT, ReleaseEvent::Tick) == ReleaseReaction::Fence
    };
    for (plan, room) in world.sending.iter().enumerate() {
        let (Some(room), plan) = (room, plan as u8) else { continue };
        let mut core = room.core.clone();
        core.on(core.deadline(), SenderEvent::Tick);
        if core != room.core {
            steps.push(Step::SenderDeadline { plan });
        }
        if fences(&room.release) {
            steps.push(Step::SenderFence { plan });
        }
    }
    for room in &world.receiving {
        let mut core = room.core.clone();
        core.on(core.deadline(), ReceiverEvent::Tick);
        if core != room.core {
            steps.push(Step::ReceiverDeadline { life: room.life });
        }
        if fences(&room.release) {
            steps.push(Step::ReceiverFence { life: room.life });
        }
    }
}
