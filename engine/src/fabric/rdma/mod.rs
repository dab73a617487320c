//! RDMA lanes: pages written from source to destination by the NICs, through RC queue pairs.
//!
//! A frame is a chain of writes and, behind them on the same queue pair, a send of its header: when the
//! header has come, the writes before it have landed. The receiver counts it, tells the sender how far it
//! counted, and that alone is an acknowledgement. Nothing is checked before it lands: what a peer was told
//! the keys of it can write, so pages are quiet when it says so, or when every queue pair to it is
//! destroyed.

mod complete;
mod connect;
mod keys;
mod lane;
mod nic;
mod pairs;
mod rails;
mod transmit;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use kvferry_verbs::Completion;
use rustix::event::epoll;

use self::complete::COMPLETIONS_PER_POLL;
pub(crate) use self::connect::{HalfLane, LaneFault, RdmaLink, RemoteRails};
use self::lane::{Fault, Lane, Stage};
use self::nic::WorkerNic;
pub(crate) use self::pairs::{RailPair, pair_rails};
pub use self::rails::RdmaError;
pub(crate) use self::rails::{RailEvents, RailNews, Rails};
use super::{Event, Fabric, Gate, Link, NewLane, PeerIndex, Posting, RoomTag};
use crate::ids::{Epoch, LaneId};
use crate::memory::PageMap;

/// Marks the work request number of a receive.
const RECEIVE: u64 = 1 << 63;

/// What a work request number says.
enum Completed {
    Receive(u32),
    Send {
        slot: u32,
        generation: u16,
        /// Its number on the lane, the low 32 bits of it.
        wr: u32,
    },
}

/// The number of a lane's work request: 15 bits of slot, 16 of generation, 32 of count.
const fn wr_id(slot: u32, generation: u16, wr: u64) -> u64 {
    (slot as u64) << 48 | (generation as u64) << 32 | (wr & 0xffff_ffff)
}

const fn completed(wr_id: u64) -> Completed {
    if wr_id & RECEIVE != 0 {
        return Completed::Receive((wr_id & !RECEIVE) as u32);
    }
    Completed::Send {
        slot: (wr_id >> 48) as u32,
        generation: (wr_id >> 32) as u16,
        wr: wr_id as u32,
    }
}

/// Lanes of a worker: what 15 bits name.
const LANES_MAX: usize = 1 << 15;

/// See the module.
#[derive(Debug)]
pub(crate) struct RdmaFabric {
    rails: Arc<Rails>,
    nics: Vec<WorkerNic>,
    lanes: Vec<Option<Lane>>,
    /// Generation of the next lane in each place.
    generations: Vec<u16>,
    free: Vec<u32>,
    by_peer: Vec<Vec<u32>>,
    by_qp: HashMap<(usize, u32), u32>,
    completions: Vec<Completion>,
    /// Lanes on which something may have to be posted, or that are to be taken down.
    restless: Vec<u32>,
    /// Rooms whose sources are to be quiet.
    retracting: Vec<(PeerIndex, RoomTag)>,
    early: Vec<Event>,
    /// Peers with a queue pair that could be neither stopped nor destroyed: what its NIC still reads and
    /// writes nobody knows, so nothing of theirs is ever said to be quiet again.
    stuck: Vec<PeerIndex>,
    /// Readable when a sleeping worker has completions; whoever sleeps takes it.
    events_fd: Option<OwnedFd>,
}

impl RdmaFabric {
    /// # Errors
    /// A NIC does not take the receives, or the operating system no file descriptor.
    pub(crate) fn new(rails: Arc<Rails>) -> Result<Self, RdmaError> {
        let nics: Result<Vec<WorkerNic>, _> =
            (0..rails.nics.len()).map(|nic| WorkerNic::new(&rails, nic)).collect();
        let nics = nics?;
        let os = |errno: rustix::io::Errno| RdmaError::Os(errno.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os)?;
        for (at, nic) in nics.iter().enumerate() {
            let data = epoll::EventData::new_u64(at as u64);
            epoll::add(&epoll, nic.channel.as_fd(), data, epoll::EventFlags::IN).map_err(os)?;
        }
        Ok(Self {
            rails,
            nics,
            lanes: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            by_peer: Vec::new(),
            by_qp: HashMap::new(),
            completions: vec![Completion::EMPTY; COMPLETIONS_PER_POLL],
            restless: Vec::new(),
            retracting: Vec::new(),
            early: Vec::new(),
            stuck: Vec::new(),
            events_fd: Some(epoll),
        })
    }

    /// What a sleeping worker has to watch.
    pub(super) const fn take_events_fd(&mut self) -> Option<OwnedFd> {
        self.events_fd.take()
    }

