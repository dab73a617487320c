//! TCP lanes: frames from source pages to granted pages with no user-space copy.
//!
//! A lane is one connection, used in both directions: data frames one way, their acknowledgements the
//! other. What is acknowledged has been placed; a finished send says nothing. Lanes are driven by
//! io_uring, or by epoll where it is refused; everything above the [`driver`] is the same.

pub(crate) mod driver;
pub(crate) mod epoll;
mod filler;
mod receive;
mod strips;
#[cfg(test)]
mod tests;
mod transmit;
#[cfg(feature = "io-uring")]
pub(crate) mod uring;

use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use self::driver::{Direction, Done, Driver, Outcome};
use self::filler::Scratch;
use self::receive::{Arrived, Receive};
use self::transmit::{Retracted, Transmit};
use super::{DownLane, Event, Fabric, Gate, Link, NewLane, PeerIndex, Posting, RoomTag};
use crate::config::ZeroCopy;
use crate::ids::{Epoch, LaneId};
use crate::plan::Strips;
use crate::room::links::Tally;
use crate::wire::frame::{DataFrame, Frame, RejectReason};

/// How long closing the fabric waits for the kernel to let go of lanes. It takes microseconds; the
/// bound is there so that a kernel that never answers cannot hang a process that is ending.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub(crate) struct TcpFabric<D: Driver> {
    driver: D,
    zero_copy: ZeroCopy,
    lanes: Vec<Option<Lane>>,
    /// Lanes by peer.
    by_peer: Vec<Vec<u32>>,
    /// Lanes on which something may have to be started.
    restless: Vec<u32>,
    done: Vec<Done>,
    scratch: Scratch,
    retracting: Vec<(PeerIndex, RoomTag)>,
    revoking: Vec<(PeerIndex, u32, Epoch)>,
    early: Vec<Event>,
}

#[derive(Debug)]
struct Lane {
    peer: PeerIndex,
    id: LaneId,
    number: u16,
    stream: TcpStream,
    receive: Receive,
    transmit: Transmit,
    /// Why the lane is closing, once it is.
    closing: Option<String>,
    restless: bool,
}

impl Lane {
    fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    fn at_rest(&self) -> bool {
        !self.receive.in_flight && !self.transmit.is_in_flight() && !self.transmit.holds_pages()
    }
}

impl<D: Driver> TcpFabric<D> {
    pub(crate) fn new(driver: D, zero_copy: ZeroCopy) -> Self {
        Self {
            driver,
            zero_copy,
            lanes: Vec::new(),
            by_peer: Vec::new(),
            restless: Vec::new(),
            done: Vec::new(),
            scratch: Scratch::new(),
            retracting: Vec::new(),
            revoking: Vec::new(),
            early: Vec::new(),
        }
    }

    /// Whether there is a lane, or something of one to be said.
    pub(super) fn has_lanes(&self) -> bool {
        self.by_peer.iter().any(|lanes| !lanes.is_empty())
            || !self.early.is_empty()
            || !self.retracting.is_empty()
            || !self.revoking.is_empty()
    }

    /// Has sleeps also end while this is readable.
    pub(super) fn watch(&mut self, fd: OwnedFd) {
        self.driver.watch(fd);
    }

    fn rouse(&mut self, index: u32) {
        if let Some(lane) = self.lanes[index as usize].as_mut().filter(|lane| !lane.restless) {
            lane.restless = true;
            self.restless.push(index);
        }
    }

    fn lanes_of(&self, peer: PeerIndex) -> impl Iterator<Item = (u32, &Lane)> {
        let indices = self.by_peer.get(peer.0 as usize).map_or(&[][..], Vec::as_slice);
        indices.iter().filter_map(|&index| Some((index, self.lanes[index as usize].as_ref()?)))
    }

    /// Begins to close a lane: its socket is shut down and what is in flight is cancelled.
    fn close_index(&mut self, index: u32, cause: &str) {
        let Some(lane) = self.lanes[index as usize].as_mut() else { return };
        if lane.closing.is_some() {
            return;
        }
        lane.closing = Some(cause.to_owned());
        let _ = lane.stream.shutdown(Shutdown::Both);
        if lane.transmit.holds_pages() {
            // A peer that does not acknowledge would hold zero-copy pages for minutes: disconnecting
            // sends a reset and empties the socket's queue.
            if let Err(error) = rustix::net::connect_unspec(&lane.stream) {
                tracing::warn!(lane = lane.number, %error, "a lane's queue cannot be emptied");
            }
        }
        if lane.receive.in_flight {
            self.driver.cancel(index, Direction::Receive, 0);
        }
        if let Some((direction, ticket)) = lane.transmit.cancel() {
            self.driver.cancel(index, direction, ticket);
        }
        self.rouse(index);
    }

