//! What is known of every peer, for whoever asks. Nothing on the hot path reads it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::rails::retry_after;
use crate::failure::FailureKind;
use crate::ids::Incarnation;
use crate::peers::{FabricInfo, LaneInfo, LanePath, PathFault, PeerHealth, PeerInfo, RdmaPath};

/// Gone peers kept for whoever asks why a room failed. The oldest is dropped first.
pub(crate) const GONE_PEERS_MAX: usize = 64;

/// What was open this long is not counted as failing in a row.
const FORGET_AFTER: Duration = Duration::from_secs(10);

/// The table of peers.
#[derive(Debug, Default)]
pub(crate) struct PeerTable(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    peers: HashMap<Incarnation, Known>,
    gone: VecDeque<Incarnation>,
}

#[derive(Debug)]
struct Known {
    info: PeerInfo,
    /// What carries its pages where RDMA does not, and why it would not.
    tcp: FabricInfo,
    why_tcp: Option<String>,
    faults: Vec<Fault>,
}

/// A pair of rails that has failed.
#[derive(Debug)]
struct Fault {
    path: PathFault,
    at: Instant,
    /// Since when a lane of it has been open again.
    open_since: Option<Instant>,
}

impl Fault {
    fn is_of(&self, rail: &str, remote_rail: &str) -> bool {
        self.path.rail == rail && self.path.remote_rail == remote_rail
    }
}

impl Known {
    /// What carries the peer's pages now: RDMA where a lane of it is open.
    fn settle(&mut self) {
        let info = &mut self.info;
        let rdma = |lane: &LaneInfo| lane.open && lane.is_rdma();
        if info.lanes.iter().any(rdma) {
            (info.fabric, info.why_not_rdma) = (FabricInfo::Rdma, None);
            return;
        }
        let of_fault = |fault: &Fault| {
            let PathFault { rail, remote_rail, cause, .. } = &fault.path;
            format!("{rail} to the peer's {remote_rail}: {cause}")
        };
        let latest = self.faults.iter().max_by_key(|fault| fault.at);
        let why = self.why_tcp.clone().or_else(|| latest.map(of_fault));
        info.fabric = self.tcp;
        info.why_not_rdma = why.or_else(|| Some("no lane of it is open yet".to_owned()));
    }

    fn fault(&mut self, rail: &str, remote_rail: &str, cause: &str) {
        let at = Instant::now();
        let cause = cause.to_owned();
        if let Some(fault) = self.faults.iter_mut().find(|fault| fault.is_of(rail, remote_rail)) {
            // One that was well for a while is not failing in a row.
            let well = |since: Instant| at.saturating_duration_since(since) > FORGET_AFTER;
            let failures = if fault.open_since.is_some_and(well) { 0 } else { fault.path.failures };
            (fault.path.failures, fault.path.cause) = (failures + 1, cause);
            (fault.at, fault.open_since) = (at, None);
            return;
        }
        let (rail, remote_rail) = (rail.to_owned(), remote_rail.to_owned());
        let path = PathFault { rail, remote_rail, cause, failures: 1 };
        self.faults.push(Fault { path, at, open_since: None });
    }

    /// What is shown: of faults, those that stand.
    fn shown(&self) -> PeerInfo {
        let stands = |fault: &&Fault| fault.open_since.is_none();
        let faults = self.faults.iter().filter(stands).map(|fault| fault.path.clone()).collect();
        PeerInfo { faults, ..self.info.clone() }
    }
}

impl PeerTable {
    // Every change leaves the table whole at each step, so one left by a panicking thread is whole.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every peer, the living and the latest gone, in the order of their addresses.
    pub(crate) fn snapshot(&self) -> Vec<PeerInfo> {
        let mut peers: Vec<_> = self.lock().peers.values().map(Known::shown).collect();
        peers.sort_by_key(|peer| (peer.addr, peer.incarnation));
        peers
    }

    pub(crate) fn get(&self, peer: Incarnation) -> Option<PeerInfo> {
        self.lock().peers.get(&peer).map(Known::shown)
    }

    /// What carries a peer's pages now.
    pub(crate) fn fabric(&self, peer: Incarnation) -> Option<FabricInfo> {
        self.lock().peers.get(&peer).map(|known| known.info.fabric)
    }

    /// A session came up. Lanes that stand are kept.
    pub(super) fn up(&self, mut info: PeerInfo) {
        let mut table = self.lock();
        table.gone.retain(|gone| *gone != info.incarnation);
        let mut faults = Vec::new();
        if let Some(known) = table.peers.get_mut(&info.incarnation) {
            info.lanes = std::mem::take(&mut known.info.lanes);
            faults = std::mem::take(&mut known.faults);
        }
        let (tcp, why_tcp) = (info.fabric, info.why_not_rdma.clone());
        let mut known = Known { info, tcp, why_tcp, faults };
        known.settle();
        table.peers.insert(known.info.incarnation, known);
    }

    pub(super) fn health(&self, peer: Incarnation, health: PeerHealth) {
        if let Some(known) = self.lock().peers.get_mut(&peer) {
            known.info.health = health;
        }
    }