    /// Whether a lane of the peer carries frames.
    pub(super) fn carries(&self, peer: PeerIndex) -> bool {
        self.lanes_of(peer).any(|(_, lane)| lane.stage == Stage::Open && !lane.is_closing())
    }

    /// Whether the peer has a lane, in whatever stage.
    pub(super) fn reaches(&self, peer: PeerIndex) -> bool {
        self.by_peer.get(peer.0 as usize).is_some_and(|lanes| !lanes.is_empty())
    }

    /// Asks to be woken by completions. Says whether none have come meanwhile: then the worker may sleep.
    pub(super) fn arm(&mut self) -> bool {
        for nic in self.nics.iter_mut().filter(|nic| nic.lanes > 0 && !nic.armed) {
            nic.armed = nic.cq.request_notify().is_ok();
            if nic.armed {
                // One that came before is not told of: look once more.
                return false;
            }
        }
        true
    }

    /// After a sleep: takes what the channels had to say.
    pub(super) fn awake(&mut self) {
        for nic in self.nics.iter_mut().filter(|nic| nic.armed) {
            if nic.channel.take_events().is_ok_and(|events| events > 0) {
                nic.armed = false;
            }
        }
    }

    fn lanes_of(&self, peer: PeerIndex) -> impl Iterator<Item = (u32, &Lane)> {
        let slots = self.by_peer.get(peer.0 as usize).map_or(&[][..], Vec::as_slice);
        slots.iter().filter_map(|&slot| Some((slot, self.lanes[slot as usize].as_ref()?)))
    }

    /// Something may have to be done about a lane.
    fn look_at(&mut self, slot: u32) {
        if let Some(lane) = self.lanes[slot as usize].as_mut()
            && !std::mem::replace(&mut lane.kicked, true)
        {
            self.restless.push(slot);
        }
    }

    fn close(&mut self, slot: u32, cause: &str) {
        if let Some(lane) = self.lanes[slot as usize].as_mut() {
            lane.fail(Fault { cause: cause.to_owned(), culprit: None });
            self.look_at(slot);
        }
    }

    fn close_where(&mut self, cause: &str, meant: impl Fn(&Lane) -> bool) -> usize {
        let slots = (0..self.lanes.len() as u32)
            .filter(|&slot| self.lanes[slot as usize].as_ref().is_some_and(&meant));
        let slots: Vec<u32> = slots.collect();
        slots.iter().for_each(|&slot| self.close(slot, cause));
        slots.len()
    }

    /// Posts on lanes that may take something.
    fn transmit(&mut self, events: &mut Vec<Event>) -> bool {
        let mut restless = std::mem::take(&mut self.restless);
        let mut progress = false;
        for slot in restless.drain(..) {
            let Some(lane) = self.lanes[slot as usize].as_mut() else { continue };
            lane.kicked = false;
            let before = lane.posted;
            // Answers first: the peer may be waiting for them to send more.
            lane.answer_peer(slot);
            lane.transmit(slot, events);
            progress |= lane.posted > before;
            if lane.is_closing() {
                self.look_at(slot);
            }
        }
        // Its memory is used again.
        restless.append(&mut self.restless);
        self.restless = restless;
        progress
    }

    /// Says of rooms that are being retracted that their sources are quiet, once they are.
    fn settle_retracted(&mut self, events: &mut Vec<Event>) {
        let mut retracting = std::mem::take(&mut self.retracting);
        retracting.retain(|&(peer, tag)| {
            let reads =
                self.stuck.contains(&peer) || self.lanes_of(peer).any(|(_, lane)| lane.reads(tag));
            if !reads {
                events.push(Event::SourceQuiet { tag });
            }
            reads
        });
        self.retracting = retracting;
    }

    /// Lets go of a pool's memory that no other pool is in.
    pub(super) fn forget(&self, map: &PageMap, others: &[&PageMap]) {
        self.rails.forget(map, others);
    }
}

impl Fabric for RdmaFabric {
    fn is_guarded(&self, _: PeerIndex) -> bool {
        false
    }