    fn handle(&mut self, done: Done, gate: &mut impl Gate, events: &mut Vec<Event>) {
        let Some(lane) = self.lanes.get_mut(done.lane as usize).and_then(Option::as_mut) else {
            return;
        };
        let mut fault = None;
        match (done.direction, done.outcome) {
            (Direction::Receive, outcome) => {
                lane.receive.in_flight = false;
                match outcome {
                    Outcome::Moved { bytes: 0, .. } => {
                        fault = Some("closed by the peer".to_owned())
                    }
                    Outcome::Moved { bytes, .. } => {
                        fault = receive(lane, bytes, gate, events).err();
                    }
                    Outcome::Failed { errno, .. } => fault = permanent(errno),
                    Outcome::Notified { .. } => {}
                }
                lane.receive.leave();
            }
            (_, Outcome::Moved { bytes, more }) => {
                lane.transmit.ended(bytes, more, |tag| events.push(Event::Sent { tag }));
            }
            (direction, Outcome::Failed { errno, more }) => {
                lane.transmit.ended(0, more, |_| {});
                // Zero copy can be refused where a plain send is not: kernels without usage reports
                // (before 6.2), a small memlock limit, too many notifications outstanding.
                if direction != Direction::SendZeroCopy || !lane.transmit.give_up_zero_copy(errno) {
                    fault = permanent(errno);
                }
            }
            (_, Outcome::Notified { copied }) => lane.transmit.notified(done.ticket, copied),
        }
        if let Some(cause) = fault {
            self.close_index(done.lane, &cause);
        }
        self.rouse(done.lane);
    }

    /// Starts what a lane has to do, or takes it down when it is closing and at rest.
    fn pump(&mut self, index: u32, events: &mut Vec<Event>) {
        let Some(lane) = self.lanes[index as usize].as_mut() else { return };
        lane.restless = false;
        if lane.closing.is_some() {
            if lane.at_rest() {
                self.take_down(index, events);
            }
            return;
        }
        let fd = lane.fd();
        if !lane.receive.in_flight {
            let message = lane.receive.next(self.scratch.addr());
            // SAFETY: the message lies in the lane, which is dropped only at rest. Its strips lie in
            // granted pages, which their `Strips` keep mapped and the lane keeps until the operation
            // has ended, or in scratch, which lives as long as the fabric.
            unsafe { self.driver.start(index, fd, Direction::Receive, 0, message) };
        }
        if let Some(op) = lane.transmit.next() {
            // SAFETY: as above; source pages are kept by their room until it is released, which is
            // not before the fabric has said that nothing reads them any more.
            unsafe { self.driver.start(index, fd, op.direction, op.ticket, op.message) };
        }
    }

    fn take_down(&mut self, index: u32, events: &mut Vec<Event>) {
        let Some(mut lane) = self.lanes[index as usize].take() else { return };
        self.driver.remove(index, lane.fd());
        if let Some(lanes) = self.by_peer.get_mut(lane.peer.0 as usize) {
            lanes.retain(|&other| other != index);
        }
        let Lane { peer, id, number, .. } = lane;
        let cause = lane.closing.take().unwrap_or_default();
        let tally = lane.receive.tally();
        let (lost, returned) = lane.transmit.abandon();
        // The worker puts each before the one it had before.
        let returned = returned.into_iter().rev();
        events.extend(returned.map(|posting| Event::Returned { peer, posting: Box::new(posting) }));
        let down = DownLane { peer, id, number, cause, culprit: None, lost, tally };
        events.push(Event::LaneDown(Box::new(down)));
    }

    /// Reports the rooms that were given up and are touched by nothing any more.
    fn settle(&mut self, events: &mut Vec<Event>) {
        let mut retracting = std::mem::take(&mut self.retracting);
        retracting.retain(|&(peer, tag)| {
            let busy = self.lanes_of(peer).any(|(_, lane)| lane.transmit.reads(tag));
            if !busy {
                events.push(Event::SourceQuiet { tag });
            }
            busy
        });
        self.retracting = retracting;
        let mut revoking = std::mem::take(&mut self.revoking);
        revoking.retain(|&(peer, slot, epoch)| {
            let busy = self.lanes_of(peer).any(|(_, lane)| lane.receive.writes(slot, epoch));
            if !busy {
                events.push(Event::TargetQuiet { slot, epoch });
            }
            busy
        });
        self.revoking = revoking;
    }
}

