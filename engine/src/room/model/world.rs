//! What there is in the model: two engines, their lanes and session, pages, and what was witnessed.
//!
//! The machines are the engine's own; what stands around them mirrors the worker, and names the function.

use std::collections::VecDeque;

use super::setup::Setup;
use crate::ids::{Epoch, Micros, Role};
use crate::room::links::{Links, Tally};
use crate::room::receiver::Receiver;
use crate::room::release::Release;
use crate::room::sender::Sender;

/// When everything happens that is no deadline.
pub(super) const NOW: Micros = Micros(0);
pub(super) const FENCE_AT: Micros = Micros(1);
pub(super) const GRANT_DEADLINE: Micros = Micros(2);
pub(super) const RECEIVER_DEADLINE: Micros = Micros(3);
pub(super) const SENDER_DEADLINE: Micros = Micros(4);
/// Frames that a page has place for.
pub(super) const CELLS: usize = 2;

/// One epoch, in all the model: the number of the grant.
pub(super) type Life = u8;

pub(super) const fn epoch(life: Life) -> Epoch {
    Epoch(life as u64 + 1)
}

/// What engines say to each other: the model's [`Message`](crate::wire::message::Message).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Word {
    Grant {
        life: Life,
    },
    Finished {
        life: Life,
        sent: u64,
    },
    Landed {
        life: Life,
    },
    Failed {
        life: Life,
        to: Role,
    },
    Drained {
        life: Life,
    },
    LaneLost {
        lane: u8,
    },
    LaneTally {
        lane: u8,
        tally: Option<Tally>,
    },
    Sync,
    /// A lane is up at the receiver. Not the worker's word: the blob or token that a lane is made of.
    LaneReady {
        lane: u8,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    /// Prefill, decode.
    pub(super) engines: [Engine; 2],
    pub(super) lanes: Vec<Lane>,
    /// Sending rooms, by plan; none that are not open or are released.
    pub(super) sending: Vec<Option<SendRoom>>,
    /// Grants that wait for a room.
    pub(super) waiting: Vec<WaitingGrant>,
    /// Receiving rooms that are not released.
    pub(super) receiving: Vec<RecvRoom>,
    /// Whose bytes stand where, page by page.
    pub(super) pages: Vec<[Option<Life>; CELLS]>,
    pub(super) faults: Faults,
    pub(super) witness: Witness,
}

/// Faults that are still to come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Faults {
    pub(super) aborts: u8,
    /// Ends of lanes that go down by themselves.
    pub(super) lanes: u8,
    /// Sessions that break.
    pub(super) sessions: u8,
    /// Engines that crash and come back as another incarnation.
    pub(super) crashes: [u8; 2],
    /// Peers that are given up though they live.
    pub(super) give_ups: u8,
}

/// One engine's worker, as far as it is not about one role.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Engine {
    pub(super) incarnation: u8,
    /// The latest session it was in.
    pub(super) session: u8,
    pub(super) peers: Vec<Peer>,
    /// Told verdicts: the peer's incarnation, the room, the words.
    pub(super) verdicts: Vec<(u8, Life, Word)>,
    /// Words on their way to it, with the session they were said in.
    pub(super) inbox: VecDeque<(u8, Word)>,
}

/// `worker::peers::Peer`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Peer {
    pub(super) incarnation: u8,
    pub(super) has_session: bool,
    pub(super) gone: bool,
    pub(super) links: Links<LostFrame>,
    pub(super) returned: Vec<Frame>,
    /// Epochs up to this were heard of, those up to that by an earlier entry of the peer.
    pub(super) latest: Epoch,
    pub(super) forgotten: Epoch,
}

impl Peer {
    /// The peer's first entry, or another one of a peer that was given up.
    pub(super) fn new(incarnation: u8, before: Option<&Self>) -> Self {
        let (links, returned) = (Links::new(before.is_some()), Vec::new());
        let latest = before.map_or(Epoch(0), |before| before.latest);
        let (has_session, gone) = (false, false);
        Self { incarnation, has_session, gone, links, returned, latest, forgotten: latest }
    }
}

/// `worker::peers::LostFrame`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum LostFrame {
    Standing(Frame),
    Over(Life),
}

impl LostFrame {
    pub(super) const fn life(self) -> Life {
        match self {
            Self::Standing(frame) => frame.life,
            Self::Over(life) => life,
        }
    }
}

/// A write of one cell of a page: `fabric::Posting`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Frame {
    /// The sending room.
    pub(super) room: u8,
    pub(super) life: Life,
    pub(super) cell: u8,
    /// It had left whole on a lane that went down.
    pub(super) again: bool,
    /// Its bytes are not the source's any more.
    pub(super) filler: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum End {
    Unborn,
    Up {
        peer: u8,
    },
    /// Closed, with operations in flight.
    Closing {
        peer: u8,
    },
    Down,
}

impl End {
    pub(super) const fn peer(self) -> Option<u8> {
        match self {
            Self::Up { peer } | Self::Closing { peer } => Some(peer),
            Self::Unborn | Self::Down => None,
        }
    }
}