    fn add_lane(&mut self, peer: PeerIndex, lane: NewLane) {
        let NewLane { id, number, link, .. } = lane;
        let Link::Rdma(link) = link else { return };
        let (nic, ready) = (self.rails.rails[usize::from(link.rail)].nic, link.ready);
        let qp_num = link.path.local.qp_num;
        let local = Arc::clone(&self.rails.nics[nic].local);
        let mut lane = Lane::new(peer, id, number, (nic, local), *link);
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.lanes.push(None);
                self.generations.push(0);
                (self.lanes.len() - 1) as u32
            }
        };
        let generation = &mut self.generations[slot as usize];
        *generation = generation.wrapping_add(1);
        lane.generation = *generation;
        if slot as usize >= LANES_MAX {
            lane.fail(Fault { cause: "the worker has too many lanes".to_owned(), culprit: None });
        }
        self.lanes[slot as usize] = Some(lane);
        self.by_qp.insert((nic, qp_num), slot);
        let peer = peer.0 as usize;
        if self.by_peer.len() <= peer {
            self.by_peer.resize_with(peer + 1, Vec::new);
        }
        self.by_peer[peer].push(slot);
        self.nics[nic].lanes += 1;
        if ready && let Some(lane) = self.lanes[slot as usize].as_mut() {
            lane.prove(slot);
        }
        self.look_at(slot);
    }

    fn lane_ready(&mut self, peer: PeerIndex, id: LaneId) {
        let found = self.lanes_of(peer).find(|(_, lane)| lane.id == id).map(|(slot, _)| slot);
        if let Some(slot) = found
            && let Some(lane) = self.lanes[slot as usize].as_mut()
        {
            lane.prove(slot);
            self.look_at(slot);
        }
    }

    fn session_down(&mut self, peer: PeerIndex) {
        // The word that would have opened them may be lost.
        let waits = |lane: &Lane| lane.peer == peer && lane.stage == Stage::Waiting;
        self.close_where("the session was lost before the peer's end stood", waits);
    }

    fn close_rail(&mut self, rail: u8, cause: &str) {
        self.close_where(cause, |lane| lane.rail == rail);
    }

    fn close_lane(&mut self, peer: PeerIndex, id: LaneId, cause: &str) {
        self.close_where(cause, |lane| lane.peer == peer && lane.id == id);
    }

    fn close_peer(&mut self, peer: PeerIndex, cause: &str) {
        self.close_where(cause, |lane| lane.peer == peer);
    }

    fn has_room(&self, peer: PeerIndex) -> bool {
        self.lanes_of(peer).any(|(_, lane)| lane.has_room())
    }

    fn post(&mut self, peer: PeerIndex, posting: Posting) {
        let open = self.lanes_of(peer).filter(|(_, lane)| lane.has_room());
        let Some((slot, _)) = open.min_by_key(|(_, lane)| lane.bytes) else {
            debug_assert!(false, "posted without room");
            return self.early.push(Event::Returned { peer, posting: Box::new(posting) });
        };
        if let Some(lane) = self.lanes[slot as usize].as_mut() {
            lane.bytes += u64::from(posting.frame.payload_bytes);
            lane.waiting.push_back(posting);
        }
        self.look_at(slot);
    }

    fn kick(&mut self) {
        let mut events = std::mem::take(&mut self.early);
        self.transmit(&mut events);
        self.early = events;
    }

    fn fence(&mut self, peer: PeerIndex, source: Option<RoomTag>, cause: &str) -> usize {
        self.close_where(cause, |lane| {
            lane.peer == peer && source.is_none_or(|tag| lane.reads(tag))
        })
    }

    fn retract(&mut self, peer: PeerIndex, tag: RoomTag, _done: bool) {
        let mut reads = self.stuck.contains(&peer);
        for at in 0..self.by_peer.get(peer.0 as usize).map_or(0, Vec::len) {
            let slot = self.by_peer[peer.0 as usize][at];
            if let Some(lane) = self.lanes[slot as usize].as_mut() {
                reads |= lane.retract(tag);
            }
            self.look_at(slot);
        }
        if reads {
            self.retracting.push((peer, tag));
        } else {
            self.early.push(Event::SourceQuiet { tag });
        }
    }

    fn revoke(&mut self, _: PeerIndex, slot: u32, epoch: Epoch) {
        // This side has no hand in what lands.
        self.early.push(Event::TargetQuiet { slot, epoch });
    }

    fn poll(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool {
        let mut progress = !self.early.is_empty();
        events.append(&mut self.early);
        progress |= self.poll_nics(gate, events);
        progress |= self.transmit(events);
        let mut at = 0;
        while at < self.restless.len() {
            let slot = self.restless[at];
            if self.lanes[slot as usize].as_ref().is_none_or(Lane::is_closing) {
                self.restless.swap_remove(at);
                self.take_down(slot, gate, events);
                progress = true;
            } else {
                at += 1;
            }
        }
        progress
    }

    fn is_stuck(&self) -> bool {
        !self.stuck.is_empty()
    }

    fn close(&mut self) -> bool {
        self.by_qp.clear();
        let mut closed = self.stuck.is_empty();
        for lane in self.lanes.iter_mut().filter_map(Option::take) {
            closed &= lane.qp.destroy().is_ok();
        }
        closed
    }

    fn spins(&self) -> bool {
        true
    }

    fn sleep(&mut self, _: Duration) {
        // The worker sleeps on the tcp driver, which watches the events fd.
    }
}
