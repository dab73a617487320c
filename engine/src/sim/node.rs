//! An engine of the simulation: one incarnation, its worker, its queues, its clock.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use tokio::sync::mpsc;

use super::model;
use crate::fabric::sim::{SimFabric, World};
use crate::failure::FailureKind;
use crate::ids::{Incarnation, Micros};
use crate::memory::{AllocOptions, Pool, PoolCard, Region};
use crate::room::cell::Unreleased;
use crate::worker::mail::{ToControl, ToWorker};
use crate::worker::submit::Submission;
use crate::worker::{Limits, Queues, Worker};

/// Bytes of an aux slot.
pub(super) const AUX_BYTES: usize = 32;
const AUX_SLOTS: usize = 64;
const QUEUE: usize = 4096;

/// See the module.
pub(super) struct Node {
    /// Its place: what a restarted engine takes over.
    pub(super) slot: usize,
    pub(super) incarnation: Incarnation,
    /// Gone once it has crashed or stopped.
    pub(super) worker: Option<Worker<SimFabric>>,
    pub(super) submissions: mpsc::Sender<Submission>,
    pub(super) mail: mpsc::Sender<ToWorker>,
    pub(super) control: mpsc::Receiver<ToControl>,
    pub(super) unreleased: Unreleased,
    pub(super) next_epoch: u64,
    pub(super) pool: Pool,
    pub(super) free: Vec<u32>,
    pub(super) aux: Region,
    pub(super) aux_free: Vec<usize>,
    /// Rooms that are not released.
    pub(super) rooms: Vec<usize>,
    /// How far its clock is ahead.
    pub(super) skew_us: u64,
    /// When it was last prevented from doing what is due.
    pub(super) excused_us: u64,
    pub(super) jumped: bool,
    pub(super) stalled: bool,
    pub(super) for_ever: bool,
    pub(super) stopping: bool,
    /// When its next turn is due.
    pub(super) turn_at_us: u64,
    pub(super) next_lane: u16,
    /// Wire and end, by its own lane numbers.
    pub(super) lanes: BTreeMap<u16, (usize, usize)>,
    pub(super) pairs: Vec<usize>,
    /// Peers it gave up, and why.
    pub(super) gone: Vec<(usize, FailureKind)>,
    pub(super) draining: bool,
    pub(super) drained: Vec<usize>,
}

impl Node {
    pub(super) fn new(
        world: &Rc<RefCell<World>>,
        slot: usize,
        unequal: u8,
        fence_after_ms: u64,
        frame_bytes: u64,
    ) -> Self {
        let layout = model::layout(unequal, slot);
        let pool = Pool::allocate(layout, AllocOptions { huge_pages: false });
        // A simulation that gets no memory for a few pages has nothing to say.
        let pool = pool.unwrap_or_else(|error| panic!("no memory for a simulated pool: {error}"));
        let free: Vec<u32> = (0..model::PAGES).collect();
        model::paint(&pool, &free, model::SENTINEL);
        let engine = world.borrow_mut().add_engine(pool.clone());
        let incarnation = Incarnation((engine as u128 + 1) << 96);
        let (submissions, take_submissions) = mpsc::channel(QUEUE);
        let (mail, inbox) = mpsc::channel(QUEUE);
        let (to_control, control) = mpsc::channel(QUEUE);
        let queues = Queues { submissions: take_submissions, inbox, control: to_control };
        let pages: Arc<[AtomicU32]> = [AtomicU32::new(model::PAGES)].into();
        let limits = Limits { max_rooms: 1 << 12, max_peers: 64, fence_after_ms };
        let fabric = SimFabric::new(engine, Rc::clone(world));
        let pools = (vec![Arc::clone(&pool.map)], pages);
        let mut worker = Worker::new(incarnation, fabric, queues, pools, limits, Arc::default());
        worker.set_frame_bytes(frame_bytes);
        Self {
            slot,
            incarnation,
            worker: Some(worker),
            submissions,
            mail,
            control,
            unreleased: Arc::default(),
            next_epoch: 1,
            pool,
            free,
            aux: Region::from_vec(vec![0; AUX_BYTES * AUX_SLOTS]),
            aux_free: (0..AUX_SLOTS).collect(),
            rooms: Vec::new(),
            skew_us: 0,
            excused_us: 0,
            jumped: false,
            stalled: false,
            for_ever: false,
            stopping: false,
            turn_at_us: u64::MAX,
            next_lane: 1,
            lanes: BTreeMap::new(),
            pairs: Vec::new(),
            gone: Vec::new(),
            draining: false,
            drained: Vec::new(),
        }
    }

    pub(super) fn card(&self) -> PoolCard {
        PoolCard { layout: self.pool.layout.clone(), page_stride: self.pool.layout.page_bytes() }
    }

    pub(super) const fn is_alive(&self) -> bool {
        self.worker.is_some()
    }

    /// Whether its callers and its control plane do anything now.
    pub(super) const fn is_running(&self) -> bool {
        self.is_alive() && !self.stalled && !self.stopping
    }

    /// Its own clock at a moment of the world's.
    pub(super) const fn clock(&self, now_us: u64) -> Micros {
        Micros(now_us + self.skew_us)
    }
}
