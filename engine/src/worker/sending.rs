//! The worker's sending rooms: matched to grants, cut into frames, ended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::slots::Slots;
use super::submit::Chunk;
use super::{Timer, Worker};
use crate::fabric::{Fabric, PeerIndex, Posting, RoomTag};
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Epoch, Incarnation, Micros, Role, RoomId};
use crate::memory::PoolId;
use crate::plan::{Pieces, Runs, Strips};
use crate::room::cell::{Bound, BoundPool, NO_SLOT, RoomCell};
use crate::room::sender::{Sender, SenderEvent, SenderReaction};
use crate::wire::frame::{DataFrame, FRAME_BYTES, RejectReason};
use crate::wire::message::{Grant, Message};

/// How long a fault seen on a lane waits for the words of the control plane: a dead peer closes its
/// lanes a moment before its session, a receiver's refusal overtakes its reason.
const EXPLAIN_WAIT_MS: u64 = 50;

/// A sending room in the worker.
#[derive(Debug)]
pub(super) struct SendRoom {
    pub(super) cell: Arc<RoomCell>,
    pub(super) core: Sender,
    /// The peer it was opened for.
    wanted: Option<Incarnation>,
    pub(super) bound: Option<Granted>,
    chunks: VecDeque<Chunk>,
    /// First piece of the front chunk that is not posted.
    next_piece: u32,
    aux: Bytes,
    /// Whether it stands in its peer's ready queue.
    ready: bool,
    /// A fault seen on a lane, to be believed at this time unless it is explained before.
    suspicion: Option<(Micros, Failure)>,
    /// The fault that asked for the verdict.
    asked: Option<Failure>,
}

/// The grant a sending room is matched to.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) peer: PeerIndex,
    pub(super) epoch: Epoch,
    /// The receiver's slot.
    slot: u32,
    /// Session in which the grant was last said.
    session: u64,
    /// Granted pages, by our pools.
    pools: Vec<Option<Arc<[u32]>>>,
}

/// All sending rooms of a worker.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) rooms: Slots<SendRoom>,
    /// Opened rooms that wait for a grant.
    waiting: HashMap<RoomId, Vec<u32>>,
    /// Grants that wait for a room.
    grants: HashMap<RoomId, Vec<WaitingGrant>>,
    grants_waiting: usize,
    grants_max: usize,
    by_epoch: HashMap<(PeerIndex, Epoch), u32>,
}

#[derive(Debug)]
struct WaitingGrant {
    peer: PeerIndex,
    session: u64,
    until: Micros,
    grant: Grant,
}

impl Sending {
    pub(super) fn new(max_rooms: usize) -> Self {
        Self {
            rooms: Slots::new(max_rooms),
            waiting: HashMap::new(),
            grants: HashMap::new(),
            grants_waiting: 0,
            grants_max: max_rooms,
            by_epoch: HashMap::new(),
        }
    }

    /// Forgets grants of a peer, or those whose time is over.
    fn forget_grants(&mut self, expired: impl Fn(&WaitingGrant) -> bool) {
        self.grants.retain(|_, grants| {
            grants.retain(|grant| !expired(grant));
            !grants.is_empty()
        });
        self.grants_waiting = self.grants.values().map(Vec::len).sum();
    }
}

