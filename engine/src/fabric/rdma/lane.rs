//! A lane: one queue pair, what is posted on it, in order, and what came on it.
//!
//! Work requests are numbered from 0 in the order they are posted; a completion of one is a completion of
//! all before it, and an error of one tells whose it is.

use std::collections::VecDeque;
use std::sync::Arc;

use kvferry_verbs::Qp;

use super::super::{PeerIndex, Posting, RoomTag, WorkStatus};
use super::connect::RdmaLink;
use super::keys::KeyTable;
use super::rails::Place;
use crate::ids::LaneId;
use crate::peers::RdmaPath;
use crate::plan::Runs;
use crate::room::links::{REJECTED_MAX, Tally};

/// Data frames that may be unanswered on a lane. 64 frames of a megabyte fill any path; 64 frames of one
/// page keep a NIC busy for tens of microseconds, in which answers come.
pub(super) const FRAMES_MAX: u64 = 64;
/// Receives that a lane's share of the queue must have: one for each frame of the peer's that may be
/// unanswered, and one for each answer to one of ours.
pub(super) const RECEIVES_PER_LANE: u32 = 2 * FRAMES_MAX as u32;
/// Work requests of a lane: a megabyte of scattered 4 KiB pages, twice.
pub(super) const SQ_WRS: u32 = 520;
/// Of those, kept for answers, which must not wait for data.
pub(super) const ANSWER_WRS: u32 = 8;
/// Answers under way at once; the next one says more.
pub(super) const ANSWERS_MAX: usize = 4;
/// Stretches of source memory gathered into one write.
pub(super) const WRITE_SGES: u32 = 8;
/// Bytes given to a lane at once: what the fastest port moves in 80 microseconds, and so how long a room's
/// sources stay busy after it has failed.
pub(super) const BYTES_MAX: u64 = 4 << 20;

/// How far a lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The peer's end does not stand yet, as far as is known here.
    Waiting,
    /// The first write, of nothing, is under way: until it is answered nobody knows whether the path works.
    Proving {
        wr: u64,
    },
    Open,
}

/// Why a lane goes down.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) cause: String,
    pub(super) culprit: Option<(RoomTag, WorkStatus)>,
}

/// A frame that is wholly posted.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) seq: u64,
    pub(super) posting: Posting,
    /// First and one past its last work request.
    pub(super) wrs: (u64, u64),
    /// All of them have completed: its sources are read no more.
    pub(super) landed: bool,
    /// The peer has counted it.
    pub(super) answered: bool,
}

/// A frame that is being posted.
#[derive(Debug)]
pub(super) struct Current {
    pub(super) posting: Posting,
    pub(super) runs: Runs,
    /// The rest of a run that did not fit into one write.
    pub(super) rest: Option<crate::plan::Run>,
    pub(super) first_wr: u64,
}

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) peer: PeerIndex,
    pub(super) id: LaneId,
    pub(super) number: u16,
    pub(super) nic: usize,
    pub(super) rail: u8,
    pub(super) qp: Qp,
    pub(super) path: RdmaPath,
    pub(super) local: Arc<KeyTable>,
    pub(super) remote: Arc<KeyTable>,
    pub(super) stage: Stage,
    /// Told apart from an earlier lane in the same place.
    pub(super) generation: u16,
    pub(super) waiting: VecDeque<Posting>,
    pub(super) current: Option<Current>,
    pub(super) flights: VecDeque<Flight>,
    /// Frames given up half-posted, until what was posted of them has completed.
    pub(super) dropped: Vec<(Posting, u64)>,
    /// Payload bytes that are waiting, or posted and not completed.
    pub(super) bytes: u64,
    /// Work requests posted and completed.
    pub(super) posted: u64,
    pub(super) done: u64,
    pub(super) wrs_max: u64,
    /// Last data frame posted, and last answered.
    pub(super) sent: u64,
    pub(super) answered: u64,
    /// Data frames that came, and how far the peer was told.
    pub(super) counted: u64,
    pub(super) told: u64,
    /// Answers under way, by work request.
    pub(super) answers: VecDeque<u64>,
    rejected: VecDeque<u64>,
    pub(super) fault: Option<Fault>,
    pub(super) kicked: bool,
    pub(super) _place: Place,
}

impl Lane {
    pub(super) fn new(
        peer: PeerIndex,
        id: LaneId,
        number: u16,
        (nic, local): (usize, Arc<KeyTable>),
        link: RdmaLink,
    ) -> Self {
        let RdmaLink { qp, place, rail, path, remote, .. } = link;
        let wrs_max = u64::from(qp.max_send_wr());
        Self {
            peer,
            id,
            number,
            nic,
            rail,
            qp,
            path,
            local,
            remote,
            stage: Stage::Waiting,
            generation: 0,
            waiting: VecDeque::new(),
            current: None,
            flights: VecDeque::new(),
            dropped: Vec::new(),
            bytes: 0,
            posted: 0,
            done: 0,
            wrs_max,
            sent: 0,
            answered: 0,
            counted: 0,
            told: 0,
            answers: VecDeque::new(),
            rejected: VecDeque::new(),
            fault: None,
            kicked: false,
            _place: place,
        }
    }

    pub(super) const fn is_closing(&self) -> bool {
        self.fault.is_some()
    }

