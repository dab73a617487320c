//! The receiving end: what has landed is counted (unguarded), or let in and placed (guarded).

use super::super::{Gate, PeerIndex};
use super::lanes::EndState;
use super::memory;
use super::world::World;
use crate::ids::Epoch;
use crate::plan::Strip;
use crate::room::links::REJECTED_MAX;
use crate::wire::frame::{DataFrame, RejectReason};

/// Guarded: a frame that is being received.
#[derive(Debug)]
pub(super) struct Incoming {
    frame: DataFrame,
    left: u64,
    target: Place,
}

#[derive(Debug)]
enum Place {
    Pages(Vec<Strip>),
    /// Revoked; a receive under way may still place in them.
    Leaving(Vec<Strip>),
    Scratch(RejectReason),
}

impl World {
    /// Unguarded: counts a write that has landed, if its room still stands.
    pub(super) fn count(
        &mut self,
        wire: usize,
        end: usize,
        frame: &DataFrame,
        gate: &mut impl Gate,
    ) {
        let at = &mut self.wires[wire].ends[end];
        let (engine, peer, seq) = (at.engine, at.peer, frame.seq);
        if seq != at.counted + 1 {
            let text = format!("engine {engine} counts frame {seq} after {}", at.counted);
            return self.violate(text);
        }
        at.counted = seq;
        let counts = gate.admit(peer, frame).is_ok();
        if counts {
            gate.placed(frame);
        }
        let (id, epoch) = (self.wires[wire].id, frame.epoch);
        self.note(
            engine,
            seq << 8 | 8,
            format_args!("{id:?} frame {seq} of epoch {epoch} counted: {counts}"),
        );
    }

    /// Guarded: takes what has come at an end. Says whether anything was.
    pub(super) fn receive(&mut self, wire: usize, end: usize, gate: &mut impl Gate) -> bool {
        let mut progress = false;
        while self.wires[wire].ends[end].state == EndState::Up {
            self.absorb(wire, end);
            let at = &mut self.wires[wire].ends[end];
            let (engine, peer) = (at.engine, at.peer);
            match at.incoming.take_if(|incoming| incoming.left == 0) {
                Some(whole) => {
                    let seq = whole.frame.seq;
                    at.counted = seq;
                    let reject = match whole.target {
                        Place::Pages(_) => None,
                        Place::Leaving(_) => Some(RejectReason::Revoked),
                        Place::Scratch(reason) => Some(reason),
                    };
                    if reject.is_some() {
                        at.rejected.push_back(seq);
                        if at.rejected.len() > REJECTED_MAX {
                            at.rejected.pop_front();
                        }
                    } else {
                        gate.placed(&whole.frame);
                    }
                    let (id, epoch) = (self.wires[wire].id, whole.frame.epoch);
                    self.note(
                        engine,
                        seq << 8 | 9,
                        format_args!("{id:?} frame {seq} of epoch {epoch} came: {reject:?}"),
                    );
                    self.answer(wire, 1 - end, seq, reject);
                }
                None if at.incoming.is_some() => break,
                None => {
                    let Some(parcel) = at.stream.front() else { break };
                    let frame = parcel.frame;
                    if !parcel.is_first() || frame.seq != at.counted + 1 {
                        self.violate(format!("engine {engine} finds frame {} too soon", frame.seq));
                        break;
                    }
                    let target = match gate.admit(peer, &frame) {
                        Err(reason) => Place::Scratch(reason),
                        Ok(strips) => {
                            let strips: Vec<Strip> = strips.collect();
                            let granted = self.target_strips(engine, &frame);
                            if strips != granted {
                                let epoch = frame.epoch;
                                self.violate(format!(
                                    "engine {engine} lets a frame of epoch {epoch} into other pages"
                                ));
                            }
                            Place::Pages(granted)
                        }
                    };
                    let left = u64::from(frame.payload_bytes);
                    self.wires[wire].ends[end].incoming = Some(Incoming { frame, left, target });
                }
            }
            progress = true;
        }
        progress
    }

    /// Guarded: places what has come of the frame being received. The worker need not look for that: its
    /// receive is under way.
    pub(super) fn absorb(&mut self, wire: usize, end: usize) {
        let at = &mut self.wires[wire].ends[end];
        if at.state != EndState::Up {
            return;
        }
        let engine = at.engine;
        while let Some(incoming) = &mut self.wires[wire].ends[end].incoming {
            if incoming.left == 0 {
                return;
            }
            let frame = incoming.frame;
            let Some(parcel) = self.wires[wire].ends[end].stream.pop_front() else { return };
            let Some(incoming) = &mut self.wires[wire].ends[end].incoming else { return };
            incoming.left -= parcel.len;
            if let Place::Pages(strips) | Place::Leaving(strips) = &incoming.target {
                let strips = memory::part(strips, parcel.offset, parcel.len);
                let bytes = parcel.bytes.unwrap_or_default();
                if self.targets.get(&(engine, frame.epoch)).is_none_or(|target| target.released) {
                    let epoch = frame.epoch;
                    let text = format!("bytes of epoch {epoch} land after their release");
                    return self.violate(text);
                }
                self.memory.scatter(&strips, &bytes);
            }
        }
    }

    pub(super) fn revoke(&mut self, engine: usize, peer: PeerIndex, slot: u32, epoch: Epoch) {
        for (wire, end) in self.engines[engine].ends.clone() {
            let at = &mut self.wires[wire].ends[end];
            let of_room = |incoming: &&mut Incoming| {
                at.peer == peer && incoming.frame.slot == slot && incoming.frame.epoch == epoch
            };
            if let Some(incoming) = at.incoming.as_mut().filter(of_room)
                && let Place::Pages(strips) = &mut incoming.target
            {
                incoming.target = Place::Leaving(std::mem::take(strips));
            }
        }
        self.engines[engine].revoking.push((peer, slot, epoch));
        self.wakes.push(engine);
    }

    /// The receive that was under way when a room was revoked has ended: the rest goes to scratch.
    pub(super) fn stop_placing(&mut self, engine: usize, peer: PeerIndex, slot: u32, epoch: Epoch) {
        for (wire, end) in self.engines[engine].ends.clone() {
            let at = &mut self.wires[wire].ends[end];
            if let Some(incoming) = at.incoming.as_mut().filter(|_| at.peer == peer)
                && (incoming.frame.slot, incoming.frame.epoch) == (slot, epoch)
                && matches!(incoming.target, Place::Leaving(_))
            {
                incoming.target = Place::Scratch(RejectReason::Revoked);
            }
        }
    }
}
