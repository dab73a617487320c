//! The worker's receiving rooms: granted, told by their senders, asked about.

mod gate;
mod verdict;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

pub(in crate::worker) use self::gate::{Grants, named};
use super::slots::Slots;
use super::submit::{AuxSlot, GrantOrder};
use super::verify::Verify;
use super::{TABLE_FULL, Timer, Worker};
use crate::fabric::{Fabric, PeerIndex};
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Epoch, Micros, Role, RoomId};
use crate::memory::{PageMap, PoolId};
use crate::mutations::{self, Mutation};
use crate::room::cell::{Bound, BoundPool, RoomCell};
use crate::room::receiver::{Receiver, ReceiverEvent, ReceiverReaction};
use crate::room::release::Release;
use crate::wire::message::{Checksum, Grant, GrantedPool, Message};

/// A receiving room in the worker.
#[derive(Debug)]
pub(in crate::worker) struct RecvRoom {
    pub(in crate::worker) cell: Arc<RoomCell>,
    pub(in crate::worker) core: Receiver,
    pub(in crate::worker) peer: PeerIndex,
    pools: Vec<TargetPool>,
    aux: Option<AuxSlot>,
    aux_bytes: u32,
    note: Bytes,
    /// Whether the sender is to say a checksum.
    checksum: bool,
    /// When its pages are quiet.
    release: Release,
    /// The checksum under way, once everything has landed.
    pub(in crate::worker) verify: Option<Box<Verify>>,
}

/// Granted pages of one pool.
#[derive(Debug)]
pub(in crate::worker) struct TargetPool {
    pool: PoolId,
    pub(in crate::worker) pages: Arc<[u32]>,
    pub(in crate::worker) map: Arc<PageMap>,
}

/// All receiving rooms of a worker.
#[derive(Debug)]
pub(in crate::worker) struct Receiving {
    pub(in crate::worker) rooms: Slots<RecvRoom>,
    by_epoch: HashMap<Epoch, u32>,
    /// Rooms that frames have arrived for since the last look, with what the core said to do.
    reactions: Vec<(u32, Epoch, ReceiverReaction)>,
    /// Rooms whose first frame has arrived.
    started: Vec<u32>,
    /// Frames outside their grant: the room, and what was wrong.
    outside: Vec<(u32, Epoch, String)>,
    /// Rooms whose checksum is being taken, in turn.
    pub(in crate::worker) verifying: VecDeque<(u32, Epoch)>,
}

impl Receiving {
    pub(in crate::worker) fn new(max_rooms: usize) -> Self {
        Self {
            rooms: Slots::new(max_rooms),
            by_epoch: HashMap::new(),
            reactions: Vec::new(),
            started: Vec::new(),
            outside: Vec::new(),
            verifying: VecDeque::new(),
        }
    }

    /// Entries of the index.
    #[cfg(feature = "sim")]
    pub(in crate::worker) fn entries(&self) -> usize {
        self.by_epoch.len()
    }

    pub(in crate::worker) fn live(&mut self, slot: u32, epoch: Epoch) -> Option<&mut RecvRoom> {
        let meant = |room: &&mut RecvRoom| {
            room.core.epoch() == epoch || mutations::is(Mutation::EpochUnchecked)
        };
        self.rooms.get_mut(slot).filter(meant).filter(|room| room.core.is_live())
    }
}