    /// A peer is given up. Its lanes are no rails any more, though the worker may still be closing
    /// them.
    pub(super) fn gone(&self, peer: Incarnation, kind: FailureKind, cause: String) {
        let mut table = self.lock();
        let Some(known) = table.peers.get_mut(&peer) else { return };
        known.info.health = PeerHealth::Gone { kind, cause };
        known.info.lanes.clear();
        table.gone.push_back(peer);
        if table.gone.len() > GONE_PEERS_MAX
            && let Some(oldest) = table.gone.pop_front()
        {
            table.peers.remove(&oldest);
        }
    }

    pub(super) fn lane_up(&self, peer: Incarnation, lane: LaneInfo) {
        if let Some(known) = self.lock().peers.get_mut(&peer) {
            known.info.lanes.push(lane);
            known.settle();
        }
    }

    /// A lane carries frames: its pair of rails is well.
    pub(super) fn lane_open(&self, peer: Incarnation, lane: u16) {
        let mut table = self.lock();
        let Some(known) = table.peers.get_mut(&peer) else { return };
        let info = &mut known.info;
        let Some(open) = info.lanes.iter_mut().find(|info| info.lane == lane) else { return };
        open.open = true;
        if let LanePath::Rdma(RdmaPath { local, remote, .. }) = &open.path {
            let of_path = |fault: &&mut Fault| fault.is_of(&local.rail, &remote.rail);
            let faults = known.faults.iter_mut().filter(of_path);
            let now = Instant::now();
            faults.for_each(|fault| fault.open_since = fault.open_since.or(Some(now)));
        }
        known.settle();
    }

    pub(super) fn lane_down(&self, peer: Incarnation, lane: u16, cause: &str) {
        let mut table = self.lock();
        let Some(known) = table.peers.get_mut(&peer) else { return };
        let Some(at) = known.info.lanes.iter().position(|info| info.lane == lane) else { return };
        if let LanePath::Rdma(path) = known.info.lanes.remove(at).path {
            known.fault(&path.local.rail, &path.remote.rail, cause);
        }
        known.settle();
    }

    /// A pair of rails could not be joined.
    pub(super) fn path_failed(&self, peer: Incarnation, rail: &str, remote: &str, cause: &str) {
        if let Some(known) = self.lock().peers.get_mut(&peer) {
            known.fault(rail, remote, cause);
            known.settle();
        }
    }

    /// When a pair of rails may be tried again, and how often it has failed in a row.
    pub(super) fn path_state(
        &self,
        peer: Incarnation,
        rail: &str,
        remote: &str,
    ) -> (Option<Instant>, u32) {
        let table = self.lock();
        let faults = table.peers.get(&peer).map(|known| known.faults.iter());
        let fault = faults.into_iter().flatten().find(|fault| fault.is_of(rail, remote));
        fault.map_or((None, 0), |fault| {
            let failures = fault.path.failures;
            let at = fault.open_since.is_none().then(|| fault.at + retry_after(failures));
            (at, failures)
        })
    }

    /// Failures of all pairs of rails of which no lane is open.
    pub(super) fn failures(&self, peer: Incarnation) -> u32 {
        let table = self.lock();
        let Some(known) = table.peers.get(&peer) else { return 0 };
        let standing = known.faults.iter().filter(|fault| fault.open_since.is_none());
        standing.map(|fault| fault.path.failures).sum()
    }

    /// A rail of ours is up again: what failed on it may be tried at once.
    pub(super) fn rail_up(&self, rail: &str) {
        for known in self.lock().peers.values_mut() {
            known.faults.retain(|fault| fault.path.rail != rail);
        }
    }

    /// Lanes that stand and are meant.
    pub(super) fn lanes(&self, peer: Incarnation, meant: impl Fn(&LaneInfo) -> bool) -> usize {
        let table = self.lock();
        let lanes = table.peers.get(&peer).map(|known| known.info.lanes.iter());
        lanes.map_or(0, |lanes| lanes.filter(|lane| meant(lane)).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::message::LaneIo;

    fn info(id: u128) -> PeerInfo {
        PeerInfo {
            incarnation: Incarnation(id),
            name: String::new(),
            addr: "127.0.0.1:1".parse().unwrap(),
            health: PeerHealth::Up,
            fabric: FabricInfo::Tcp { io: LaneIo::Epoll, peer_io: LaneIo::IoUring },
            why_not_rdma: None,
            lanes: Vec::new(),
            faults: Vec::new(),
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
        let path = LanePath::Tcp { local: end, remote: end };
        table.lane_up(peer, LaneInfo { lane: 1, path, open: true });
        table.health(peer, PeerHealth::Reconnecting);
        table.up(info(1));
        assert_eq!(table.lanes(peer, |_| true), 1);
        table.gone(peer, FailureKind::PeerSilent, "silent".to_owned());
        table.up(info(1));
        assert_eq!(table.lanes(peer, |_| true), 0);
    }
}
