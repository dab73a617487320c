//! The worker's sending rooms: matched to grants, cut into frames, ended.

mod grants;
mod verdict;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::Worker;
use super::peers::Peer;
use super::slots::Slots;
use super::submit::Chunk;
use crate::fabric::{Fabric, PeerIndex, Posting, RoomTag};
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Epoch, Incarnation, Micros, RoomId};
use crate::memory::{PageHash, Walk};
use crate::plan::{Pieces, Runs, Strips};
use crate::room::cell::RoomCell;
use crate::room::release::Release;
use crate::room::sender::{Sender, SenderEvent, SenderReaction};
use crate::wire::frame::DataFrame;
use crate::wire::message::{Checksum, Extent, GRANT_PAGES_MAX, Grant};

/// Pages of all grants that wait for rooms to be opened: sixteen grants of the largest size, 64 MiB of
/// page lists.
const PAGES_WAITING_MAX: usize = 16 * GRANT_PAGES_MAX;

/// Bytes hashed for checksums in a turn, after which posting waits for the next one: a few hundred
/// microseconds.
const HASHED_BYTES_PER_TURN: u64 = 2 << 20;
/// Times a frame is sent again before its room fails: more than a path that is worth having ever loses
/// lanes during one room.
pub(in crate::worker) const REPLAYS_MAX: u32 = 16;

/// A sending room in the worker.
#[derive(Debug)]
pub(in crate::worker) struct SendRoom {
    pub(in crate::worker) cell: Arc<RoomCell>,
    pub(in crate::worker) core: Sender,
    /// The peer it was opened for.
    wanted: Option<Incarnation>,
    pub(in crate::worker) bound: Option<Granted>,
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
    /// When its pages are quiet.
    release: Release,
    /// Frames posted again because their lane went down.
    pub(in crate::worker) replayed: u32,
    /// What was sent so far, when the receiver wants a checksum.
    checksum: Option<Box<SentHash>>,
}

/// The checksum of what was posted so far, and what that is.
#[derive(Debug)]
struct SentHash {
    hash: PageHash,
    extents: Vec<Extent>,
}

impl SentHash {
    /// Notes that a chunk is wholly posted. Layers that follow one another become one.
    fn chunk(&mut self, next: Extent, planes: u32) {
        let pieces = |layers: u16| u64::from(layers) * u64::from(planes) * u64::from(next.count);
        if let Some(last) = self.extents.last_mut()
            && (last.pool, last.at, last.count) == (next.pool, next.at, next.count)
            && last.layer + last.layers == next.layer
            && pieces(last.layers + next.layers) <= u64::from(u32::MAX)
        {
            last.layers += next.layers;
        } else {
            self.extents.push(next);
        }
    }
}

impl SendRoom {
    /// Whether it waits for a fault to be explained, and will fail.
    pub(in crate::worker) const fn is_suspect(&self) -> bool {
        self.suspicion.is_some()
    }

    /// The checksum of all that was sent.
    fn checksum(&self) -> Option<Box<Checksum>> {
        let sent = self.checksum.as_ref()?;
        Some(Box::new(Checksum { xxh3: sent.hash.value(), extents: sent.extents.clone() }))
    }
}

/// The grant a sending room is matched to.
#[derive(Debug)]
pub(in crate::worker) struct Granted {
    pub(in crate::worker) peer: PeerIndex,
    pub(in crate::worker) epoch: Epoch,
    /// The receiver's slot.
    slot: u32,
    /// Session in which the grant was last said.
    session: u64,
    /// Granted pages, by our pools.
    pools: Vec<Option<Arc<[u32]>>>,
}

/// All sending rooms of a worker.
#[derive(Debug)]
pub(in crate::worker) struct Sending {
    pub(in crate::worker) rooms: Slots<SendRoom>,
    /// Opened rooms that wait for a grant.
    waiting: HashMap<RoomId, Vec<u32>>,
    /// Grants that wait for a room.
    grants: HashMap<RoomId, Vec<WaitingGrant>>,
    grants_waiting: usize,
    pages_waiting: usize,
    grants_max: usize,
    by_epoch: HashMap<(PeerIndex, Epoch), u32>,
    /// The latest room of an id with a peer.
    by_room: HashMap<(PeerIndex, RoomId), u32>,
}