/// A lane, both ends and what is between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lane {
    /// Prefill's, decode's.
    pub(super) ends: [End; 2],
    /// Posted and not begun.
    pub(super) waiting: VecDeque<Frame>,
    /// Begun and not acknowledged, with their numbers, and whether they are known to have left.
    pub(super) ledger: VecDeque<(u64, Frame, bool)>,
    pub(super) begun: u64,
    /// Begun and not landed.
    pub(super) wire: VecDeque<Frame>,
    /// What landed, or was drained.
    pub(super) tally: Tally,
}

impl Lane {
    pub(super) fn new(end: End) -> Self {
        Self {
            ends: [end; 2],
            waiting: VecDeque::new(),
            ledger: VecDeque::new(),
            begun: 0,
            wire: VecDeque::new(),
            tally: Tally::default(),
        }
    }
}

/// `worker::sending::SendRoom`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SendRoom {
    pub(super) core: Sender,
    pub(super) bound: Option<Bound>,
    pub(super) posted: u8,
    pub(super) finish_asked: bool,
    /// A refused write waits for its explanation.
    pub(super) suspect: bool,
    pub(super) asked: bool,
    pub(super) release: Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bound {
    pub(super) peer: u8,
    pub(super) life: Life,
    pub(super) session: u8,
}

/// `worker::sending::WaitingGrant`.
pub(super) type WaitingGrant = Bound;

/// `worker::receiving::RecvRoom`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct RecvRoom {
    pub(super) life: Life,
    pub(super) core: Receiver,
    pub(super) peer: u8,
    pub(super) release: Release,
    pub(super) fenced: bool,
}

/// How a room ended at one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Verdict {
    Unborn,
    Live,
    Done,
    Failed,
    Unknown,
    /// Its engine crashed.
    Lost,
}

/// What an observer of both engines has seen. The engines do not know it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Witness {
    /// By plan: the verdict, and the grant it was matched to.
    pub(super) senders: Vec<(Verdict, Option<Life>)>,
    /// By grant: its plan, and the verdict.
    pub(super) receivers: Vec<(u8, Verdict)>,
    /// The first promise broken; nothing is searched behind it.
    pub(super) wrong: Option<Wrong>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Wrong {
    EndedTwice,
    DoneWithoutItsBytes,
    LandedAfterRelease,
    ReadAfterRelease,
    Backwards,
    ChangedAfterTheEnd,
}

pub(super) const fn side(role: Role) -> usize {
    match role {
        Role::Sender => 0,
        Role::Receiver => 1,
    }
}

/// One step of a world: the worker's functions are methods of this.
pub(super) struct Turn<'a> {
    pub(super) setup: &'a Setup,
    pub(super) world: World,
}

impl World {
    pub(super) fn new(setup: &Setup) -> Self {
        let engine = || Engine {
            incarnation: 0,
            session: 0,
            peers: vec![Peer { has_session: true, ..Peer::new(0, None) }],
            verdicts: Vec::new(),
            inbox: VecDeque::new(),
        };
        let mut engines = [engine(), engine()];
        let mut lanes = vec![Lane::new(End::Up { peer: 0 }); usize::from(setup.lanes)];
        for lane in 0..setup.lanes {
            engines.iter_mut().for_each(|engine| {
                engine.peers[0].links.up(lane_id(lane));
            });
        }
        lanes.extend((0..setup.spare_lanes).map(|_| Lane::new(End::Unborn)));
        let plans = setup.plans.len();
        Self {
            engines,
            lanes,
            sending: vec![None; plans],
            waiting: Vec::new(),
            receiving: Vec::new(),
            pages: vec![[None; CELLS]; plans],
            faults: setup.faults,
            witness: Witness {
                senders: vec![(Verdict::Unborn, None); plans],
                receivers: Vec::new(),
                wrong: None,
            },
        }
    }

    /// The plan a grant is of.
    pub(super) fn plan_of(&self, life: Life) -> u8 {
        self.witness.receivers[usize::from(life)].0
    }

    pub(super) fn engine(&mut self, role: Role) -> &mut Engine {
        &mut self.engines[side(role)]
    }

    pub(super) fn peer(&mut self, role: Role, peer: u8) -> &mut Peer {
        &mut self.engines[side(role)].peers[usize::from(peer)]
    }

    /// The grant whose pages are a page now.
    pub(super) fn owner(&self, setup: &Setup, page: u8) -> Option<Life> {
        let holds =
            |room: &&RecvRoom| setup.plans[usize::from(self.plan_of(room.life))].page == page;
        self.receiving.iter().find(holds).map(|room| room.life)
    }
}

pub(super) const fn lane_id(lane: u8) -> crate::ids::LaneId {
    crate::ids::LaneId(lane as u64)
}

impl Turn<'_> {
    pub(super) fn wrong(&mut self, what: Wrong) {
        self.world.witness.wrong.get_or_insert(what);
    }
}
