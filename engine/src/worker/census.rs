//! What a simulation looks at in a worker, and sets.

use super::Worker;
use super::stats::Stats;
use crate::fabric::Fabric;

/// What a worker's tables hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    /// Rooms live or unreleased, sending and receiving, and whose checksum is being taken.
    pub(crate) rooms: [usize; 3],
    /// Rooms waiting for a grant, grants waiting for a room, and entries of the indices.
    pub(crate) entries: [usize; 5],
    /// Frames that went down with a lane, and those that wait to be posted again.
    pub(crate) frames: [usize; 2],
    /// Peers that are given up and not buried.
    pub(crate) gone: usize,
}

impl<F: Fabric> Worker<F> {
    pub(crate) fn census(&self) -> Census {
        let [waiting, grants, by_epoch, by_room] = self.sending.entries();
        let peers = || self.peers.iter().map(|(_, peer)| peer);
        Census {
            rooms: [
                self.sending.rooms.iter().count(),
                self.receiving.rooms.iter().count(),
                self.receiving.verifying.len(),
            ],
            entries: [waiting, grants, by_epoch, by_room, self.receiving.entries()],
            frames: [
                peers().map(|peer| peer.links.lost_frames()).sum(),
                peers().map(|peer| peer.returned.len()).sum(),
            ],
            gone: peers().filter(|peer| peer.gone).count(),
        }
    }

    pub(crate) const fn counters(&self) -> &Stats {
        &self.stats
    }

    /// Small pages make small frames; a simulation wants several a chunk.
    pub(crate) const fn set_frame_bytes(&mut self, frame_bytes: u64) {
        self.frame_bytes = frame_bytes;
    }
}
