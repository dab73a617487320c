//! The worker's receiving rooms: granted, counted, judged. What may be placed is decided here.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::peers::Peers;
use super::slots::Slots;
use super::stats::Stats;
use super::submit::{AuxSlot, GrantOrder};
use super::verify::Verify;
use super::{TABLE_FULL, Timer, Worker};
use crate::fabric::{Fabric, Gate, PeerIndex};
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Epoch, Micros, Role, RoomId};
use crate::memory::{PageMap, Pairing, PoolId};
use crate::mutations::{self, Mutation};
use crate::plan::{Pieces, Strips};
use crate::room::cell::{Bound, BoundPool, NO_SLOT, RoomCell};
use crate::room::receiver::{Receiver, ReceiverEvent, ReceiverReaction};
use crate::room::release::{Release, ReleaseEvent};
use crate::wire::frame::{DataFrame, RejectReason};
use crate::wire::message::{Checksum, Extent, Grant, GrantedPool, Message};

/// A receiving room in the worker.
#[derive(Debug)]
pub(super) struct RecvRoom {
    pub(super) cell: Arc<RoomCell>,
    pub(super) core: Receiver,
    pub(super) peer: PeerIndex,
    pools: Vec<TargetPool>,
    aux: Option<AuxSlot>,
    aux_bytes: u32,
    note: Bytes,
    /// Whether the sender is to say a checksum.
    checksum: bool,
    /// When its pages are quiet.
    release: Release,
    /// The checksum under way, once everything has landed.
    pub(super) verify: Option<Box<Verify>>,
}

/// Granted pages of one pool.
#[derive(Debug)]
pub(super) struct TargetPool {
    pool: PoolId,
    pub(super) pages: Arc<[u32]>,
    pub(super) map: Arc<PageMap>,
}

/// All receiving rooms of a worker.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) rooms: Slots<RecvRoom>,
    by_epoch: HashMap<Epoch, u32>,
    /// Rooms that frames have arrived for since the last look, with what the core said to do.
    reactions: Vec<(u32, Epoch, ReceiverReaction)>,
    /// Rooms whose first frame has arrived.
    started: Vec<u32>,
    /// Frames outside their grant: the room, and what was wrong.
    outside: Vec<(u32, Epoch, String)>,
    /// Rooms whose checksum is being taken, in turn.
    pub(super) verifying: VecDeque<(u32, Epoch)>,
}

impl Receiving {
    pub(super) fn new(max_rooms: usize) -> Self {
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
    pub(super) fn entries(&self) -> usize {
        self.by_epoch.len()
    }

    pub(super) fn live(&mut self, slot: u32, epoch: Epoch) -> Option<&mut RecvRoom> {
        let meant = |room: &&mut RecvRoom| {
            room.core.epoch() == epoch || mutations::is(Mutation::EpochUnchecked)
        };
        self.rooms.get_mut(slot).filter(meant).filter(|room| room.core.is_live())
    }
}

/// The gate: grants against frames. Borrows what the worker needs not while the fabric polls.
pub(super) struct Grants<'a> {
    pub(super) receiving: &'a mut Receiving,
    pub(super) peers: &'a Peers,
    pub(super) stats: &'a mut Stats,
    pub(super) now: Micros,
}

impl Gate for Grants<'_> {
    fn admit(&mut self, peer: PeerIndex, frame: &DataFrame) -> Result<Strips, RejectReason> {
        let room = self.receiving.live(frame.slot, frame.epoch).filter(|room| room.peer == peer);
        let Some(room) = room else {
            self.stats.frames_refused += 1;
            return Err(RejectReason::Revoked);
        };
        match covered(room, self.peers, frame) {
            Ok(strips) => {
                if mutations::is(Mutation::CountBeforePlacing) {
                    self.count(frame);
                }
                Ok(strips)
            }
            Err(what) => {
                self.stats.frames_refused += 1;
                self.receiving.outside.push((frame.slot, frame.epoch, what.to_owned()));
                Err(RejectReason::Outside)
            }
        }
    }

    fn placed(&mut self, frame: &DataFrame) {
        if !mutations::is(Mutation::CountBeforePlacing) {
            self.count(frame);
        }
    }
}

impl Grants<'_> {
    fn count(&mut self, frame: &DataFrame) {
        self.stats.frames_placed += 1;
        self.stats.bytes_placed += u64::from(frame.payload_bytes);
        let Some(room) = self.receiving.live(frame.slot, frame.epoch) else {
            self.stats.late_events += 1;
            return;
        };
        let first = room.core.arrived() == Landed::default();
        let landed = Landed { page_writes: frame.pieces.into(), bytes: frame.payload_bytes.into() };
        let reaction = room.core.on(self.now, ReceiverEvent::Placed(landed));
        room.cell.count(room.core.arrived());
        if first {
            self.receiving.started.push(frame.slot);
        }
        if reaction != ReceiverReaction::Nothing {
            self.receiving.reactions.push((frame.slot, frame.epoch, reaction));
        }
    }
}

