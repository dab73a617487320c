//! In the place of RDMA lanes where kvferry is built without them: types that have no value.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::{Event, Fabric, Gate, NewLane, PeerIndex, Posting, RoomTag};
use crate::config::RdmaConfig;
use crate::ids::{Epoch, LaneId};
use crate::memory::PageMap;
use crate::peers::RdmaPath;
use crate::wire::rails::{RailCard, RailsCard};

/// RDMA cannot be used here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// kvferry was built without it.
    #[error("kvferry was built without the feature rdma")]
    NotBuilt,
}

impl RdmaError {
    pub(crate) const fn is_absence(&self) -> bool {
        true
    }
}

#[derive(Debug)]
pub(crate) enum Rails {}

impl Rails {
    pub(crate) fn open(
        _: &RdmaConfig,
        _: &[Arc<PageMap>],
        _: &[u32],
    ) -> Result<Arc<Self>, RdmaError> {
        Err(RdmaError::NotBuilt)
    }

    pub(crate) fn card(&self) -> RailsCard {
        match *self {}
    }

    pub(crate) fn rail_cards(&self) -> &[RailCard] {
        match *self {}
    }

    pub(crate) fn is_up(&self, _: u8) -> bool {
        match *self {}
    }

    pub(crate) fn events(self: &Arc<Self>) -> std::io::Result<Vec<RailEvents>> {
        match **self {}
    }

    pub(crate) fn offer(
        self: &Arc<Self>,
        _: RailPair,
        _: &RemoteRails,
        _: usize,
    ) -> Result<(HalfLane, Vec<u8>), LaneFault> {
        match **self {}
    }

    pub(crate) fn answer(
        self: &Arc<Self>,
        _: &[u8],
        _: &RemoteRails,
    ) -> Result<(RdmaLink, Vec<u8>), LaneFault> {
        match **self {}
    }

    pub(crate) fn complete(
        self: &Arc<Self>,
        _: HalfLane,
        _: &[u8],
        _: &RemoteRails,
    ) -> Result<RdmaLink, LaneFault> {
        match **self {}
    }
}

#[derive(Debug)]
pub(crate) enum RailEvents {}

impl RailEvents {
    #[expect(clippy::unused_async, reason = "as where there are rails")]
    pub(crate) async fn next(&mut self) -> std::io::Result<Vec<RailNews>> {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum HalfLane {}

impl HalfLane {
    pub(crate) const fn pair(&self) -> RailPair {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum RdmaLink {}

impl RdmaLink {
    pub(crate) const fn path(&self) -> &RdmaPath {
        match *self {}
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LaneFault {}

/// What a peer said of its rails: nothing that could be used.
#[derive(Debug)]
pub(crate) struct RemoteRails {
    pub(crate) rails: Vec<RailCard>,
}

impl RemoteRails {
    pub(crate) fn new(card: RailsCard) -> Self {
        Self { rails: card.rails }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RailPair {
    pub(crate) local: u8,
    pub(crate) remote: u8,
}

pub(crate) const fn pair_rails(
    _: &[RailCard],
    _: &[RailCard],
    _: impl Fn(RailPair) -> bool + Copy,
) -> Vec<RailPair> {
    Vec::new()
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(dead_code, reason = "there are no rails to tell of")]
pub(crate) enum RailNews {
    Down { rail: u8, cause: String },
    Up { rail: u8 },
}

#[derive(Debug)]
pub(crate) enum RdmaFabric {}

impl RdmaFabric {
    pub(crate) fn new(rails: Arc<Rails>) -> Result<Self, RdmaError> {
        match *rails {}
    }

    pub(super) const fn take_events_fd(&mut self) -> Option<OwnedFd> {
        match *self {}
    }

    pub(super) const fn carries(&self, _: PeerIndex) -> bool {
        match *self {}
    }

    pub(super) const fn reaches(&self, _: PeerIndex) -> bool {
        match *self {}
    }

    pub(super) const fn arm(&mut self) -> bool {
        match *self {}
    }

    pub(super) const fn awake(&mut self) {
        match *self {}
    }

    pub(super) const fn forget(&self, _: &PageMap, _: &[&PageMap]) {
        match *self {}
    }
}

impl Fabric for RdmaFabric {
    fn is_guarded(&self, _: PeerIndex) -> bool {
        match *self {}
    }

    fn add_lane(&mut self, _: PeerIndex, _: NewLane) {
        match *self {}
    }

    fn close_lane(&mut self, _: PeerIndex, _: LaneId, _: &str) {
        match *self {}
    }

    fn close_peer(&mut self, _: PeerIndex, _: &str) {
        match *self {}
    }

    fn has_room(&self, _: PeerIndex) -> bool {
        match *self {}
    }

    fn post(&mut self, _: PeerIndex, _: Posting) {
        match *self {}
    }

    fn fence(&mut self, _: PeerIndex, _: Option<RoomTag>, _: &str) -> usize {
        match *self {}
    }

    fn retract(&mut self, _: PeerIndex, _: RoomTag, _: bool) {
        match *self {}
    }

    fn revoke(&mut self, _: PeerIndex, _: u32, _: Epoch) {
        match *self {}
    }

    fn poll(&mut self, _: &mut impl Gate, _: &mut Vec<Event>) -> bool {
        match *self {}
    }

    fn close(&mut self) -> bool {
        match *self {}
    }

    fn spins(&self) -> bool {
        match *self {}
    }

    fn sleep(&mut self, _: Duration) {
        match *self {}
    }
}
