//! The worker's view of its peers.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::slots::Slots;
use crate::fabric::{PeerIndex, Posting};
use crate::ids::{Epoch, Incarnation, LaneId, Micros};
use crate::memory::{PageMap, Pairing};
use crate::mutations::{self, Mutation};
use crate::room::links::Links;
use crate::wire::message::Message;
use crate::wire::rails::PoolMemory;

/// Messages that may wait for a peer's session. A peer that makes us answer faster than it reads is
/// given up at this point: an honest one has a few messages a room under way.
const BACKLOG_MAX: usize = 1 << 17;

/// Questions about lanes that are answered in one session: more than lanes can go down in it, if the peer
/// is to be worth having.
const ANSWERS_MAX: usize = 1 << 14;
/// Given-up peers remembered, two megabytes of them; past that, every new peer is taken for one that may
/// have been known.
const GIVEN_UP_MAX: usize = 1 << 16;

/// A peer, from its first session until it is given up and its lanes are down.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) incarnation: Incarnation,
    pub(super) addr: String,
    /// By our pools. Rooms are checked against this, so it never changes.
    pub(super) pools: Vec<PeerPool>,
    /// The session's way out, while it stands.
    outbox: Option<mpsc::Sender<Message>>,
    /// Messages that the outbox had no room for.
    backlog: VecDeque<Message>,
    /// Sessions so far.
    pub(super) session: u64,
    /// When the latest one came up.
    pub(super) session_since: Micros,
    /// Sending rooms with frames to post, in turn.
    pub(super) ready: VecDeque<u32>,
    /// Frames that a lane gave back unsent; they go first.
    pub(super) returned: VecDeque<Posting>,
    /// Its lanes, and what went down with those that are gone.
    pub(super) links: Links<LostFrame>,
    /// Lanes that it asked about in this session and was answered.
    answered: HashSet<LaneId>,
    /// Of epochs up to this, granted to this engine, it is not known what lanes may still carry: they are
    /// from before the peer was given up.
    pub(super) forgotten: Option<Epoch>,
    /// The latest epoch granted to this engine.
    pub(super) latest: Epoch,
    /// This engine takes no more rooms of it.
    pub(super) draining: bool,
    /// Given up: no rooms, and removed once its lanes are down.
    pub(super) gone: bool,
}

/// A frame that went down with a lane.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "few at a time; a box would be an allocation a frame"
)]
pub(super) enum LostFrame {
    /// Of a room that stands or is not released.
    Standing(Posting),
    /// Of a room that is gone, of which only this is kept.
    Over(Epoch),
}

impl LostFrame {
    pub(super) const fn epoch(&self) -> Epoch {
        match self {
            Self::Standing(posting) => posting.frame.epoch,
            Self::Over(epoch) => *epoch,
        }
    }
}

/// One of our pools against the peer's.
#[derive(Clone, Debug)]
pub(super) struct PeerPool {
    pub(super) pairing: Pairing,
    /// The peer's pages, for planning.
    pub(super) map: Arc<PageMap>,
}

impl PeerPool {
    fn new(pairing: Pairing) -> Self {
        let layers = pairing.layers.end - pairing.layers.start;
        let slice = pairing.remote;
        let page_bytes = slice.offset + slice.stride * u64::from(slice.rows);
        let (pages, stride) = (pairing.remote_pages, pairing.remote_stride);
        let map = PageMap::of_peer(layers, pairing.planes, pages, stride, page_bytes);
        Self { pairing, map: Arc::new(map) }
    }