/// Handles received bytes; an error is the reason to close the lane.
fn receive(
    lane: &mut Lane,
    mut bytes: usize,
    gate: &mut impl Gate,
    events: &mut Vec<Event>,
) -> Result<(), String> {
    while let Some(arrived) = lane.receive.advance(&mut bytes).map_err(|error| error.to_string())? {
        match arrived {
            Arrived::Header(frame) => lane.receive.begin(frame, gate.admit(lane.peer, &frame)),
            Arrived::Placed(frame) => {
                gate.placed(&frame);
                answer(lane, frame.seq, None)?;
            }
            Arrived::Drained(frame, reason) => {
                let reject =
                    Frame::Reject { seq: frame.seq, slot: frame.slot, epoch: frame.epoch, reason };
                answer(lane, frame.seq, Some(reject))?;
            }
            Arrived::Answer(Frame::Ack { seq }) => lane
                .transmit
                .acknowledge(seq, |tag, landed| events.push(Event::Acked { tag, landed }))
                .map_err(|error| error.to_string())?,
            Arrived::Answer(Frame::Reject { seq, reason, .. }) => {
                let tag = lane.transmit.reject(seq).map_err(|error| error.to_string())?;
                events.push(Event::Rejected { tag, lane: lane.number, reason });
            }
            Arrived::Answer(Frame::Data(_)) => {}
        }
    }
    Ok(())
}

fn answer(lane: &mut Lane, seq: u64, reject: Option<Frame>) -> Result<(), String> {
    if lane.transmit.answer(seq, reject) {
        Ok(())
    } else {
        Err("the peer sends on without reading the answers".to_owned())
    }
}

/// A lane that could not be adopted.
fn never_was(peer: PeerIndex, id: LaneId, number: u16, cause: String) -> Event {
    let (lost, tally) = (Vec::new(), Tally::default());
    Event::LaneDown(Box::new(DownLane { peer, id, number, cause, culprit: None, lost, tally }))
}

/// The cause an errno is for closing a lane; none for one that passes.
fn permanent(errno: Errno) -> Option<String> {
    match errno {
        Errno::CANCELED | Errno::INTR | Errno::AGAIN | Errno::NOBUFS => None,
        errno => Some(std::io::Error::from(errno).to_string()),
    }
}

impl<D: Driver> Fabric for TcpFabric<D> {
    fn is_guarded(&self, _: PeerIndex) -> bool {
        true
    }

    fn add_lane(&mut self, peer: PeerIndex, lane: NewLane) {
        let NewLane { id, number, link, .. } = lane;
        let Link::Tcp { stream, leaves_host } = link else {
            return self.early.push(never_was(peer, id, number, "not a stream".to_owned()));
        };
        let zero_copy = self.driver.can_zero_copy()
            && match self.zero_copy {
                ZeroCopy::Auto => leaves_host,
                ZeroCopy::Off => false,
                ZeroCopy::Try => true,
            };
        let index = self.lanes.iter().position(Option::is_none).unwrap_or(self.lanes.len());
        if index == self.lanes.len() {
            self.lanes.push(None);
        }
        let lane = Lane {
            peer,
            id,
            number,
            stream,
            receive: Receive::new(),
            transmit: Transmit::new(zero_copy),
            closing: None,
            restless: false,
        };
        let index = index as u32;
        let prepared = if filler::zeros().is_some() {
            self.driver.add(index, lane.fd())
        } else {
            Err(Errno::NOMEM)
        };
        if let Err(errno) = prepared {
            let cause = std::io::Error::from(errno).to_string();
            self.early.push(never_was(peer, id, number, cause));
            return;
        }
        self.lanes[index as usize] = Some(lane);
        if self.by_peer.len() <= peer.0 as usize {
            self.by_peer.resize(peer.0 as usize + 1, Vec::new());
        }
        self.by_peer[peer.0 as usize].push(index);
        self.rouse(index);
    }

    fn close_lane(&mut self, peer: PeerIndex, lane: LaneId, cause: &str) {
        let index = self.lanes_of(peer).find(|(_, known)| known.id == lane).map(|(index, _)| index);
        if let Some(index) = index {
            self.close_index(index, cause);
        }
    }

    fn close_peer(&mut self, peer: PeerIndex, cause: &str) {
        let indices: Vec<u32> = self.lanes_of(peer).map(|(index, _)| index).collect();
        for index in indices {
            self.close_index(index, cause);
        }
    }