#[derive(Debug)]
struct WaitingGrant {
    peer: PeerIndex,
    session: u64,
    until: Micros,
    grant: Grant,
}

fn pages_of(grant: &Grant) -> usize {
    grant.pools.iter().map(|pool| pool.pages.len()).sum()
}

impl Sending {
    pub(in crate::worker) fn new(max_rooms: usize) -> Self {
        Self {
            rooms: Slots::new(max_rooms),
            waiting: HashMap::new(),
            grants: HashMap::new(),
            grants_waiting: 0,
            pages_waiting: 0,
            grants_max: max_rooms,
            by_epoch: HashMap::new(),
            by_room: HashMap::new(),
        }
    }

    /// A room waits for a grant no longer.
    fn stop_waiting(&mut self, room: RoomId, slot: u32) {
        if let Some(waiting) = self.waiting.get_mut(&room) {
            waiting.retain(|&other| other != slot);
            if waiting.is_empty() {
                self.waiting.remove(&room);
            }
        }
    }

    /// Whether another grant may wait for its room.
    const fn has_place_for(&self, pages: usize) -> bool {
        self.grants_waiting < self.grants_max && self.pages_waiting + pages <= PAGES_WAITING_MAX
    }

    fn keep_grant(&mut self, waiting: WaitingGrant) {
        self.grants_waiting += 1;
        self.pages_waiting += pages_of(&waiting.grant);
        self.grants.entry(waiting.grant.room).or_default().push(waiting);
    }

    /// Takes the waiting grants of a room that are meant.
    fn take_grants(
        &mut self,
        room: RoomId,
        meant: impl Fn(&WaitingGrant) -> bool,
    ) -> Vec<WaitingGrant> {
        let Some(grants) = self.grants.get_mut(&room) else { return Vec::new() };
        let taken: Vec<_> = grants.extract_if(.., |waiting| meant(waiting)).collect();
        if grants.is_empty() {
            self.grants.remove(&room);
        }
        self.grants_waiting -= taken.len();
        self.pages_waiting -= taken.iter().map(|waiting| pages_of(&waiting.grant)).sum::<usize>();
        taken
    }

    /// Whether a room of this epoch is live or unreleased.
    pub(in crate::worker) fn has_epoch(&self, peer: PeerIndex, epoch: Epoch) -> bool {
        self.by_epoch.contains_key(&(peer, epoch))
    }

    /// Entries of the tables: rooms that wait for a grant, grants that wait for a room, and the two ways
    /// to find a room.
    #[cfg(feature = "sim")]
    pub(in crate::worker) fn entries(&self) -> [usize; 4] {
        [self.waiting.len(), self.grants.len(), self.by_epoch.len(), self.by_room.len()]
    }

    /// Takes every waiting grant, of a peer or of all.
    fn take_all_grants(&mut self, peer: Option<PeerIndex>) -> Vec<WaitingGrant> {
        let mut rooms: Vec<RoomId> = self.grants.keys().copied().collect();
        rooms.sort_unstable();
        let of_peer = |waiting: &WaitingGrant| peer.is_none_or(|peer| waiting.peer == peer);
        rooms.into_iter().flat_map(|room| self.take_grants(room, of_peer)).collect()
    }

    /// Forgets grants of a peer, or those whose time is over.
    fn forget_grants(&mut self, expired: impl Fn(&WaitingGrant) -> bool) {
        self.grants.retain(|_, grants| {
            grants.retain(|grant| !expired(grant));
            !grants.is_empty()
        });
        let waiting = || self.grants.values().flatten();
        self.grants_waiting = waiting().count();
        self.pages_waiting = waiting().map(|waiting| pages_of(&waiting.grant)).sum();
    }
}