    /// Where the peer's pages are. What does not fit the layout is not believed: such a pool's frames then
    /// name no memory of the peer, and are not sent.
    fn locate(&mut self, memory: &[PoolMemory]) {
        let Pairing { layers, planes, remote_pool, .. } = &self.pairing;
        let Some(memory) = memory.get(usize::from(*remote_pool)) else { return };
        let first = layers.start.checked_sub(memory.first_layer);
        let arrays = (0..*planes).flat_map(|plane| {
            let of_plane = plane as usize * memory.layers as usize;
            layers.clone().map(move |layer| (of_plane, layer))
        });
        let fits = layers.end - layers.start <= memory.layers;
        let found: Option<Vec<(u64, u64)>> = arrays
            .map(|(of_plane, layer)| {
                let at = first? as usize + (layer - layers.start) as usize;
                memory.arrays.get(of_plane + at).copied().filter(|_| fits)
            })
            .collect();
        if let Some(arrays) = found {
            self.map = Arc::new(PageMap::of_peer_arrays(layers.end - layers.start, arrays));
        }
    }
}

impl Peer {
    /// `before`: it was known before and given up, when this was its latest epoch.
    fn new(
        incarnation: Incarnation,
        addr: String,
        pairings: Vec<Pairing>,
        before: Option<Epoch>,
    ) -> Self {
        Self {
            incarnation,
            addr,
            pools: pairings.into_iter().map(PeerPool::new).collect(),
            outbox: None,
            backlog: VecDeque::new(),
            session: 0,
            session_since: Micros(0),
            ready: VecDeque::new(),
            returned: VecDeque::new(),
            links: Links::new(before.is_some()),
            answered: HashSet::new(),
            forgotten: before,
            latest: before.unwrap_or(Epoch(0)),
            draining: false,
            gone: false,
        }
    }

    /// The peer says where its pages are, before anything is written to it.
    pub(super) fn locate(&mut self, memory: &[PoolMemory]) {
        self.pools.iter_mut().for_each(|pool| pool.locate(memory));
    }

    /// Whether the peer came back with the layouts it had.
    pub(super) fn is_same(&self, pairings: &[Pairing]) -> bool {
        self.pools.iter().map(|pool| &pool.pairing).eq(pairings)
    }

    pub(super) fn session_up(&mut self, now: Micros, addr: String, outbox: mpsc::Sender<Message>) {
        self.addr = addr;
        self.outbox = Some(outbox);
        self.backlog.clear();
        self.session += 1;
        self.answered.clear();
        self.session_since = now;
    }

    /// What was not sent is not kept: what still stands is said again when the peer is back.
    pub(super) fn session_down(&mut self) {
        self.outbox = None;
        self.backlog.clear();
    }

    /// Whether a question about a lane is to be answered: the first in a session is.
    pub(super) fn may_answer(&mut self, lane: LaneId) -> bool {
        self.answered.len() < ANSWERS_MAX && self.answered.insert(lane)
    }

    pub(super) const fn has_session(&self) -> bool {
        self.outbox.is_some()
    }

    /// Sends what waits, as far as the session takes it. Says whether anything went out.
    fn flush(&mut self) -> bool {
        let mut sent = false;
        while let (Some(outbox), Some(message)) = (&self.outbox, self.backlog.pop_front()) {
            match outbox.try_send(message) {
                Ok(()) => sent = true,
                Err(mpsc::error::TrySendError::Full(message)) => {
                    self.backlog.push_front(message);
                    break;
                }
                // The session has ended; the control plane says so soon.
                Err(mpsc::error::TrySendError::Closed(_)) => self.session_down(),
            }
        }
        sent
    }
}

/// All peers.
#[derive(Debug)]
pub(super) struct Peers {
    table: Slots<Peer>,
    /// Those that are not given up.
    by_incarnation: HashMap<Incarnation, PeerIndex>,
    /// Those with a backlog.
    backlogged: Vec<PeerIndex>,
    /// Those whose backlog is over its bound.
    pub(super) deaf: Vec<Incarnation>,
    /// Those that were given up, with their latest epoch.
    given_up: HashMap<Incarnation, Epoch>,
    /// There were more of them.
    forgot_some: bool,
}