impl<F: Fabric> Worker<F> {
    pub(super) fn open(&mut self, now: Micros, cell: Arc<RoomCell>, peer: Option<Incarnation>, deadline: Micros) {
        let room = SendRoom {
            cell: Arc::clone(&cell),
            core: Sender::new(deadline),
            wanted: peer,
            bound: None,
            chunks: VecDeque::new(),
            next_piece: 0,
            aux: Bytes::new(),
            ready: false,
            suspicion: None,
            asked: None,
        };
        let Ok((slot, generation)) = self.sending.rooms.insert(room) else {
            // The caller's thread counts rooms; this is only reached if it counted wrong.
            let causes = vec!["the engine's room table is full".to_owned()];
            let failure = self.failure(&cell, Role::Sender, FailureKind::Shutdown, None, causes);
            cell.end(Err(failure), now.0);
            cell.release();
            return;
        };
        cell.slot.store(slot, Ordering::Relaxed);
        self.timers.set(deadline, Timer::Send { slot, generation });
        let peers = &self.peers;
        let matching = self.sending.grants.get_mut(&cell.room).and_then(|grants| {
            let fits = |grant: &WaitingGrant| {
                grant.until > now
                    && peer.is_none_or(|wanted| peers.get(grant.peer).is_some_and(|peer| peer.incarnation == wanted))
            };
            grants.iter().position(fits).map(|at| grants.remove(at))
        });
        match matching {
            Some(waiting) => {
                self.sending.grants_waiting -= 1;
                if self.sending.grants.get(&cell.room).is_some_and(Vec::is_empty) {
                    self.sending.grants.remove(&cell.room);
                }
                self.bind(now, slot, waiting.peer, waiting.session, waiting.until, waiting.grant);
            }
            None => self.sending.waiting.entry(cell.room).or_default().push(slot),
        }
    }

    /// A grant came from a peer.
    pub(super) fn granted(&mut self, now: Micros, peer: PeerIndex, grant: Grant) {
        let Some(known) = self.peers.get(peer) else { return };
        let (incarnation, session) = (known.incarnation, known.session);
        if let Some(&slot) = self.sending.by_epoch.get(&(peer, grant.epoch)) {
            if let Some(bound) = self.sending.rooms.get_mut(slot).and_then(|room| room.bound.as_mut()) {
                bound.session = session;
            }
            return;
        }
        if let Some(verdict) = self.verdicts.find(incarnation, grant.epoch, Role::Sender).cloned() {
            self.stats.late_events += 1;
            self.peers.tell(peer, verdict);
            return;
        }
        if let Some(error) = self.check_grant(peer, &grant) {
            self.refuse_grant(peer, &grant, FailureKind::ProtocolViolation, error);
            return;
        }
        let until = now.after_ms(grant.deadline_ms);
        let waiting = self.sending.waiting.get(&grant.room).map_or(&[][..], Vec::as_slice);
        let slot = waiting.iter().copied().find(|&slot| {
            self.sending.rooms.get(slot).is_some_and(|room| room.wanted.is_none_or(|wanted| wanted == incarnation))
        });
        if let Some(slot) = slot {
            self.bind(now, slot, peer, session, until, grant);
            return;
        }
        let busy = self.sending.rooms.iter().any(|(_, room)| {
            room.cell.room == grant.room
                && room.core.is_live()
                && room.bound.as_ref().is_some_and(|bound| bound.peer == peer)
        });
        if busy {
            let error = "an earlier epoch of this room id is still live on the sender".to_owned();
            self.refuse_grant(peer, &grant, FailureKind::RoomBusy, error);
            return;
        }
        if self.sending.grants_waiting >= self.sending.grants_max {
            self.sending.forget_grants(|waiting| waiting.until <= now);
        }
        if self.sending.grants_waiting >= self.sending.grants_max {
            let error = "too many grants wait on the sender for rooms to be opened".to_owned();
            self.refuse_grant(peer, &grant, FailureKind::GrantTimeout, error);
            return;
        }
        let grants = self.sending.grants.entry(grant.room).or_default();
        // The same grant said again after a reconnect, or a newer epoch of the same peer's room.
        let before = grants.len();
        grants.retain(|waiting| waiting.peer != peer);
        self.sending.grants_waiting -= before - grants.len();
        grants.push(WaitingGrant { peer, session, until, grant });
        self.sending.grants_waiting += 1;
    }

    fn check_grant(&self, peer: PeerIndex, grant: &Grant) -> Option<String> {
        let peer = self.peers.get(peer)?;
        for (index, granted) in grant.pools.iter().enumerate() {
            let Some(pool) = peer.pools.iter().find(|pool| pool.pairing.remote_pool == granted.pool) else {
                return Some(format!("grant names pool {}, which the peer did not announce", granted.pool));
            };
            if grant.pools[..index].iter().any(|other| other.pool == granted.pool) {
                return Some(format!("grant names pool {} twice", granted.pool));
            }
            let pages = pool.pairing.remote_pages;
            if let Some(page) = granted.pages.iter().find(|&&page| page >= pages) {
                return Some(format!("grant names page {page} of a pool of {pages}"));
            }
        }
        None
    }