    fn has_room(&self, peer: PeerIndex) -> bool {
        self.lanes_of(peer).any(|(_, lane)| lane.closing.is_none() && lane.transmit.has_room())
    }

    fn post(&mut self, peer: PeerIndex, posting: Posting) {
        let open = self
            .lanes_of(peer)
            .filter(|(_, lane)| lane.closing.is_none() && lane.transmit.has_room());
        let Some((index, _)) = open.min_by_key(|(_, lane)| lane.transmit.backlog()) else {
            debug_assert!(false, "posted to a peer without room");
            return;
        };
        if let Some(lane) = self.lanes[index as usize].as_mut() {
            lane.transmit.post(posting);
        }
        self.rouse(index);
    }

    fn fence(&mut self, peer: PeerIndex, source: Option<RoomTag>, cause: &str) -> usize {
        let touches = |lane: &Lane| {
            lane.closing.is_none() && source.is_none_or(|tag| lane.transmit.reads(tag))
        };
        let lanes: Vec<u32> =
            self.lanes_of(peer).filter(|(_, lane)| touches(lane)).map(|(index, _)| index).collect();
        lanes.iter().for_each(|&index| self.close_index(index, cause));
        lanes.len()
    }

    fn retract(&mut self, peer: PeerIndex, tag: RoomTag, done: bool) {
        for at in 0..self.by_peer.get(peer.0 as usize).map_or(0, Vec::len) {
            let index = self.by_peer[peer.0 as usize][at];
            let Some(lane) = self.lanes[index as usize].as_mut() else { continue };
            match lane.transmit.retract(tag, done) {
                Retracted::Nothing => {}
                Retracted::Cancel => {
                    if let Some((direction, ticket)) = lane.transmit.cancel() {
                        self.driver.cancel(index, direction, ticket);
                    }
                }
                Retracted::Close => {
                    let cause = "a room was given up in the middle of a frame that is sent again";
                    self.close_index(index, cause);
                }
            }
        }
        self.retracting.push((peer, tag));
    }

    fn revoke(&mut self, peer: PeerIndex, slot: u32, epoch: Epoch) {
        for at in 0..self.by_peer.get(peer.0 as usize).map_or(0, Vec::len) {
            let index = self.by_peer[peer.0 as usize][at];
            let Some(lane) = self.lanes[index as usize].as_mut() else { continue };
            if lane.receive.revoke(slot, epoch) {
                self.driver.cancel(index, Direction::Receive, 0);
            }
        }
        self.revoking.push((peer, slot, epoch));
    }

    fn poll(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool {
        let before = events.len();
        events.append(&mut self.early);
        let mut done = std::mem::take(&mut self.done);
        self.driver.reap(&mut done);
        let progress = !done.is_empty() || !self.restless.is_empty();
        for done in done.drain(..) {
            self.handle(done, gate, events);
        }
        self.done = done;
        for at in 0..self.restless.len() {
            self.pump(self.restless[at], events);
        }
        self.restless.clear();
        if !self.retracting.is_empty() || !self.revoking.is_empty() {
            self.settle(events);
        }
        progress || events.len() > before
    }

    fn close(&mut self) -> bool {
        for index in 0..self.lanes.len() as u32 {
            self.close_index(index, "the engine is shutting down");
        }
        let deadline = Instant::now() + CLOSE_WAIT;
        let mut events = Vec::new();
        while self.lanes.iter().any(Option::is_some) {
            if Instant::now() > deadline {
                return false;
            }
            if !self.poll(&mut Shut, &mut events) {
                self.driver.sleep(Duration::from_millis(1));
            }
            events.clear();
        }
        true
    }

    fn spins(&self) -> bool {
        D::SPINS
    }

    fn sleep(&mut self, timeout: Duration) {
        self.driver.sleep(timeout);
    }
}

impl<D: Driver> Drop for TcpFabric<D> {
    fn drop(&mut self) {
        if !self.close() {
            // Their memory is in the kernel's hands: it must never be freed.
            self.lanes.drain(..).for_each(std::mem::forget);
            std::mem::forget(std::mem::replace(&mut self.scratch, Scratch::none()));
        }
    }
}

/// The gate of a fabric that is closing.
struct Shut;

impl Gate for Shut {
    fn admit(&mut self, _: PeerIndex, _: &DataFrame) -> Result<Strips, RejectReason> {
        Err(RejectReason::Revoked)
    }

    fn placed(&mut self, _: &DataFrame) {}
}