impl Peers {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            table: Slots::new(limit),
            by_incarnation: HashMap::new(),
            backlogged: Vec::new(),
            deaf: Vec::new(),
            given_up: HashMap::new(),
            forgot_some: false,
        }
    }

    /// Enters a new peer; `None` when the table is full.
    pub(super) fn insert(
        &mut self,
        incarnation: Incarnation,
        addr: String,
        pairings: Vec<Pairing>,
    ) -> Option<PeerIndex> {
        let before = match self.given_up.get(&incarnation) {
            None if self.forgot_some => Some(Epoch(u64::MAX)),
            before => before.copied(),
        };
        let peer = Peer::new(incarnation, addr, pairings, before);
        let index = self.table.insert(peer).ok().map(|(index, _)| PeerIndex(index))?;
        self.by_incarnation.insert(incarnation, index);
        Some(index)
    }

    /// A peer that was given up is back before its lanes were down or its rooms released: what is known
    /// of them still holds.
    pub(super) fn revive(&mut self, incarnation: Incarnation) -> Option<PeerIndex> {
        if mutations::is(Mutation::PeerNotRevived) {
            return None;
        }
        let (index, _) = self.table.iter().find(|(_, peer)| peer.incarnation == incarnation)?;
        let peer = self.table.get_mut(index).filter(|peer| peer.gone)?;
        peer.gone = false;
        peer.draining = false;
        self.by_incarnation.insert(incarnation, PeerIndex(index));
        Some(PeerIndex(index))
    }

    /// A peer is given up: it is not found any more, but keeps its place.
    pub(super) fn give_up(&mut self, index: PeerIndex) {
        if let Some(peer) = self.table.get_mut(index.0) {
            peer.session_down();
            peer.returned.clear();
            peer.gone = true;
            self.by_incarnation.remove(&peer.incarnation);
            // One that never had a lane or a grant left nothing to be remembered.
            if peer.links.next_serial() == 0 && peer.latest == Epoch(0) {
                return;
            }
            if self.given_up.len() < GIVEN_UP_MAX {
                self.given_up.insert(peer.incarnation, peer.latest);
            } else {
                self.forgot_some = true;
            }
        }
    }

    /// Whether a peer that is given up still has its place.
    pub(super) fn any_gone(&self) -> bool {
        self.table.len() > self.by_incarnation.len()
    }

    pub(super) fn remove(&mut self, index: PeerIndex) {
        self.table.remove(index.0);
        self.backlogged.retain(|&other| other != index);
    }

    /// The peer's place, unless it has been given up.
    pub(super) fn find(&self, incarnation: Incarnation) -> Option<PeerIndex> {
        self.by_incarnation.get(&incarnation).copied()
    }

    pub(super) fn get(&self, index: PeerIndex) -> Option<&Peer> {
        self.table.get(index.0)
    }

    pub(super) fn get_mut(&mut self, index: PeerIndex) -> Option<&mut Peer> {
        self.table.get_mut(index.0)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PeerIndex, &Peer)> {
        self.table.iter().map(|(index, peer)| (PeerIndex(index), peer))
    }

    /// Sends a message, or keeps it until the session takes it. Without a session it is dropped.
    pub(super) fn tell(&mut self, index: PeerIndex, message: Message) {
        let Some(peer) = self.table.get_mut(index.0).filter(|peer| peer.has_session()) else {
            return;
        };
        if peer.backlog.len() >= BACKLOG_MAX {
            peer.session_down();
            self.deaf.push(peer.incarnation);
            return;
        }
        peer.backlog.push_back(message);
        peer.flush();
        if !peer.backlog.is_empty() && !self.backlogged.contains(&index) {
            self.backlogged.push(index);
        }
    }

    /// Sends what waits. Says whether anything went out.
    pub(super) fn flush(&mut self) -> bool {
        let mut sent = false;
        let table = &mut self.table;
        self.backlogged.retain(|index| {
            let Some(peer) = table.get_mut(index.0) else { return false };
            sent |= peer.flush();
            !peer.backlog.is_empty()
        });
        sent
    }

    pub(super) const fn has_backlog(&self) -> bool {
        !self.backlogged.is_empty()
    }
}