    fn refuse_grant(&mut self, peer: PeerIndex, grant: &Grant, kind: FailureKind, cause: String) {
        let Some(known) = self.peers.get(peer) else { return };
        let failure = Failure {
            kind,
            room: grant.room,
            epoch: grant.epoch,
            seen_by: Role::Sender,
            reporter: self.identity,
            peer: Some(known.incarnation),
            peer_addr: Some(known.addr.clone()),
            lane: None,
            landed: Landed::default(),
            retries: 0,
            causes: vec![cause],
        };
        let (room, epoch) = (grant.room, grant.epoch);
        self.peers.tell(peer, Message::Failed { room, epoch, to: Role::Receiver, failure: Box::new(failure) });
    }

    fn bind(&mut self, now: Micros, slot: u32, peer: PeerIndex, session: u64, until: Micros, grant: Grant) {
        let Some(known) = self.peers.get(peer) else { return };
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        if let Some(waiting) = self.sending.waiting.get_mut(&grant.room) {
            waiting.retain(|&other| other != slot);
            if waiting.is_empty() {
                self.sending.waiting.remove(&grant.room);
            }
        }
        let mut pools = vec![None; known.pools.len()];
        let mut bound_pools = Vec::new();
        for granted in grant.pools {
            let Some(ours) = known.pools.iter().position(|pool| pool.pairing.remote_pool == granted.pool) else {
                continue;
            };
            let pairing = &known.pools[ours].pairing;
            bound_pools.push(BoundPool {
                pool: PoolId(ours as u8),
                positions: granted.pages.len() as u32,
                layers: pairing.layers.clone(),
                planes: pairing.planes,
            });
            pools[ours] = Some(granted.pages.into());
        }
        room.cell.bind(
            Bound {
                peer: known.incarnation,
                peer_addr: known.addr.clone(),
                epoch: grant.epoch,
                note: grant.note,
                aux_bytes: grant.aux_bytes,
                pools: bound_pools,
            },
            now.0,
        );
        room.bound = Some(Granted { peer, epoch: grant.epoch, slot: grant.slot, session, pools });
        self.sending.by_epoch.insert((peer, grant.epoch), slot);
        self.step_sender(now, slot, SenderEvent::Granted { epoch: grant.epoch, deadline: until }, Vec::new());
        let generation = self.sending.rooms.generation(slot);
        self.timers.set(until, Timer::Send { slot, generation });
    }

    pub(super) fn write(&mut self, now: Micros, cell: &RoomCell, chunk: Chunk) {
        let slot = cell.slot.load(Ordering::Relaxed);
        let Some(room) = self.sending.rooms.get_mut(slot).filter(|room| std::ptr::eq(&*room.cell, cell)) else {
            return;
        };
        let Some(bound) = &room.bound else { return };
        let (peer, pool) = (bound.peer, chunk.pool);
        let Some(known) = self.peers.get(peer) else { return };
        let pairing = &known.pools[pool.index()].pairing;
        let layers = u64::from(chunk.layers.end - chunk.layers.start);
        let page_writes = layers * u64::from(pairing.planes) * chunk.src.len() as u64;
        let landed = Landed { page_writes, bytes: page_writes * pairing.piece_bytes() };
        if !room.core.is_live() {
            return;
        }
        room.cell.mark_first(now.0);
        room.chunks.push_back(chunk);
        self.step_sender(now, slot, SenderEvent::Queued(landed), Vec::new());
        self.make_ready(slot);
    }

