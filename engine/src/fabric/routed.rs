//! Each peer's frames over the best there is: RDMA where a lane of it is open, TCP otherwise.

use std::time::Duration;

use super::rdma::RdmaFabric;
use super::tcp::TcpFabric;
use super::tcp::driver::Driver;
use super::{Event, Fabric, Gate, Link, NewLane, PeerIndex, Posting, RoomTag};
use crate::ids::{Epoch, LaneId};
use crate::memory::PageMap;

/// See the module.
#[derive(Debug)]
pub(crate) struct Routed<D: Driver> {
    tcp: TcpFabric<D>,
    rdma: Option<RdmaFabric>,
    /// Rooms of which one of the two has still to say that their sources are quiet.
    retracting: Vec<RoomTag>,
}

impl<D: Driver> Routed<D> {
    pub(crate) fn new(mut tcp: TcpFabric<D>, mut rdma: Option<RdmaFabric>) -> Self {
        if let Some(rdma) = &mut rdma
            && let Some(fd) = rdma.take_events_fd()
        {
            tcp.watch(fd);
        }
        Self { tcp, rdma, retracting: Vec::new() }
    }

    fn by_rdma(&self, peer: PeerIndex) -> Option<&RdmaFabric> {
        self.rdma.as_ref().filter(|rdma| rdma.carries(peer))
    }
}

impl<D: Driver> Fabric for Routed<D> {
    fn is_guarded(&self, peer: PeerIndex) -> bool {
        self.rdma.as_ref().is_none_or(|rdma| !rdma.reaches(peer))
    }

    fn add_lane(&mut self, peer: PeerIndex, lane: NewLane) {
        match (&lane.link, &mut self.rdma) {
            (Link::Rdma(_), Some(rdma)) => rdma.add_lane(peer, lane),
            _ => self.tcp.add_lane(peer, lane),
        }
    }

    fn lane_ready(&mut self, peer: PeerIndex, lane: LaneId) {
        if let Some(rdma) = &mut self.rdma {
            rdma.lane_ready(peer, lane);
        }
    }

    fn session_down(&mut self, peer: PeerIndex) {
        if let Some(rdma) = &mut self.rdma {
            rdma.session_down(peer);
        }
    }

    fn close_rail(&mut self, rail: u8, cause: &str) {
        if let Some(rdma) = &mut self.rdma {
            rdma.close_rail(rail, cause);
        }
    }

    fn close_lane(&mut self, peer: PeerIndex, lane: LaneId, cause: &str) {
        self.tcp.close_lane(peer, lane, cause);
        if let Some(rdma) = &mut self.rdma {
            rdma.close_lane(peer, lane, cause);
        }
    }

    fn close_peer(&mut self, peer: PeerIndex, cause: &str) {
        self.tcp.close_peer(peer, cause);
        if let Some(rdma) = &mut self.rdma {
            rdma.close_peer(peer, cause);
        }
    }

    fn has_room(&self, peer: PeerIndex) -> bool {
        self.by_rdma(peer).map_or_else(|| self.tcp.has_room(peer), |rdma| rdma.has_room(peer))
    }

    fn post(&mut self, peer: PeerIndex, posting: Posting) {
        match &mut self.rdma {
            Some(rdma) if rdma.carries(peer) => rdma.post(peer, posting),
            _ => self.tcp.post(peer, posting),
        }
    }

    fn kick(&mut self) {
        if let Some(rdma) = &mut self.rdma {
            rdma.kick();
        }
    }

    fn fence(&mut self, peer: PeerIndex, source: Option<RoomTag>, cause: &str) -> usize {
        // Where a room waits for lanes to be down it waits for all that stood at its end.
        let tcp = self.tcp.fence(peer, source, cause);
        tcp + self.rdma.as_mut().map_or(0, |rdma| rdma.fence(peer, source, cause))
    }

    fn retract(&mut self, peer: PeerIndex, tag: RoomTag, done: bool) {
        self.tcp.retract(peer, tag, done);
        if let Some(rdma) = self.rdma.as_mut().filter(|rdma| rdma.reaches(peer)) {
            rdma.retract(peer, tag, done);
            self.retracting.push(tag);
        }
    }

    fn revoke(&mut self, peer: PeerIndex, slot: u32, epoch: Epoch) {
        // Where the NIC places there is nothing to stop here.
        self.tcp.revoke(peer, slot, epoch);
    }

    fn forget_pool(&mut self, map: &PageMap, others: &[&PageMap]) {
        if let Some(rdma) = &self.rdma {
            rdma.forget(map, others);
        }
    }

    fn poll(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool {
        let from = events.len();
        // Not even a look at sockets where there are none: it can cost a system call.
        let tcp = self.tcp.has_lanes() || self.rdma.is_none();
        let mut progress = tcp && self.tcp.poll(gate, events);
        if let Some(rdma) = &mut self.rdma {
            progress |= rdma.poll(gate, events);
        }
        if !self.retracting.is_empty() {
            let retracting = &mut self.retracting;
            let mut at = 0;
            events.retain(|event| {
                at += 1;
                let Event::SourceQuiet { tag } = event else { return true };
                let first = retracting.iter().position(|other| other == tag);
                at <= from || first.map(|first| retracting.swap_remove(first)).is_none()
            });
        }
        progress
    }

    fn is_stuck(&self) -> bool {
        self.rdma.as_ref().is_some_and(RdmaFabric::is_stuck)
    }

    fn close(&mut self) -> bool {
        let rdma = self.rdma.as_mut().is_none_or(RdmaFabric::close);
        self.tcp.close() && rdma
    }

    fn spins(&self) -> bool {
        self.tcp.spins() || self.rdma.is_some() && !self.tcp.has_lanes()
    }

    fn sleep(&mut self, timeout: Duration) {
        match &mut self.rdma {
            Some(rdma) => {
                if rdma.arm() {
                    self.tcp.sleep(timeout);
                    rdma.awake();
                }
            }
            None => self.tcp.sleep(timeout),
        }
    }
}