fn wrong_counts(landed: Landed) -> String {
    let Landed { page_writes, bytes } = landed;
    format!("{page_writes} page writes and {bytes} bytes arrived, other numbers were sent")
}

/// The pages that a chunk names, if the grant covers all of it, and what is paired of them.
pub(super) fn named<'a>(
    room: &'a RecvRoom,
    peers: &'a Peers,
    chunk: Extent,
) -> Result<(&'a TargetPool, &'a Pairing), &'static str> {
    let peer = peers.get(room.peer).ok_or("the peer is not known")?;
    let target = room
        .pools
        .iter()
        .find(|target| target.pool.0 == chunk.pool)
        .ok_or("a frame names a pool that was not granted")?;
    let pairing = &peer
        .pools
        .get(target.pool.index())
        .ok_or("a frame names a pool that is not here")?
        .pairing;
    let (layer, layers) = (u32::from(chunk.layer), u32::from(chunk.layers));
    if layers == 0 || layer < pairing.layers.start || layer + layers > pairing.layers.end {
        return Err("a frame names layers that the two sides do not share");
    }
    let positions = target.pages.len() as u64;
    if chunk.count == 0 || u64::from(chunk.at) + u64::from(chunk.count) > positions {
        return Err("a frame names positions behind the granted ones");
    }
    Ok((target, pairing))
}

/// The memory a frame goes to, if the grant covers all of it.
fn covered(room: &RecvRoom, peers: &Peers, frame: &DataFrame) -> Result<Strips, &'static str> {
    let DataFrame { pool, layer, layers, at, count, .. } = *frame;
    let (target, pairing) = named(room, peers, Extent { pool, layer, layers, at, count })?;
    let (layer, layers) = (u32::from(layer), u32::from(layers));
    let total = u64::from(layers) * u64::from(pairing.planes) * u64::from(frame.count);
    if frame.pieces == 0 || u64::from(frame.first) + u64::from(frame.pieces) > total {
        return Err("a frame names page writes that its chunk does not have");
    }
    if u64::from(frame.payload_bytes) != u64::from(frame.pieces) * pairing.piece_bytes() {
        return Err("a frame's payload is not as long as its page writes");
    }
    let pieces = Pieces {
        layer: layer - pairing.first_layer,
        planes: pairing.planes,
        count: frame.count,
        first: frame.first,
        len: frame.pieces,
    };
    Ok(Strips::new(
        Arc::clone(&target.map),
        Arc::clone(&target.pages),
        frame.at as usize,
        pairing.local,
        pieces,
    ))
}

