//! What is known of every peer, for whoever asks. Nothing on the hot path reads it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::failure::FailureKind;
use crate::ids::Incarnation;
use crate::peers::{LaneInfo, PeerHealth, PeerInfo};

/// Gone peers kept for whoever asks why a room failed. The oldest is dropped first.
pub(crate) const GONE_PEERS_MAX: usize = 64;

/// The table of peers.
#[derive(Debug, Default)]
pub(crate) struct PeerTable(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    peers: HashMap<Incarnation, PeerInfo>,
    gone: VecDeque<Incarnation>,
}

impl PeerTable {
    // Every change is one assignment, so a table left by a panicking thread is whole.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every peer, the living and the latest gone, in the order of their addresses.
    pub(crate) fn snapshot(&self) -> Vec<PeerInfo> {
        let mut peers: Vec<_> = self.lock().peers.values().cloned().collect();
        peers.sort_by_key(|peer| (peer.addr, peer.incarnation));
        peers
    }

    pub(crate) fn get(&self, peer: Incarnation) -> Option<PeerInfo> {
        self.lock().peers.get(&peer).cloned()
    }

    /// A session came up. Lanes that stand are kept.
    pub(super) fn up(&self, mut info: PeerInfo) {
        let mut table = self.lock();
        table.gone.retain(|gone| *gone != info.incarnation);
        if let Some(known) = table.peers.get_mut(&info.incarnation) {
            info.lanes = std::mem::take(&mut known.lanes);
        }
        table.peers.insert(info.incarnation, info);
    }

    pub(super) fn health(&self, peer: Incarnation, health: PeerHealth) {
        if let Some(info) = self.lock().peers.get_mut(&peer) {
            info.health = health;
        }
    }

    /// A peer is given up. Its lanes are no rails any more, though the worker may still be closing
    /// them.
    pub(super) fn gone(&self, peer: Incarnation, kind: FailureKind, cause: String) {
        let mut table = self.lock();
        let Some(info) = table.peers.get_mut(&peer) else { return };
        info.health = PeerHealth::Gone { kind, cause };
        info.lanes.clear();
        table.gone.push_back(peer);
        if table.gone.len() > GONE_PEERS_MAX
            && let Some(oldest) = table.gone.pop_front()
        {
            table.peers.remove(&oldest);
        }
    }

    pub(super) fn lane_up(&self, peer: Incarnation, lane: LaneInfo) {
        if let Some(info) = self.lock().peers.get_mut(&peer) {
            info.lanes.push(lane);
        }
    }

    pub(super) fn lane_down(&self, peer: Incarnation, lane: u16) {
        if let Some(info) = self.lock().peers.get_mut(&peer) {
            info.lanes.retain(|info| info.lane != lane);
        }
    }

    pub(super) fn lanes(&self, peer: Incarnation) -> usize {
        self.lock().peers.get(&peer).map_or(0, |info| info.lanes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::FabricInfo;
    use crate::wire::message::LaneIo;

    fn info(id: u128) -> PeerInfo {
        PeerInfo {
            incarnation: Incarnation(id),
            name: String::new(),
            addr: "127.0.0.1:1".parse().unwrap(),
            health: PeerHealth::Up,
            fabric: FabricInfo::Tcp { io: LaneIo::Epoll, peer_io: LaneIo::IoUring },
            lanes: Vec::new(),
        }
    }

    #[test]
    fn gone_peers_are_kept_up_to_their_bound_and_living_ones_always() {
        let table = PeerTable::default();
        table.up(info(u128::MAX));
        for id in 0..2 * GONE_PEERS_MAX as u128 {
            table.up(info(id));
            table.gone(Incarnation(id), FailureKind::PeerDied, "closed".to_owned());
        }
        assert_eq!(table.snapshot().len(), GONE_PEERS_MAX + 1);
        assert!(table.get(Incarnation(u128::MAX)).is_some());
        assert!(table.get(Incarnation(0)).is_none(), "the oldest is dropped first");
    }

    #[test]
    fn lanes_outlive_a_session_and_not_the_peer() {
        let table = PeerTable::default();
        let peer = Incarnation(1);
        table.up(info(1));
        let end = "127.0.0.1:2".parse().unwrap();
        table.lane_up(peer, LaneInfo { lane: 1, local: end, remote: end });
        table.health(peer, PeerHealth::Reconnecting);
        table.up(info(1));
        assert_eq!(table.lanes(peer), 1);
        table.gone(peer, FailureKind::PeerSilent, "silent".to_owned());
        table.up(info(1));
        assert_eq!(table.lanes(peer), 0);
    }
}