    pub(super) fn finish(&mut self, now: Micros, cell: &RoomCell, aux: Bytes) {
        let slot = cell.slot.load(Ordering::Relaxed);
        if let Some(room) = self.sending.rooms.get_mut(slot).filter(|room| std::ptr::eq(&*room.cell, cell)) {
            room.cell.mark_first(now.0);
            room.aux = aux;
            self.step_sender(now, slot, SenderEvent::FinishAsked, Vec::new());
        }
    }

    fn make_ready(&mut self, slot: u32) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let Some(bound) = &room.bound else { return };
        if room.ready || room.chunks.is_empty() || room.suspicion.is_some() || !room.core.may_post() {
            return;
        }
        if let Some(peer) = self.peers.get_mut(bound.peer) {
            room.ready = true;
            peer.ready.push_back(slot);
            if !self.posting.contains(&bound.peer) {
                self.posting.push(bound.peer);
            }
        }
    }

    /// Posts frames to every peer that has room for them, one frame a room in turn.
    pub(super) fn post_all(&mut self, now: Micros) -> bool {
        let mut posted = false;
        let mut at = 0;
        while at < self.posting.len() {
            let peer = self.posting[at];
            while self.fabric.has_room(peer) {
                let Some(slot) = self.peers.get_mut(peer).and_then(|peer| peer.ready.pop_front()) else { break };
                posted |= self.post_one(now, peer, slot);
            }
            if self.peers.get(peer).is_some_and(|peer| !peer.ready.is_empty()) {
                at += 1;
            } else {
                self.posting.swap_remove(at);
            }
        }
        posted
    }

    fn post_one(&mut self, now: Micros, peer: PeerIndex, slot: u32) -> bool {
        let generation = self.sending.rooms.generation(slot);
        let Some(room) = self.sending.rooms.get_mut(slot) else { return false };
        room.ready = false;
        if !room.core.may_post() || room.suspicion.is_some() {
            return false;
        }
        let (Some(chunk), Some(bound), Some(known)) = (room.chunks.front(), &room.bound, self.peers.get(peer)) else {
            return false;
        };
        let pool = chunk.pool.index();
        let (Some(map), Some(theirs), Some(granted)) = (&self.pools[pool], known.pools.get(pool), &bound.pools[pool])
        else {
            return false;
        };
        let pairing = &theirs.pairing;
        let (layers, count) = (chunk.layers.end - chunk.layers.start, chunk.src.len() as u32);
        let total = layers * pairing.planes * count;
        let piece_bytes = pairing.piece_bytes();
        let fit = u32::try_from(FRAME_BYTES / piece_bytes).unwrap_or(u32::MAX).max(1);
        let first = room.next_piece;
        let pieces = fit.min(total - first);
        let range = |layer| Pieces { layer, planes: pairing.planes, count, first, len: pieces };
        let src = Strips::new(
            Arc::clone(map),
            Arc::clone(&chunk.src),
            0,
            pairing.local,
            range(chunk.layers.start - pairing.first_layer),
        );
        let dst = Strips::new(
            Arc::clone(&theirs.map),
            Arc::clone(granted),
            chunk.at as usize,
            pairing.remote,
            range(chunk.layers.start - pairing.layers.start),
        );
        let runs = match Runs::new(src, dst) {
            Ok(runs) => runs,
            Err(error) => {
                self.step_sender(now, slot, SenderEvent::Fault(FailureKind::OutsideGrant), vec![error.to_string()]);
                return false;
            }
        };
        let frame = DataFrame {
            seq: 0,
            slot: bound.slot,
            epoch: bound.epoch,
            pool: pairing.remote_pool,
            layer: chunk.layers.start as u16,
            layers: layers as u16,
            at: chunk.at,
            count,
            first,
            pieces,
            payload_bytes: (u64::from(pieces) * piece_bytes) as u32,
        };
        room.next_piece += pieces;
        if room.next_piece == total {
            room.next_piece = 0;
            room.chunks.pop_front();
            room.cell.chunk_posted();
        }
        self.stats.frames_posted += 1;
        let tag = RoomTag { slot, generation };
        self.fabric.post(peer, Posting { tag, frame, runs });
        self.step_sender(now, slot, SenderEvent::Posted { page_writes: pieces.into() }, Vec::new());
        self.make_ready(slot);
        true
    }

    /// A frame was refused or lost on a lane: the room stops, and the control plane has a moment to
    /// say why.
    pub(super) fn suspect(&mut self, now: Micros, tag: RoomTag, lane: u16, kind: FailureKind, cause: String) {
        let Some(room) = self.sending.rooms.get_exact(tag.slot, tag.generation) else { return };
        if room.suspicion.is_some() || !room.core.is_live() {
            return;
        }
        let cell = Arc::clone(&room.cell);
        let mut failure = self.failure(&cell, Role::Sender, kind, None, vec![cause]);
        failure.lane = Some(lane);
        let until = now.after_ms(EXPLAIN_WAIT_MS);
        if let Some(room) = self.sending.rooms.get_mut(tag.slot) {
            room.suspicion = Some((until, failure));
        }
        self.timers.set(until, Timer::Send { slot: tag.slot, generation: tag.generation });
    }

    pub(super) fn rejected(&mut self, now: Micros, tag: RoomTag, lane: u16, reason: RejectReason) {
        let (kind, cause) = match reason {
            RejectReason::Revoked => (FailureKind::GrantRevoked, "the receiver refused a write: the grant is revoked"),
            RejectReason::Outside => (FailureKind::OutsideGrant, "the receiver refused a write: outside the grant"),
        };
        self.suspect(now, tag, lane, kind, cause.to_owned());
    }

    pub(super) fn sender_tick(&mut self, now: Micros, slot: u32, generation: u32) {
        let Some(room) = self.sending.rooms.get_exact(slot, generation) else { return };
        if let Some((until, _)) = &room.suspicion
            && *until <= now
        {
            // Without a session the peer is being looked for: what comes of that is the cause.
            let waits = room.bound.as_ref().and_then(|bound| self.peers.get(bound.peer)).is_some_and(|p| !p.has_session());
            if waits {
                let until = now.after_ms(EXPLAIN_WAIT_MS);
                if let Some((at, _)) = &mut room.suspicion {
                    *at = until;
                }
                self.timers.set(until, Timer::Send { slot, generation });
            } else if let Some((_, failure)) = room.suspicion.clone() {
                self.step_sender_with(now, slot, SenderEvent::Fault(failure.kind), failure);
            }
        }
        self.step_sender(now, slot, SenderEvent::Tick, Vec::new());
        if let Some(room) = self.sending.rooms.get_exact(slot, generation)
            && room.core.is_live()
        {
            let deadline = room.core.deadline();
            self.timers.set(deadline, Timer::Send { slot, generation });
        }
    }

    /// The receiver's words about a room.
    pub(super) fn sender_told(&mut self, now: Micros, peer: PeerIndex, epoch: Epoch, told: Result<(), Failure>) {
        let Some(&slot) = self.sending.by_epoch.get(&(peer, epoch)) else {
            // A grant that was never matched is withdrawn; anything else is late.
            let before = self.sending.grants_waiting;
            self.sending.forget_grants(|waiting| waiting.peer == peer && waiting.grant.epoch == epoch);
            self.stats.late_events += u64::from(self.sending.grants_waiting == before);
            return;
        };
        match told {
            Ok(()) => self.step_sender(now, slot, SenderEvent::ToldLanded(epoch), Vec::new()),
            Err(failure) => self.step_sender_with(now, slot, SenderEvent::ToldFailed(epoch), failure),
        }
    }

    pub(super) fn step_sender(&mut self, now: Micros, slot: u32, event: SenderEvent, causes: Vec<String>) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let reaction = room.core.on(now, event);
        if room.core.is_live() {
            room.cell.count(room.core.acked());
        }
        let failure = match reaction {
            SenderReaction::Nothing | SenderReaction::Late | SenderReaction::SendFinished(_) | SenderReaction::Done => None,
            SenderReaction::AskVerdict(kind) | SenderReaction::Fail(kind) | SenderReaction::FailUnknown(kind) => {
                let cell = Arc::clone(&room.cell);
                let causes = if causes.is_empty() { vec![self.sender_deadline_cause(slot, kind)] } else { causes };
                Some(self.failure(&cell, Role::Sender, kind, None, causes))
            }
            SenderReaction::FailAsTold => None,
        };
        self.react_sender(now, slot, reaction, failure);
    }

    /// As [`Self::step_sender`], with the failure ready-made.
    pub(super) fn step_sender_with(&mut self, now: Micros, slot: u32, event: SenderEvent, failure: Failure) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let reaction = room.core.on(now, event);
        self.react_sender(now, slot, reaction, Some(failure));
    }

    fn sender_deadline_cause(&self, slot: u32, kind: FailureKind) -> String {
        let state = self.sending.rooms.get(slot).map(|room| room.cell.state());
        match (kind, state) {
            (FailureKind::GrantTimeout, _) => "no grant came before the deadline".to_owned(),
            (FailureKind::DeadlineExceeded, Some(state)) => format!("the deadline passed in state {state:?}"),
            (kind, _) => kind.slug().to_owned(),
        }
    }

    fn react_sender(&mut self, now: Micros, slot: u32, reaction: SenderReaction, failure: Option<Failure>) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let room_id = room.cell.room;
        match reaction {
            SenderReaction::Nothing => room.cell.advance(room.core.state()),
            SenderReaction::Late => self.stats.late_events += 1,
            SenderReaction::SendFinished(sent) => {
                room.cell.advance(room.core.state());
                let aux = room.aux.clone();
                if let Some(bound) = &room.bound {
                    let message = Message::Finished { room: room_id, epoch: bound.epoch, sent, aux };
                    self.peers.tell(bound.peer, message);
                }
            }
            SenderReaction::AskVerdict(_) => {
                room.asked.clone_from(&failure);
                let deadline = room.core.deadline();
                if let (Some(bound), Some(failure)) = (&room.bound, failure) {
                    let message =
                        Message::Failed { room: room_id, epoch: bound.epoch, to: Role::Receiver, failure: Box::new(failure) };
                    self.peers.tell(bound.peer, message);
                }
                let generation = self.sending.rooms.generation(slot);
                self.timers.set(deadline, Timer::Send { slot, generation });
            }
            SenderReaction::Done => {
                let sent = room.core.acked();
                self.end_sender(now, slot, Ok(()), sent);
            }
            SenderReaction::FailAsTold => {
                let landed = room.core.acked();
                if let Some(failure) = failure {
                    self.end_sender(now, slot, Err(failure), landed);
                }
            }
            SenderReaction::Fail(_) => {
                let landed = room.core.acked();
                let Some(failure) = failure else { return };
                if let Some(bound) = &room.bound {
                    let (peer, epoch) = (bound.peer, bound.epoch);
                    let message =
                        Message::Failed { room: room_id, epoch, to: Role::Receiver, failure: Box::new(failure.clone()) };
                    self.peers.tell(peer, message.clone());
                    if let Some(known) = self.peers.get(peer) {
                        self.verdicts.keep(known.incarnation, epoch, Role::Sender, message);
                    }
                }
                self.end_sender(now, slot, Err(failure), landed);
            }
            SenderReaction::FailUnknown(kind) => {
                let landed = room.core.acked();
                let Some(mut failure) = failure else { return };
                let first = room.asked.take().unwrap_or_else(|| failure.clone());
                failure.kind = FailureKind::VerdictUnknown;
                let under = format!("{}: {}", first.kind, first.causes.join(": "));
                let outer = if first.kind == kind || kind == FailureKind::DeadlineExceeded {
                    "everything was sent and the receiver did not answer".to_owned()
                } else {
                    format!("everything was sent and the receiver cannot be asked ({kind})")
                };
                failure.causes = vec![outer, under];
                self.end_sender(now, slot, Err(failure), landed);
            }
        }
    }

    /// The room has ended: nothing of it is posted any more, and its pages are asked back.
    fn end_sender(&mut self, now: Micros, slot: u32, verdict: Result<(), Failure>, acked: Landed) {
        let generation = self.sending.rooms.generation(slot);
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        for _ in room.chunks.drain(..) {
            room.cell.chunk_posted();
        }
        if room.bound.is_none() {
            if let Some(waiting) = self.sending.waiting.get_mut(&room.cell.room) {
                waiting.retain(|&other| other != slot);
                if waiting.is_empty() {
                    self.sending.waiting.remove(&room.cell.room);
                }
            }
        }
        if verdict.is_ok() {
            // Landed covers what its last acknowledgements would have said.
            if let Some(total) = room.core.total() {
                room.cell.count(total);
            }
        } else {
            room.cell.count(acked);
        }
        room.cell.end(verdict, now.0);
        let cell = Arc::clone(&room.cell);
        self.tell_ended(cell);
        self.fabric.retract(RoomTag { slot, generation });
    }

    /// Nothing reads the room's pages any more.
    pub(super) fn source_quiet(&mut self, tag: RoomTag) {
        if self.sending.rooms.get_exact(tag.slot, tag.generation).is_none() {
            return;
        }
        if let Some(room) = self.sending.rooms.remove(tag.slot) {
            if let Some(bound) = &room.bound {
                self.sending.by_epoch.remove(&(bound.peer, bound.epoch));
                if room.cell.verdict().is_some_and(Result::is_err) {
                    let message = Message::Drained { room: room.cell.room, epoch: bound.epoch };
                    self.peers.tell(bound.peer, message);
                }
            }
            room.cell.slot.store(NO_SLOT, Ordering::Relaxed);
            room.cell.release();
        }
    }

    /// Fails every sending room with a peer.
    pub(super) fn fail_senders_of(&mut self, now: Micros, peer: PeerIndex, kind: FailureKind, causes: &[String]) {
        for slot in self.sending.rooms.indices() {
            let concerned = self.sending.rooms.get(slot).is_some_and(|room| {
                room.bound.as_ref().is_some_and(|bound| bound.peer == peer)
                    || room.bound.is_none()
                        && room.wanted.is_some()
                        && room.wanted == self.peers.get(peer).map(|peer| peer.incarnation)
            });
            if concerned {
                self.step_sender(now, slot, SenderEvent::Fault(kind), causes.to_vec());
            }
        }
        self.sending.forget_grants(|waiting| waiting.peer == peer);
    }

    /// Says again what stands with a peer whose session came back.
    pub(super) fn resume_senders(&mut self, peer: PeerIndex) {
        for slot in self.sending.rooms.indices() {
            let Some(room) = self.sending.rooms.get(slot) else { continue };
            let Some(bound) = room.bound.as_ref().filter(|bound| bound.peer == peer) else { continue };
            let (id, epoch) = (room.cell.room, bound.epoch);
            let Some(sent) = room.core.awaits_verdict() else { continue };
            let (aux, asked) = (room.aux.clone(), room.asked.clone());
            self.peers.tell(peer, Message::Finished { room: id, epoch, sent, aux });
            if let Some(failure) = asked {
                let failure = Box::new(failure);
                self.peers.tell(peer, Message::Failed { room: id, epoch, to: Role::Receiver, failure });
            }
        }
    }

    /// The peer has said again everything that stands: grants that it did not are forgotten there.
    pub(super) fn senders_synced(&mut self, now: Micros, peer: PeerIndex) {
        let Some(session) = self.peers.get(peer).map(|peer| peer.session) else { return };
        for slot in self.sending.rooms.indices() {
            let forgotten = self.sending.rooms.get(slot).is_some_and(|room| {
                room.core.may_post()
                    && room.bound.as_ref().is_some_and(|bound| bound.peer == peer && bound.session != session)
            });
            if forgotten {
                let causes = vec!["the receiver did not renew the grant after reconnecting".to_owned()];
                self.step_sender(now, slot, SenderEvent::Fault(FailureKind::PeerForgot), causes);
            }
        }
        self.sending.forget_grants(|waiting| waiting.peer == peer && waiting.session != session);
    }
}