impl<F: Fabric> Worker<F> {
    pub(in crate::worker) fn grant(&mut self, now: Micros, order: GrantOrder) {
        let GrantOrder { cell, peer, epoch, deadline, pools, aux, aux_bytes, note, checksum } =
            order;
        if self.stopping {
            return self.end_unstarted(
                now,
                &cell,
                FailureKind::Shutdown,
                "the engine was shut down",
            );
        }
        if self.peers.find(peer).is_none() {
            // The caller may have been told of a peer whose coming is still in the mail.
            self.take_mail(now);
        }
        let Some(index) = self.peers.find(peer) else {
            let cause = "the peer went away before the grant was sent";
            return self.end_unstarted(now, &cell, FailureKind::PeerDied, cause);
        };
        let targets: Option<Vec<TargetPool>> = pools
            .into_iter()
            .map(|(pool, pages)| {
                let map = Arc::clone(self.pools.get(pool.index())?.as_ref()?);
                Some(TargetPool { pool, pages, map })
            })
            .collect();
        let Some(targets) = targets else {
            let cause = "a pool was deregistered before the grant was sent";
            return self.end_unstarted(now, &cell, FailureKind::PoolGone, cause);
        };
        let Some(known) = self.peers.get(index) else { return };
        let bound = Bound {
            peer,
            peer_addr: known.addr.clone(),
            epoch,
            note: note.clone(),
            checksum,
            aux_bytes,
            pools: targets
                .iter()
                .filter_map(|target| {
                    let pairing = &known.pools.get(target.pool.index())?.pairing;
                    Some(BoundPool {
                        pool: target.pool,
                        positions: target.pages.len() as u32,
                        layers: pairing.layers.clone(),
                        planes: pairing.planes,
                    })
                })
                .collect(),
        };
        cell.bind(bound, now.0);
        let room = RecvRoom {
            cell: Arc::clone(&cell),
            core: Receiver::new(epoch, deadline),
            peer: index,
            pools: targets,
            aux,
            aux_bytes,
            note,
            checksum,
            release: Release::new(),
            verify: None,
        };
        let Ok((slot, generation)) = self.receiving.rooms.insert(room) else {
            debug_assert!(false, "callers reserve a place first");
            return self.end_unstarted(now, &cell, FailureKind::Aborted, TABLE_FULL);
        };
        cell.slot.store(slot, Ordering::Relaxed);
        self.receiving.by_epoch.insert(epoch, slot);
        self.timers.set(deadline, Timer::Receive { slot, generation });
        self.say_grant(now, slot);
        cell.advance(crate::ids::RoomState::WaitingForInput);
    }

    fn say_grant(&mut self, now: Micros, slot: u32) {
        let Some(room) = self.receiving.rooms.get(slot) else { return };
        let grant = Grant {
            room: room.cell.room,
            epoch: room.core.epoch(),
            slot,
            deadline_ms: room.core.deadline().since(now) / 1000,
            pools: room
                .pools
                .iter()
                .map(|target| GrantedPool { pool: target.pool.0, pages: target.pages.to_vec() })
                .collect(),
            aux_bytes: room.aux_bytes,
            note: room.note.clone(),
            checksum: room.checksum,
        };
        self.peers.tell(room.peer, Message::Grant(grant));
    }

    /// Handles what the gate noted while the fabric polled.
    pub(in crate::worker) fn after_poll(&mut self, now: Micros) {
        let mut started = std::mem::take(&mut self.receiving.started);
        for slot in started.drain(..) {
            if let Some(room) = self.receiving.rooms.get(slot) {
                room.cell.mark_first(now.0);
                room.cell.advance(room.core.state());
            }
        }
        let mut reactions = std::mem::take(&mut self.receiving.reactions);
        for (slot, epoch, reaction) in reactions.drain(..) {
            if self.receiving.rooms.get(slot).is_some_and(|room| room.core.epoch() == epoch) {
                self.react_receiver(now, slot, reaction, None);
            }
        }
        let mut outside = std::mem::take(&mut self.receiving.outside);
        for (slot, epoch, what) in outside.drain(..) {
            if self.receiving.live(slot, epoch).is_some() {
                self.step_receiver(
                    now,
                    slot,
                    ReceiverEvent::Fault(FailureKind::OutsideGrant),
                    vec![what],
                );
            }
        }
        // Their memory is used again; nothing was noted meanwhile.
        self.receiving.started = started;
        self.receiving.reactions = reactions;
        self.receiving.outside = outside;
    }

