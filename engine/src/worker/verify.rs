//! Checksums of rooms that have landed, taken a little a turn: no room holds up the others.

use std::sync::Arc;

use super::Worker;
use super::peers::Peers;
use super::receiving::{RecvRoom, named};
use crate::fabric::Fabric;
use crate::failure::FailureKind;
use crate::ids::Micros;
use crate::memory::{PageHash, Walk};
use crate::plan::{Pieces, Strips};
use crate::room::receiver::ReceiverEvent;
use crate::wire::message::{Checksum, Extent};

/// Bytes read a turn: about a hundred microseconds.
const BYTES_PER_TURN: u64 = 1 << 20;

/// A checksum under way.
#[derive(Debug)]
pub(super) struct Verify {
    sent: Checksum,
    /// Next of the extents.
    at: usize,
    walk: Option<Walk>,
    hash: PageHash,
    bytes: u64,
}

impl Verify {
    pub(super) fn new(sent: Checksum) -> Self {
        Self { sent, at: 0, walk: None, hash: PageHash::new(), bytes: 0 }
    }
}

/// What is wrong with a checksum.
type Wrong = (FailureKind, String);

/// Goes on with a room. `None`: there is more to read.
fn step(room: &mut RecvRoom, peers: &Peers) -> Option<Result<(), Wrong>> {
    let mut verify = room.verify.take()?;
    let verdict = verify.advance(room, peers);
    room.verify = Some(verify);
    verdict
}

impl Verify {
    fn advance(&mut self, room: &RecvRoom, peers: &Peers) -> Option<Result<(), Wrong>> {
        let mut budget = BYTES_PER_TURN;
        while budget > 0 {
            let Some(walk) = &mut self.walk else {
                let Some(&extent) = self.sent.extents.get(self.at) else {
                    return Some(self.judge(room.core.arrived().bytes));
                };
                self.at += 1;
                match strips(room, peers, extent) {
                    Ok(strips) => self.walk = Some(Walk::new(strips)),
                    Err(what) => {
                        let what = format!("a checksum of other pages: {what}");
                        return Some(Err((FailureKind::ProtocolViolation, what)));
                    }
                }
                continue;
            };
            let taken = self.hash.take(walk, budget);
            self.bytes += taken;
            if taken < budget {
                self.walk = None;
            }
            // Whatever the extents say: no more than has landed is read.
            if self.bytes > room.core.arrived().bytes {
                return Some(self.judge(room.core.arrived().bytes));
            }
            // An extent of no bytes costs something too.
            budget -= taken.max(1);
        }
        None
    }

    fn judge(&self, landed_bytes: u64) -> Result<(), Wrong> {
        let (sent, landed) = (self.sent.xxh3, self.hash.value());
        if self.bytes != landed_bytes {
            let bytes = self.bytes;
            let what = format!("a checksum of {bytes} bytes or more, {landed_bytes} landed");
            return Err((FailureKind::ProtocolViolation, what));
        }
        if sent == landed {
            return Ok(());
        }
        let what = format!("the bytes sent have XXH3 {sent:016x}, those that landed {landed:016x}");
        Err((FailureKind::ChecksumMismatch, what))
    }
}

/// All pages that an extent names.
fn strips(room: &RecvRoom, peers: &Peers, extent: Extent) -> Result<Strips, &'static str> {
    let (target, pairing) = named(room, peers, extent)?;
    let (layers, count) = (u32::from(extent.layers), extent.count);
    let len = u64::from(layers) * u64::from(pairing.planes) * u64::from(count);
    let pieces = Pieces {
        layer: u32::from(extent.layer) - pairing.first_layer,
        planes: pairing.planes,
        count,
        first: 0,
        len: u32::try_from(len).map_err(|_| "more page writes than a chunk can have")?,
    };
    let (map, pages) = (Arc::clone(&target.map), Arc::clone(&target.pages));
    Ok(Strips::new(map, pages, extent.at as usize, pairing.local, pieces))
}

impl<F: Fabric> Worker<F> {
    /// Reads on in one room whose checksum is taken. Says whether there was one.
    pub(super) fn verify_some(&mut self, now: Micros) -> bool {
        let Some((slot, epoch)) = self.receiving.verifying.pop_front() else { return false };
        let Some(room) = self.receiving.live(slot, epoch) else { return true };
        match step(room, &self.peers) {
            None => self.receiving.verifying.push_back((slot, epoch)),
            Some(Ok(())) => self.step_receiver(now, slot, ReceiverEvent::Verified, Vec::new()),
            Some(Err((kind, what))) => {
                self.step_receiver(now, slot, ReceiverEvent::Fault(kind), vec![what]);
            }
        }
        true
    }
}
