//! What completes: writes, errors, frames of the peer; and how a lane ends.

use kvferry_verbs::{Completion, Recv, Sge, WorkError, WorkStatus as Status};

use super::lane::{Fault, Lane, Stage};
use super::rails::RECEIVE_BYTES;
use super::{Completed, RdmaFabric, completed};
use crate::fabric::{DownLane, Event, Gate, WorkStatus};
use crate::wire::frame::{DataFrame, Frame};

/// Completions taken at once.
pub(super) const COMPLETIONS_PER_POLL: usize = 64;
/// Rounds of completions of a NIC in one turn: a flood of one must not keep the worker from the rest.
const POLLS_PER_TURN: usize = 16;

impl RdmaFabric {
    /// Takes completions of a NIC and acts on them. Says whether there were any.
    pub(super) fn poll_nic(
        &mut self,
        nic: usize,
        rounds: usize,
        gate: &mut impl Gate,
        events: &mut Vec<Event>,
    ) -> bool {
        let mut progress = false;
        let mut batch = std::mem::take(&mut self.completions);
        for _ in 0..rounds {
            // A queue that cannot be polled has overflowed or lost its device, which the device's own
            // events tell.
            let count = self.nics[nic].cq.poll(&mut batch).unwrap_or(0);
            for completion in &batch[..count] {
                self.handle(nic, completion, gate, events);
            }
            progress |= count > 0;
            if count < batch.len() {
                break;
            }
        }
        self.completions = batch;
        self.nics[nic].repost();
        progress
    }