    /// The sender says that everything was sent.
    pub(in crate::worker) fn told_finished(
        &mut self,
        now: Micros,
        peer: PeerIndex,
        (room, epoch): (RoomId, Epoch),
        sent: Landed,
        aux: Bytes,
        checksum: Option<Box<Checksum>>,
    ) {
        let Some(slot) = self.slot_of(peer, epoch) else {
            self.answer_unknown(peer, room, epoch);
            return;
        };
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        if room.core.is_live() {
            let too_long = aux.len() > room.aux_bytes as usize;
            // A row that is too long touches nothing.
            let to = room.aux.as_ref().filter(|_| !too_long);
            let put = to.map(|to| to.region.place_at(to.offset, &aux));
            if too_long || matches!(put, Some(Err(_))) {
                let causes =
                    vec![format!("an aux row of {} bytes, {} granted", aux.len(), room.aux_bytes)];
                self.step_receiver(
                    now,
                    slot,
                    ReceiverEvent::Fault(FailureKind::AuxTooLong),
                    causes,
                );
                return;
            }
            room.cell.keep_aux(aux);
            if room.checksum && room.verify.is_none() {
                let Some(checksum) = checksum else {
                    let causes =
                        vec!["the sender said no checksum, and was asked for one".to_owned()];
                    let fault = ReceiverEvent::Fault(FailureKind::ProtocolViolation);
                    return self.step_receiver(now, slot, fault, causes);
                };
                room.verify = Some(Box::new(Verify::new(*checksum)));
            }
        }
        let verify = room.verify.is_some();
        let event = ReceiverEvent::ToldFinished { epoch, sent, verify };
        self.step_receiver(now, slot, event, Vec::new());
    }

    /// The sender says that the room has failed.
    pub(in crate::worker) fn receiver_told_failed(
        &mut self,
        now: Micros,
        peer: PeerIndex,
        (room, epoch): (RoomId, Epoch),
        failure: Failure,
    ) {
        let Some(slot) = self.slot_of(peer, epoch) else {
            self.answer_unknown(peer, room, epoch);
            return;
        };
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        let reaction = room.core.on(now, ReceiverEvent::ToldFailed(epoch));
        self.react_receiver(now, slot, reaction, Some(failure));
    }

    fn slot_of(&self, peer: PeerIndex, epoch: Epoch) -> Option<u32> {
        let &slot = self.receiving.by_epoch.get(&epoch)?;
        self.receiving.rooms.get(slot).filter(|room| room.peer == peer).map(|_| slot)
    }

    /// A sender asks about a room that is not in the table: it is told the verdict, or that nobody here
    /// remembers one.
    fn answer_unknown(&mut self, peer: PeerIndex, room: RoomId, epoch: Epoch) {
        self.stats.late_events += 1;
        let Some(incarnation) = self.peers.get(peer).map(|peer| peer.incarnation) else { return };
        let verdict = self.verdicts.find(incarnation, epoch, Role::Receiver).cloned();
        let answer = verdict.unwrap_or_else(|| {
            let failure = Failure {
                kind: FailureKind::PeerForgot,
                room,
                epoch,
                seen_by: Role::Receiver,
                reporter: self.identity,
                peer: Some(incarnation),
                peer_addr: None,
                lane: None,
                landed: Landed::default(),
                retries: 0,
                causes: vec!["the receiver has no such room, and remembers none".to_owned()],
            };
            Message::Failed { room, epoch, to: Role::Sender, failure: Box::new(failure) }
        });
        self.peers.tell(peer, answer);
    }

    pub(in crate::worker) fn receiver_tick(&mut self, now: Micros, slot: u32, generation: u32) {
        if self.receiving.rooms.get_exact(slot, generation).is_some() {
            self.step_receiver(now, slot, ReceiverEvent::Tick, Vec::new());
        }
    }

    /// Says again the grants that stand with a peer whose session came back.
    pub(in crate::worker) fn resume_receivers(&mut self, now: Micros, peer: PeerIndex) {
        for slot in self.receiving.rooms.indices() {
            if self
                .receiving
                .rooms
                .get(slot)
                .is_some_and(|room| room.peer == peer && room.core.is_live())
            {
                self.say_grant(now, slot);
            }
        }
    }

    /// Live or unreleased rooms that have a pool granted.
    pub(in crate::worker) fn receivers_using(&self, pool: PoolId) -> usize {
        self.receiving
            .rooms
            .iter()
            .filter(|(_, room)| room.pools.iter().any(|target| target.pool == pool))
            .count()
    }
}