impl<F: Fabric> Worker<F> {
    pub(in crate::worker) fn write(&mut self, now: Micros, cell: &RoomCell, chunk: Chunk) {
        let slot = cell.slot.load(Ordering::Relaxed);
        let Some(room) =
            self.sending.rooms.get_mut(slot).filter(|room| std::ptr::eq(&*room.cell, cell))
        else {
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
        // The core is asked first: a chunk that it does not count must not be sent.
        if room.core.on(now, SenderEvent::Queued(landed)) != SenderReaction::Nothing {
            self.stats.late_events += 1;
            room.cell.chunk_dropped();
            return;
        }
        room.cell.mark_first(now.0);
        room.chunks.push_back(chunk);
        room.cell.advance(room.core.state());
        self.make_ready(slot);
    }

    pub(in crate::worker) fn finish(&mut self, now: Micros, cell: &RoomCell, aux: Bytes) {
        let slot = cell.slot.load(Ordering::Relaxed);
        if let Some(room) =
            self.sending.rooms.get_mut(slot).filter(|room| std::ptr::eq(&*room.cell, cell))
        {
            room.cell.mark_first(now.0);
            room.aux = aux;
            self.step_sender(now, slot, SenderEvent::FinishAsked, Vec::new());
        }
    }

    fn make_ready(&mut self, slot: u32) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let Some(bound) = &room.bound else { return };
        if room.ready || room.chunks.is_empty() || room.suspicion.is_some() || !room.core.may_post()
        {
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
    pub(in crate::worker) fn post_all(&mut self, now: Micros) -> bool {
        let mut posted = false;
        let mut at = 0;
        self.hashed_bytes = 0;
        while at < self.posting.len() {
            let peer = self.posting[at];
            while self.fabric.has_room(peer) && self.hashed_bytes < HASHED_BYTES_PER_TURN {
                if let Some(posting) = self.peers.get_mut(peer).and_then(|p| p.returned.pop_front())
                {
                    self.fabric.post(peer, posting);
                    posted = true;
                    continue;
                }
                let Some(slot) = self.peers.get_mut(peer).and_then(|peer| peer.ready.pop_front())
                else {
                    break;
                };
                posted |= self.post_one(now, peer, slot);
            }
            let more = |peer: &Peer| !peer.ready.is_empty() || !peer.returned.is_empty();
            if self.peers.get(peer).is_some_and(more) {
                at += 1;
            } else {
                self.posting.swap_remove(at);
            }
        }
        if posted {
            self.fabric.kick();
        }
        if self.hashed_bytes >= HASHED_BYTES_PER_TURN && !self.posting.is_empty() {
            // Another peer begins the next turn.
            self.posting.rotate_left(1);
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
        let Some(chunk) = room.chunks.front() else { return false };
        let pool = chunk.pool.index();
        let bound = room.bound.as_ref();
        let theirs = self.peers.get(peer).and_then(|known| known.pools.get(pool));
        let granted = bound.and_then(|bound| bound.pools.get(pool)?.as_ref());
        let map = self.pools.get(pool).and_then(Option::as_ref);
        let (Some(bound), Some(theirs), Some(granted), Some(map)) = (bound, theirs, granted, map)
        else {
            let causes = vec!["its pool went away".to_owned()];
            self.step_sender(now, slot, SenderEvent::Fault(FailureKind::PoolGone), causes);
            return false;
        };
        let pairing = &theirs.pairing;
        let (layers, count) = (chunk.layers.end - chunk.layers.start, chunk.src.len() as u32);
        let total = layers * pairing.planes * count;
        let piece_bytes = pairing.piece_bytes();
        let fit = u32::try_from(self.frame_bytes / piece_bytes).unwrap_or(u32::MAX).max(1);
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
        let walk = room.checksum.is_some().then(|| Walk::new(src.clone()));
        let runs = match Runs::new(src, dst) {
            Ok(runs) => runs,
            Err(error) => {
                self.step_sender(
                    now,
                    slot,
                    SenderEvent::Fault(FailureKind::OutsideGrant),
                    vec![error.to_string()],
                );
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
        if let (Some(sent), Some(mut walk)) = (&mut room.checksum, walk) {
            self.hashed_bytes += sent.hash.take(&mut walk, u64::MAX);
            if room.next_piece == total {
                let DataFrame { pool, layer, layers, at, count, .. } = frame;
                sent.chunk(Extent { pool, layer, layers, at, count }, pairing.planes);
            }
        }
        if room.next_piece == total {
            room.next_piece = 0;
            room.chunks.pop_front();
            room.cell.chunk_posted();
        }
        self.stats.frames_posted += 1;
        let tag = RoomTag { slot, generation };
        self.fabric.post(peer, Posting { tag, again: false, tries: 0, frame, runs });
        self.step_sender(now, slot, SenderEvent::Posted { page_writes: pieces.into() }, Vec::new());
        self.make_ready(slot);
        true
    }
}