    /// Whether it takes another frame.
    pub(super) fn has_room(&self) -> bool {
        matches!(self.stage, Stage::Open)
            && self.fault.is_none()
            && (self.bytes < BYTES_MAX || self.is_idle())
            && self.frames_out() < FRAMES_MAX
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.current.is_none() && self.done == self.posted
    }

    /// Frames that wait or are unanswered.
    fn frames_out(&self) -> u64 {
        let current = u64::from(self.current.is_some());
        self.waiting.len() as u64 + current + (self.sent - self.answered)
    }

    /// Work requests that may be posted, those for answers apart.
    pub(super) fn wrs_free(&self) -> u64 {
        self.wrs_max.saturating_sub(self.posted - self.done + u64::from(ANSWER_WRS))
    }

    /// The number of a work request whose low 32 bits are these.
    pub(super) fn wr_of(&self, low: u32) -> u64 {
        self.done + u64::from(low.wrapping_sub(self.done as u32))
    }

    /// Everything up to a work request has succeeded. Says whether the sources of a frame are free for it.
    pub(super) fn completed(&mut self, wr: u64) -> bool {
        self.done = self.done.max(wr + 1);
        let done = self.done;
        while self.answers.front().is_some_and(|&answer| answer < done) {
            self.answers.pop_front();
        }
        let mut freed = 0;
        let payload = |posting: &Posting| u64::from(posting.frame.payload_bytes);
        self.dropped.retain(|(posting, end)| {
            freed += if *end <= done { payload(posting) } else { 0 };
            *end > done
        });
        for flight in self.flights.iter_mut().take_while(|flight| flight.wrs.1 <= done) {
            if !std::mem::replace(&mut flight.landed, true) {
                freed += payload(&flight.posting);
            }
        }
        self.bytes -= freed;
        self.forget_finished();
        freed > 0
    }

    /// The peer has counted every frame up to this one. Gives those that were not answered before.
    pub(super) fn answer(&mut self, seq: u64, mut told: impl FnMut(&Posting)) -> bool {
        if seq <= self.answered || seq > self.sent {
            return false;
        }
        self.answered = seq;
        for flight in self.flights.iter_mut().filter(|flight| !flight.answered) {
            if flight.seq > seq {
                break;
            }
            flight.answered = true;
            told(&flight.posting);
        }
        self.forget_finished();
        true
    }

    /// Forgets frames that are answered and whose sources are free.
    fn forget_finished(&mut self) {
        while self.flights.front().is_some_and(|flight| flight.answered && flight.landed) {
            self.flights.pop_front();
        }
    }

    /// Drops what was not begun of a room, and stops what was. Says whether its sources are still read.
    pub(super) fn retract(&mut self, tag: RoomTag) -> bool {
        let mut bytes = 0;
        self.waiting.retain(|posting| {
            let keeps = posting.tag != tag;
            bytes += if keeps { 0 } else { u64::from(posting.frame.payload_bytes) };
            keeps
        });
        self.bytes -= bytes;
        if let Some(current) = self.current.take_if(|current| current.posting.tag == tag) {
            if current.first_wr < self.posted {
                self.dropped.push((current.posting, self.posted));
            } else {
                self.bytes -= u64::from(current.posting.frame.payload_bytes);
            }
        }
        self.reads(tag)
    }

    /// Whether something that is posted may still read a room's sources.
    pub(super) fn reads(&self, tag: RoomTag) -> bool {
        self.dropped.iter().any(|(posting, _)| posting.tag == tag)
            || self.current.as_ref().is_some_and(|current| current.posting.tag == tag)
            || self.flights.iter().any(|flight| flight.posting.tag == tag && !flight.landed)
    }

    /// The room whose write a work request was.
    pub(super) fn posting_of(&self, wr: u64) -> Option<&Posting> {
        let in_flight = |flight: &&Flight| (flight.wrs.0..flight.wrs.1).contains(&wr);
        if let Some(flight) = self.flights.iter().find(in_flight) {
            return Some(&flight.posting);
        }
        if let Some(current) = self.current.as_ref().filter(|current| current.first_wr <= wr) {
            return Some(&current.posting);
        }
        self.dropped.iter().find(|(_, end)| wr < *end).map(|(posting, _)| posting)
    }

    /// Notes that a data frame came and was not counted.
    pub(super) fn reject(&mut self, seq: u64) {
        if self.rejected.len() == REJECTED_MAX {
            self.rejected.pop_front();
        }
        self.rejected.push_back(seq);
    }

    /// What came on it.
    pub(super) fn tally(&self) -> Tally {
        Tally { completed: self.counted, rejected: self.rejected.iter().copied().collect() }
    }

    /// Frames of which it is not known whether they were placed, by number.
    pub(super) fn take_lost(&mut self) -> Vec<(u64, Posting)> {
        let mut lost = Vec::new();
        for mut flight in self.flights.drain(..).filter(|flight| !flight.answered) {
            flight.posting.again = true;
            lost.push((flight.seq, flight.posting));
        }
        // Neither has a number yet: the peer cannot have counted it.
        let next = self.sent + 1;
        lost.extend(self.dropped.drain(..).map(|(posting, _)| (next, posting)));
        if let Some(current) = self.current.take() {
            lost.push((next, current.posting));
        }
        lost
    }
}