    pub(super) fn poll_nics(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool {
        let mut progress = false;
        for nic in 0..self.nics.len() {
            if self.nics[nic].lanes > 0 {
                progress |= self.poll_nic(nic, POLLS_PER_TURN, gate, events);
            }
        }
        progress
    }

    fn handle(
        &mut self,
        nic: usize,
        completion: &Completion,
        gate: &mut impl Gate,
        events: &mut Vec<Event>,
    ) {
        match completed(completion.wr_id) {
            Completed::Receive(slot) => {
                let header = self.nics[nic].take_receive(slot);
                let qp_num = match &completion.result {
                    Ok(work) => work.qp_num,
                    Err(error) => error.qp_num,
                };
                let Some(&lane) = self.by_qp.get(&(nic, qp_num)) else { return };
                match &completion.result {
                    Ok(work) if work.bytes as usize == RECEIVE_BYTES => {
                        self.arrived(lane, &header, gate, events);
                    }
                    Ok(work) => {
                        self.fail_lane(lane, format!("{} bytes instead of a header", work.bytes));
                    }
                    Err(error) => {
                        let cause = format!("a receive ended in {}", describe(error));
                        self.fail_lane(lane, cause);
                    }
                }
            }
            Completed::Send { slot, generation, wr } => {
                let lane = self.lanes.get_mut(slot as usize).and_then(Option::as_mut);
                let Some(lane) = lane.filter(|lane| lane.generation == generation) else { return };
                let wr = lane.wr_of(wr);
                match &completion.result {
                    Ok(_) => self.written(slot, wr, events),
                    Err(error) => failed(lane, wr, error),
                }
                self.look_at(slot);
            }
        }
    }

    /// Writes up to this one have succeeded.
    fn written(&mut self, slot: u32, wr: u64, events: &mut Vec<Event>) {
        let Some(lane) = self.lanes[slot as usize].as_mut() else { return };
        let freed = lane.completed(wr);
        if matches!(lane.stage, Stage::Proving { wr: proof } if proof <= wr) {
            lane.stage = Stage::Open;
            events.push(Event::LaneOpen { peer: lane.peer, number: lane.number });
        }
        if freed && !self.retracting.is_empty() {
            self.settle_retracted(events);
        }
    }

    /// A frame of the peer's.
    fn arrived(
        &mut self,
        slot: u32,
        header: &[u8; RECEIVE_BYTES],
        gate: &mut impl Gate,
        events: &mut Vec<Event>,
    ) {
        let Some(lane) = self.lanes[slot as usize].as_mut() else { return };
        match Frame::decode(header) {
            Ok(Frame::Data(frame)) if frame.seq == lane.counted + 1 => {
                count(lane, &frame, gate);
                self.look_at(slot);
            }
            Ok(Frame::Ack { seq }) => {
                let known = lane.answer(seq, |posting| {
                    let (tag, landed) = (posting.tag, posting.landed());
                    events.push(Event::Acked { tag, landed });
                });
                if !known {
                    self.fail_lane(slot, format!("an answer to frame {seq}, which is not open"));
                } else {
                    self.look_at(slot);
                }
            }
            Ok(other) => self.fail_lane(slot, format!("a frame out of turn: {other:?}")),
            Err(error) => self.fail_lane(slot, format!("not a frame: {error}")),
        }
    }

    fn fail_lane(&mut self, slot: u32, cause: String) {
        if let Some(lane) = self.lanes[slot as usize].as_mut() {
            lane.fail(Fault { cause, culprit: None });
            self.look_at(slot);
        }
    }

    /// Ends a lane: its queue pair is stopped, what had completed is taken, and it is destroyed. Then
    /// nothing of it is read or written any more, whatever the peer's NIC still sends.
    pub(super) fn take_down(&mut self, slot: u32, gate: &mut impl Gate, events: &mut Vec<Event>) {
        let Some(lane) = self.lanes[slot as usize].as_mut() else { return };
        let nic = lane.nic;
        // What came before this counts; the peer is told so.
        let stopped = lane.qp.to_error();
        let depth = self.nics[nic].cq.depth() as usize;
        self.poll_nic(nic, depth.div_ceil(COMPLETIONS_PER_POLL), gate, events);
        let Some(mut lane) = self.lanes[slot as usize].take() else { return };
        self.by_qp.remove(&(nic, lane.path.local.qp_num));
        if let Some(lanes) = self.by_peer.get_mut(lane.peer.0 as usize) {
            lanes.retain(|&other| other != slot);
        }
        let lost = lane.take_lost();
        let (peer, waiting) = (lane.peer, std::mem::take(&mut lane.waiting));
        let Fault { cause, culprit } =
            lane.fault.take().unwrap_or_else(|| Fault { cause: String::new(), culprit: None });
        let (id, number, tally, path) = (lane.id, lane.number, lane.tally(), lane.path);
        self.free.push(slot);
        self.nics[nic].lanes -= 1;
        self.nics[nic].refill();
        if let Err(error) = lane.qp.destroy() {
            tracing::error!(lane = number, %path, %error, "a queue pair could not be destroyed");
            // One that was stopped neither reads nor answers. Of one that was not, nothing is known, and
            // the lane is never said to be down.
            if stopped.is_err() {
                return self.stuck.push(peer);
            }
        }
        // The worker puts each before the one it had before.
        let returned = waiting.into_iter().rev().map(Box::new);
        events.extend(returned.map(|posting| Event::Returned { peer, posting }));
        let cause = format!("{cause} ({path})");
        let down = DownLane { peer, id, number, cause, culprit, lost, tally };
        events.push(Event::LaneDown(Box::new(down)));
        self.settle_retracted(events);
    }
}

/// A data frame came: every write before it on its queue pair has landed.
fn count(lane: &mut Lane, frame: &DataFrame, gate: &mut impl Gate) {
    lane.counted = frame.seq;
    match gate.admit(lane.peer, frame) {
        Ok(_) => gate.placed(frame),
        // Its room has ended here, which the peer has been or is being told.
        Err(_) => lane.reject(frame.seq),
    }
}

/// A write ended in an error: the first that is no consequence names the room, or the path.
fn failed(lane: &mut Lane, wr: u64, error: &WorkError) {
    if lane.is_closing() {
        return;
    }
    let status = match error.status {
        // Not the local operation error: Soft-RoCE of Linux 6.1 reports it where its own port is down.
        Status::LocalProtection | Status::LocalLength => Some(WorkStatus::LocalProtection),
        Status::RemoteAccess => Some(WorkStatus::RemoteAccess),
        Status::RnrRetryExceeded => Some(WorkStatus::RnrRetryExceeded),
        Status::RemoteOperation | Status::RemoteInvalidRequest => Some(WorkStatus::RemoteOperation),
        Status::RetryExceeded => Some(WorkStatus::RetryExceeded),
        _ => None,
    };
    let what = describe(error);
    if matches!(lane.stage, Stage::Proving { .. }) {
        let cause = if error.status == Status::RetryExceeded {
            format!(
                "nothing ever came back from the peer's rail ({what}): wrong GID, VLAN, route or firewall, \
                 or its port is down"
            )
        } else {
            format!("the first write failed: {what}")
        };
        return lane.fail(Fault { cause, culprit: None });
    }
    let posting = lane.posting_of(wr);
    let culprit = posting.and_then(|posting| Some((posting.tag, status?)));
    let of = posting.map_or_else(
        || "an answer to the peer".to_owned(),
        |posting| {
            let DataFrame { layer, layers, at, count, .. } = posting.frame;
            format!(
                "a write of layers {layer}..{}, positions {at}..{} of the grant",
                layer + layers,
                at + count
            )
        },
    );
    let cause = match error.status {
        Status::RetryExceeded => {
            format!("{of}: {what}: the peer's NIC stopped answering on a path that had worked")
        }
        status if status.is_flush() => format!("{of}: {what}, and no first cause was told"),
        _ => format!("{of}: {what}"),
    };
    lane.fail(Fault { cause, culprit });
}

fn describe(error: &WorkError) -> String {
    let WorkError { status, vendor_err, qp_num, .. } = error;
    format!("{status}, vendor error {vendor_err:#x}, QP {qp_num:#x}")
}

/// A receive for slot `slot` of a NIC's headers.
pub(super) fn receive(slot: u32, sge: Sge) -> Recv {
    Recv { wr_id: super::RECEIVE | u64::from(slot), sge: Some(sge) }
}
