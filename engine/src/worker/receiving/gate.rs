//! The gate: what may be placed. Grants against frames, while the fabric polls.

use std::sync::Arc;

use super::{Receiving, RecvRoom, TargetPool};
use crate::fabric::{Gate, PeerIndex};
use crate::failure::Landed;
use crate::ids::Micros;
use crate::memory::Pairing;
use crate::mutations::{self, Mutation};
use crate::plan::{Pieces, Strips};
use crate::room::receiver::{ReceiverEvent, ReceiverReaction};
use crate::wire::frame::{DataFrame, RejectReason};
use crate::wire::message::Extent;
use crate::worker::peers::Peers;
use crate::worker::stats::Stats;

/// The gate: grants against frames. Borrows what the worker needs not while the fabric polls.
pub(in crate::worker) struct Grants<'a> {
    pub(in crate::worker) receiving: &'a mut Receiving,
    pub(in crate::worker) peers: &'a Peers,
    pub(in crate::worker) stats: &'a mut Stats,
    pub(in crate::worker) now: Micros,
}

impl Gate for Grants<'_> {
    fn admit(&mut self, peer: PeerIndex, frame: &DataFrame) -> Result<Strips, RejectReason> {
        let room = self.receiving.live(frame.slot, frame.epoch).filter(|room| room.peer == peer);
        let Some(room) = room else {
            self.stats.frames_refused += 1;
            return Err(RejectReason::Revoked);
        };
        match covered(room, self.peers, frame) {
            Ok(strips) => {
                if mutations::is(Mutation::CountBeforePlacing) {
                    self.count(frame);
                }
                Ok(strips)
            }
            Err(what) => {
                self.stats.frames_refused += 1;
                self.receiving.outside.push((frame.slot, frame.epoch, what.to_owned()));
                Err(RejectReason::Outside)
            }
        }
    }

    fn placed(&mut self, frame: &DataFrame) {
        if !mutations::is(Mutation::CountBeforePlacing) {
            self.count(frame);
        }
    }
}

impl Grants<'_> {
    fn count(&mut self, frame: &DataFrame) {
        self.stats.frames_placed += 1;
        self.stats.bytes_placed += u64::from(frame.payload_bytes);
        let Some(room) = self.receiving.live(frame.slot, frame.epoch) else {
            self.stats.late_events += 1;
            return;
        };
        let first = room.core.arrived() == Landed::default();
        let landed = Landed { page_writes: frame.pieces.into(), bytes: frame.payload_bytes.into() };
        let reaction = room.core.on(self.now, ReceiverEvent::Placed(landed));
        room.cell.count(room.core.arrived());
        if first {
            self.receiving.started.push(frame.slot);
        }
        if reaction != ReceiverReaction::Nothing {
            self.receiving.reactions.push((frame.slot, frame.epoch, reaction));
        }
    }
}

/// The pages that a chunk names, if the grant covers all of it, and what is paired of them.
pub(in crate::worker) fn named<'a>(
    room: &'a RecvRoom,
    peers: &'a Peers,
    chunk: Extent,
) -> Result<(&'a TargetPool, &'a Pairing), &'static str> {
    let peer = peers.get(room.peer).ok_or("the peer is not known")?;
    let target = room
        .pools
        .iter()
        .find(|target| target.pool.0 == chunk.pool)
        .ok_or("a frame names a pool that was not granted")?;
    let pairing = &peer
        .pools
        .get(target.pool.index())
        .ok_or("a frame names a pool that is not here")?
        .pairing;
    let (layer, layers) = (u32::from(chunk.layer), u32::from(chunk.layers));
    if layers == 0 || layer < pairing.layers.start || layer + layers > pairing.layers.end {
        return Err("a frame names layers that the two sides do not share");
    }
    let positions = target.pages.len() as u64;
    if chunk.count == 0 || u64::from(chunk.at) + u64::from(chunk.count) > positions {
        return Err("a frame names positions behind the granted ones");
    }
    Ok((target, pairing))
}

/// The memory a frame goes to, if the grant covers all of it.
fn covered(room: &RecvRoom, peers: &Peers, frame: &DataFrame) -> Result<Strips, &'static str> {
    let DataFrame { pool, layer, layers, at, count, .. } = *frame;
    let (target, pairing) = named(room, peers, Extent { pool, layer, layers, at, count })?;
    let (layer, layers) = (u32::from(layer), u32::from(layers));
    let total = u64::from(layers) * u64::from(pairing.planes) * u64::from(frame.count);
    if frame.pieces == 0 || u64::from(frame.first) + u64::from(frame.pieces) > total {
        return Err("a frame names page writes that its chunk does not have");
    }
    if u64::from(frame.payload_bytes) != u64::from(frame.pieces) * pairing.piece_bytes() {
        return Err("a frame's payload is not as long as its page writes");
    }
    let pieces = Pieces {
        layer: layer - pairing.first_layer,
        planes: pairing.planes,
        count: frame.count,
        first: frame.first,
        len: frame.pieces,
    };
    Ok(Strips::new(
        Arc::clone(&target.map),
        Arc::clone(&target.pages),
        frame.at as usize,
        pairing.local,
        pieces,
    ))
}