impl<F: Fabric> Worker<F> {
    pub(super) fn grant(&mut self, now: Micros, order: GrantOrder) {
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
    pub(super) fn after_poll(&mut self, now: Micros) {
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
    pub(super) fn told_finished(
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
    pub(super) fn receiver_told_failed(
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

    pub(super) fn receiver_tick(&mut self, now: Micros, slot: u32, generation: u32) {
        if self.receiving.rooms.get_exact(slot, generation).is_some() {
            self.step_receiver(now, slot, ReceiverEvent::Tick, Vec::new());
        }
    }

    pub(super) fn step_receiver(
        &mut self,
        now: Micros,
        slot: u32,
        event: ReceiverEvent,
        causes: Vec<String>,
    ) {
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        let before = room.core.state();
        let reaction = room.core.on(now, event);
        let failure = match reaction {
            ReceiverReaction::Fail(kind) => {
                let cell = Arc::clone(&room.cell);
                let landed = room.core.arrived();
                let causes = if causes.is_empty() {
                    vec![match kind {
                        FailureKind::DeadlineExceeded => {
                            format!("the deadline passed in state {before:?}")
                        }
                        FailureKind::CountMismatch => wrong_counts(landed),
                        kind => kind.slug().to_owned(),
                    }]
                } else {
                    causes
                };
                Some(self.failure(&cell, Role::Receiver, kind, None, causes))
            }
            _ => None,
        };
        self.react_receiver(now, slot, reaction, failure);
    }

    fn react_receiver(
        &mut self,
        now: Micros,
        slot: u32,
        reaction: ReceiverReaction,
        failure: Option<Failure>,
    ) {
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        let (id, epoch, peer) = (room.cell.room, room.core.epoch(), room.peer);
        let landed = room.core.arrived();
        let failed = |failure: Failure| Message::Failed {
            room: id,
            epoch,
            to: Role::Sender,
            failure: Box::new(failure),
        };
        let (verdict, tell) = match (reaction, failure) {
            (ReceiverReaction::Nothing, _) => return room.cell.advance(room.core.state()),
            (ReceiverReaction::Late, _) => {
                self.stats.late_events += 1;
                return;
            }
            (ReceiverReaction::Verify, _) => {
                self.receiving.verifying.push_back((slot, epoch));
                return;
            }
            (ReceiverReaction::Repeat, _) => return self.answer_unknown(peer, id, epoch),
            (ReceiverReaction::Done(landed), _) => {
                (Ok(()), Some(Message::Landed { room: id, epoch, landed }))
            }
            (ReceiverReaction::FailAsTold { answer }, Some(failure)) => {
                let message = failed(failure.clone());
                (Err(failure), answer.then_some(message))
            }
            (ReceiverReaction::Fail(kind), failure) => {
                let cell = Arc::clone(&room.cell);
                let failure = failure.unwrap_or_else(|| {
                    self.failure(&cell, Role::Receiver, kind, None, vec![wrong_counts(landed)])
                });
                (Err(failure.clone()), Some(failed(failure)))
            }
            (ReceiverReaction::FailAsTold { .. }, None) => return,
        };
        if let Some(known) = self.peers.get(peer) {
            let keep = match (&tell, &verdict) {
                (Some(message), _) => Some(message.clone()),
                (None, Err(failure)) => Some(failed(failure.clone())),
                (None, Ok(())) => None,
            };
            if let Some(message) = keep {
                self.verdicts.keep(known.incarnation, epoch, Role::Receiver, message);
            }
        }
        // Shown here before it is told there: a caller that hears of the end from the peer finds it.
        if let Some(room) = self.receiving.rooms.get(slot) {
            room.cell.end(verdict, now.0);
            let cell = Arc::clone(&room.cell);
            self.tell_ended(cell);
        }
        if let Some(message) = tell {
            self.peers.tell(peer, message);
        }
        let done = matches!(reaction, ReceiverReaction::Done(_));
        let (writes, fence_at) =
            (self.peer_writes(peer, done), now.after_ms(self.limits.fence_after_ms));
        if let Some(room) = self.receiving.rooms.get_mut(slot) {
            room.verify = None;
            room.release.on(now, ReleaseEvent::Ended { peer: writes, fence_at });
        }
        let generation = self.receiving.rooms.generation(slot);
        self.timers.set(fence_at, Timer::ReceiveFence { slot, generation });
        self.fabric.revoke(peer, slot, epoch);
    }

    /// This side places nothing in the room's pages any more.
    pub(super) fn target_quiet(&mut self, now: Micros, slot: u32, epoch: Epoch) {
        if self.receiving.rooms.get(slot).is_some_and(|room| room.core.epoch() == epoch) {
            self.step_release(now, slot, ReleaseEvent::QuietHere);
        }
    }

    /// The sender says that nothing of the epoch is on its way any more.
    pub(super) fn told_drained(&mut self, now: Micros, peer: PeerIndex, epoch: Epoch) {
        match self.slot_of(peer, epoch) {
            Some(slot) => self.step_release(now, slot, ReleaseEvent::Drained),
            None => {
                // Most are released before: here nothing is placed without a grant.
                let incarnation = self.peers.get(peer).map(|peer| peer.incarnation);
                let over = incarnation.is_some_and(|incarnation| {
                    self.verdicts.find(incarnation, epoch, Role::Receiver).is_some()
                });
                self.stats.late_events += u64::from(!over);
            }
        }
    }

    /// A lane of the peer is down: so may be the last one that an ended room waits for.
    pub(super) fn release_receivers_of(&mut self, now: Micros, peer: PeerIndex) {
        if self.fabric.is_guarded() {
            return;
        }
        let Some(known) = self.peers.get(peer) else { return };
        let down = known.links.down_before();
        for slot in self.receiving.rooms.indices() {
            if self.receiving.rooms.get(slot).is_some_and(|room| room.peer == peer) {
                self.step_release(now, slot, ReleaseEvent::LanesDownBefore(down));
            }
        }
    }

    pub(super) fn receiver_fence_tick(&mut self, now: Micros, slot: u32, generation: u32) {
        if self.receiving.rooms.get_exact(slot, generation).is_some() {
            self.step_release(now, slot, ReleaseEvent::Tick);
        }
    }

    fn step_release(&mut self, now: Micros, slot: u32, event: ReleaseEvent) {
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        let (peer, reaction) = (room.peer, room.release.on(now, event));
        if !self.react_release(peer, None, reaction) {
            return;
        }
        if let Some(room) = self.receiving.rooms.remove(slot) {
            self.receiving.by_epoch.remove(&room.core.epoch());
            room.cell.slot.store(NO_SLOT, Ordering::Relaxed);
            room.cell.release();
        }
        self.after_release();
    }

    pub(super) fn fail_receivers_of(
        &mut self,
        now: Micros,
        peer: PeerIndex,
        kind: FailureKind,
        causes: &[String],
    ) {
        for slot in self.receiving.rooms.indices() {
            if self.receiving.rooms.get(slot).is_some_and(|room| room.peer == peer) {
                self.step_receiver(now, slot, ReceiverEvent::Fault(kind), causes.to_vec());
            }
        }
    }

    /// Says again the grants that stand with a peer whose session came back.
    pub(super) fn resume_receivers(&mut self, now: Micros, peer: PeerIndex) {
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
    pub(super) fn receivers_using(&self, pool: PoolId) -> usize {
        self.receiving
            .rooms
            .iter()
            .filter(|(_, room)| room.pools.iter().any(|target| target.pool == pool))
            .count()
    }
}
