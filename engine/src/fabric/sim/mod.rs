//! A fabric of a simulated world, in virtual time: what RDMA or TCP does to frames, and to engines that
//! rely on it.
//!
//! All fabrics of a run share one [`World`]. *Unguarded*, as with RDMA, a write lands in the granted
//! pages whatever the receiving engine thinks of it by then, reads its source at the moment it lands, and
//! only its arrival is counted through the gate. *Guarded*, as with TCP, the gate is asked first. Lanes
//! keep the order of their frames and none other; each end of a lane goes down by itself, and until the
//! receiving end has, what is on the way still lands.

mod arrive;
mod flow;
mod lanes;
mod memory;
mod receive;
mod world;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

pub(crate) use self::lanes::{CloseAt, EndState};
pub(crate) use self::world::{Target, WireFaults, World};
use super::{Event, Fabric, Gate, NewLane, PeerIndex, Posting, RoomTag};
use crate::ids::{Epoch, LaneId};

/// One end of a wire, to be adopted as a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) wire: usize,
    /// 0 or 1.
    pub(crate) end: usize,
}

/// An engine's hold on the world.
#[derive(Debug)]
pub(crate) struct SimFabric {
    engine: usize,
    world: Rc<RefCell<World>>,
}

impl SimFabric {
    pub(crate) const fn new(engine: usize, world: Rc<RefCell<World>>) -> Self {
        Self { engine, world }
    }
}

impl Fabric for SimFabric {
    fn is_guarded(&self, _: PeerIndex) -> bool {
        self.world.borrow().guarded
    }

    fn add_lane(&mut self, peer: PeerIndex, lane: NewLane) {
        self.world.borrow_mut().add_lane(self.engine, peer, lane);
    }

    fn close_lane(&mut self, peer: PeerIndex, lane: LaneId, cause: &str) {
        self.world.borrow_mut().close_lanes(self.engine, peer, Some(lane), cause);
    }

    fn close_peer(&mut self, peer: PeerIndex, cause: &str) {
        self.world.borrow_mut().close_lanes(self.engine, peer, None, cause);
    }

    fn has_room(&self, peer: PeerIndex) -> bool {
        self.world.borrow().has_room(self.engine, peer)
    }

    fn post(&mut self, peer: PeerIndex, posting: Posting) {
        self.world.borrow_mut().post(self.engine, peer, posting);
    }

    fn fence(&mut self, peer: PeerIndex, _: Option<RoomTag>, cause: &str) -> usize {
        self.world.borrow_mut().close_lanes(self.engine, peer, None, cause)
    }

    fn retract(&mut self, peer: PeerIndex, tag: RoomTag, _: bool) {
        self.world.borrow_mut().retract(self.engine, peer, tag);
    }

    fn revoke(&mut self, peer: PeerIndex, slot: u32, epoch: Epoch) {
        self.world.borrow_mut().revoke(self.engine, peer, slot, epoch);
    }

    fn poll(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool {
        self.world.borrow_mut().poll(self.engine, gate, events)
    }

    fn close(&mut self) -> bool {
        self.world.borrow_mut().end_engine(self.engine);
        true
    }

    fn spins(&self) -> bool {
        false
    }

    fn sleep(&mut self, _: Duration) {}
}
