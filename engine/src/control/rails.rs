//! RDMA lanes of a session: which pairs of rails lack one, the two messages that make it, and what happens
//! when it cannot be made. The dialer of the session makes them; making blocks, so it happens on threads
//! of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::Core;
use super::handshake::one_line;
use super::peer::{Letter, PeerTask, Running};
use super::session::End;
use crate::config::LANES_MAX;
use crate::fabric::rdma::{
    HalfLane, LaneFault, RailEvents, RailNews, RailPair, Rails, RdmaLink, RemoteRails, pair_rails,
};
use crate::fabric::{Link, NewLane};
use crate::ids::LaneId;
use crate::peers::{LaneInfo, LanePath};
use crate::wire::message::{Carriers, Message};
use crate::wire::rails::RailsCard;
use crate::worker::mail::ToWorker;

/// First wait before a pair of rails that failed is joined again, doubled up to the longest.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LONGEST: Duration = Duration::from_secs(5);
/// Failures without an open lane after which pages go over TCP instead.
const FAILURES_BEFORE_TCP: u32 = 3;

/// How long to wait after so many failures in a row.
pub(super) fn retry_after(failures: u32) -> Duration {
    RETRY_FIRST.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(RETRY_LONGEST)
}

/// What one side does about RDMA lanes to a peer.
#[derive(Debug, Default)]
pub(super) struct RailDialing {
    /// The peer's rails, once told in this session.
    remote: Option<Arc<RemoteRails>>,
    /// Ends that were offered and wait for their answer.
    halves: HashMap<LaneId, (HalfLane, Instant)>,
    /// Ends being made, by pair; answers being made.
    making: HashMap<RailPair, usize>,
    answering: usize,
    /// TCP serves in the place of RDMA.
    fallen_back: bool,
}

/// An end that was made, or not.
#[derive(Debug)]
pub(super) enum Made {
    /// The dialer's, to be offered.
    Half { pair: RailPair, made: Result<(HalfLane, Vec<u8>), LaneFault> },
    /// The listener's, to be told; or why not.
    Answer { id: LaneId, made: Result<(RdmaLink, Vec<u8>), LaneFault> },
    /// The dialer's, joined to the listener's.
    Whole { id: LaneId, pair: RailPair, made: Result<RdmaLink, LaneFault> },
}

impl RailDialing {
    /// What was under way on the last session will not be answered.
    pub(super) fn new_session(&mut self) {
        self.remote = None;
        self.halves.clear();
    }
}

impl Core {
    /// Why pages of a peer go over TCP from the start, if they do.
    pub(super) fn why_tcp(&self, both_have_rdma: bool) -> Option<String> {
        match &self.rails {
            _ if both_have_rdma => None,
            Ok(_) => Some("the peer has none".to_owned()),
            Err(why) => Some(why.clone()),
        }
    }

    /// Hears what a NIC says of its ports, as long as the engine lives.
    async fn hear_rails(self: Arc<Self>, mut events: RailEvents) {
        let Ok(rails) = &self.rails else { return };
        while let Ok(all) = events.next().await {
            for news in all {
                match news {
                    RailNews::Down { rail, cause } => {
                        tracing::warn!(cause, "a rail is down");
                        let _ = self.worker.send(ToWorker::RailDown { rail, cause }).await;
                    }
                    RailNews::Up { rail } => {
                        if let Some(card) = rails.rail_cards().get(usize::from(rail)) {
                            tracing::info!(rail = card.name, "a rail is up again");
                            self.peers.rail_up(&card.name);
                        }
                    }
                }
            }
            self.rouse_peers();
        }
    }

    /// Starts to hear the NICs.
    pub(super) fn watch_rails(self: &Arc<Self>) -> std::io::Result<()> {
        let Ok(rails) = &self.rails else { return Ok(()) };
        let _entered = self.rt.enter();
        for events in rails.events()? {
            let core = Arc::clone(self);
            self.spawn(async move {
                let closing = core.closing();
                tokio::select! {
                    () = Arc::clone(&core).hear_rails(events) => {}
                    () = closing => {}
                }
            });
        }
        Ok(())
    }
}

impl PeerTask {
    /// The peer says what rails it has.
    pub(super) fn told_rails(&mut self, card: &RailsCard) {
        self.rails.remote = Some(Arc::new(RemoteRails::new(card.clone())));
    }

    /// Makes the ends that are missing, or says when to look again.
    pub(super) fn dial_rails(&mut self, running: &Running) -> Option<Instant> {
        let (Ok(rails), Some(remote)) = (&self.core.rails, &self.rails.remote) else { return None };
        let (rails, remote) = (Arc::clone(rails), Arc::clone(remote));
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        let mut look_again = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        let over: Vec<LaneId> = self
            .rails
            .halves
            .iter()
            .filter(|(_, (_, until))| *until <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            if let Some((half, _)) = self.rails.halves.remove(&id) {
                self.path_failed(half.pair(), "the peer did not answer the offer of a lane");
                // It may stand there all the same.
                let _ = running.own.try_send(Message::LaneLost { lane: id });
            }
        }
        self.rails.halves.values().for_each(|(_, until)| look_again(*until));
        let (ours, theirs) = (rails.rail_cards(), &remote.rails);
        let peer = self.peer.incarnation;
        let names = |pair: RailPair| {
            (&ours[usize::from(pair.local)].name, &theirs[usize::from(pair.remote)].name)
        };
        let waits = |pair: RailPair| {
            let (local, remote) = names(pair);
            self.core.peers.path_state(peer, local, remote).0.filter(|at| *at > now)
        };
        let pairs =
            pair_rails(ours, theirs, |pair| rails.is_up(pair.local) && waits(pair).is_none());
        let mut missing = Vec::new();
        for &pair in &pairs {
            let (local, remote) = names(pair);
            let standing = self.core.peers.lanes(peer, |lane| lane.joins(local, remote));
            let halves = self.rails.halves.values().filter(|(half, _)| half.pair() == pair);
            let making = self.rails.making.get(&pair).copied().unwrap_or(0);
            let have = standing + halves.count() + making;
            let want = usize::from(self.core.config.rdma.qps_per_rail);
            missing.extend((have..want).map(|_| pair));
        }
        for local in 0..ours.len() as u8 {
            (0..theirs.len() as u8)
                .filter_map(|remote| waits(RailPair { local, remote }))
                .for_each(&mut look_again);
        }
        for pair in missing {
            *self.rails.making.entry(pair).or_default() += 1;
            let (local, name) = names(pair);
            let tried = self.core.peers.path_state(peer, local, name).1 as usize;
            let (rails, remote) = (Arc::clone(&rails), Arc::clone(&remote));
            self.make(move || Made::Half { pair, made: rails.offer(pair, &remote, tried) });
        }
        let way = !pair_rails(ours, theirs, |pair| rails.is_up(pair.local)).is_empty();
        self.fall_back(!way);
        next
    }

    /// Whether lanes are to be TCP connections: RDMA is not to be had, or does not come up.
    pub(super) fn wants_tcp(&self, running: &Running) -> bool {
        running.carrier == Carriers::Tcp
            || self.rails.fallen_back && running.carrier == Carriers::RdmaOrTcp
    }

    fn fall_back(&mut self, no_way: bool) {
        let peer = self.peer.incarnation;
        let open = self.core.peers.lanes(peer, |lane| lane.open && lane.is_rdma());
        let failures = self.core.peers.failures(peer);
        let idle = self.rails.halves.is_empty() && self.rails.making.values().all(|n| *n == 0);
        let due = open == 0 && (failures >= FAILURES_BEFORE_TCP || no_way && idle);
        if due && !std::mem::replace(&mut self.rails.fallen_back, true) {
            let why = self.core.peers.get(peer).and_then(|info| info.why_not_rdma);
            tracing::warn!(%peer, why, "no RDMA lane to a peer comes up; its pages go over TCP");
            metrics::counter!("kvferry_rdma_fallbacks_total").increment(1);
        }
        if open > 0 {
            self.rails.fallen_back = false;
        }
    }

    /// A message about an RDMA lane. Gives back what is for the worker.
    pub(super) fn rail_message(
        &mut self,
        message: Message,
        running: &Running,
    ) -> Result<Option<Message>, End> {
        let violation = |what: &str| Err(End::Violation(vec![what.to_owned()]));
        match message {
            Message::Rails(card) => {
                if running.carrier == Carriers::Tcp {
                    return violation("rails in a session without RDMA");
                }
                self.told_rails(&card);
                Ok(Some(Message::Rails(card)))
            }
            Message::LaneOffer { .. } if running.dialed => {
                violation("the listener of a session offered a lane")
            }
            Message::LaneOffer { lane, offer } => {
                let (Ok(rails), Some(remote)) = (&self.core.rails, &self.rails.remote) else {
                    return violation("a lane offered before its rails");
                };
                let peer = self.peer.incarnation;
                let standing = self.core.peers.lanes(peer, LaneInfo::is_rdma);
                if standing + self.rails.answering >= LANES_MAX as usize {
                    let cause = format!("a peer has at most {LANES_MAX} lanes");
                    let _ = running.own.try_send(Message::LaneRefused { lane, cause });
                    return Ok(None);
                }
                self.rails.answering += 1;
                let (rails, remote) = (Arc::clone(rails), Arc::clone(remote));
                self.make(move || Made::Answer { id: lane, made: rails.answer(&offer, &remote) });
                Ok(None)
            }
            Message::LaneAnswer { lane, answer } => {
                let half = self.rails.halves.remove(&lane);
                let (Some((half, _)), Ok(rails), Some(remote)) =
                    (half, &self.core.rails, &self.rails.remote)
                else {
                    // It was given up here, and stands there.
                    let _ = running.own.try_send(Message::LaneLost { lane });
                    return Ok(None);
                };
                let pair = half.pair();
                *self.rails.making.entry(pair).or_default() += 1;
                let (rails, remote) = (Arc::clone(rails), Arc::clone(remote));
                self.make(move || Made::Whole {
                    id: lane,
                    pair,
                    made: rails.complete(half, &answer, &remote),
                });
                Ok(None)
            }
            Message::LaneRefused { lane, cause } => {
                if let Some((half, _)) = self.rails.halves.remove(&lane) {
                    self.path_failed(half.pair(), &format!("the peer: {}", one_line(&cause)));
                }
                Ok(None)
            }
            other => Ok(Some(other)),
        }
    }

    /// An end was made, or could not be. `own` is the way out, while a session stands.
    pub(super) async fn made(&mut self, made: Made, running: Option<&Running>) {
        let own = running.map(|running| &running.own);
        match made {
            Made::Half { pair, made } => {
                self.no_longer_making(pair);
                match made {
                    Ok((half, offer)) => {
                        let Some((own, id)) = own.zip(random_id()) else { return };
                        let offer = Message::LaneOffer { lane: id, offer: Bytes::from(offer) };
                        if own.try_send(offer).is_ok() {
                            let until = Instant::now() + self.core.connect_timeout();
                            self.rails.halves.insert(id, (half, until));
                        }
                    }
                    Err(fault) => self.path_failed(pair, &fault.to_string()),
                }
            }
            Made::Answer { id, made } => {
                self.rails.answering = self.rails.answering.saturating_sub(1);
                match made {
                    Ok((link, answer)) => {
                        let answer = Message::LaneAnswer { lane: id, answer: Bytes::from(answer) };
                        self.rail_lane(id, link, answer).await;
                    }
                    Err(fault) => {
                        let peer = self.peer.incarnation;
                        tracing::debug!(%peer, %fault, "the offer of a lane is refused");
                        let cause = one_line(&fault.to_string());
                        if let Some(own) = own {
                            let _ = own.try_send(Message::LaneRefused { lane: id, cause });
                        }
                    }
                }
            }
            Made::Whole { id, pair, made } => {
                self.no_longer_making(pair);
                match made {
                    Ok(link) => self.rail_lane(id, link, Message::LaneReady { lane: id }).await,
                    Err(fault) => {
                        self.path_failed(pair, &fault.to_string());
                        if let Some(own) = own {
                            let _ = own.try_send(Message::LaneLost { lane: id });
                        }
                    }
                }
            }
        }
    }

    /// A lane's end stands here: gives it a number, and to the worker, which tells the peer.
    async fn rail_lane(&mut self, id: LaneId, link: RdmaLink, say: Message) {
        let peer = self.peer.incarnation;
        let Some(number) = self.core.lane_numbers.take() else {
            tracing::warn!(%peer, "a lane is refused: every lane number is in use");
            return;
        };
        let path = LanePath::Rdma(link.path().clone());
        tracing::debug!(%peer, lane = number, %path, "lane joined");
        self.core.peers.lane_up(peer, LaneInfo { lane: number, path, open: false });
        let link = Link::Rdma(Box::new(link));
        let lane = NewLane { id, number, link, say: Some(say) };
        let _ = self.core.worker.send(ToWorker::LaneUp { peer, lane }).await;
    }

    fn path_failed(&self, pair: RailPair, cause: &str) {
        let (Ok(rails), Some(remote)) = (&self.core.rails, &self.rails.remote) else { return };
        let local = rails.rail_cards().get(usize::from(pair.local));
        let remote = remote.rails.get(usize::from(pair.remote));
        if let (Some(local), Some(remote)) = (local, remote) {
            let peer = self.peer.incarnation;
            let (rail, remote) = (&local.name, &remote.name);
            tracing::debug!(%peer, rail, remote, cause, "two rails could not be joined");
            self.core.peers.path_failed(peer, rail, remote, cause);
        }
    }

    fn no_longer_making(&mut self, pair: RailPair) {
        if let Some(making) = self.rails.making.get_mut(&pair) {
            *making = making.saturating_sub(1);
        }
    }

    /// Runs what blocks on a thread of its own; what was made comes by letter.
    fn make(&self, what: impl FnOnce() -> Made + Send + 'static) {
        let peer = Arc::clone(&self.peer);
        let made = self.core.rt.spawn_blocking(what);
        self.core.spawn(async move {
            if let Ok(made) = made.await {
                peer.tell(Letter::Made(Box::new(made))).await;
            }
        });
    }
}

/// A lane's name on both sides; `None` without randomness, and then the lane is made later.
fn random_id() -> Option<LaneId> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).ok()?;
    Some(LaneId(u64::from_le_bytes(bytes)))
}

/// This engine's rails for a peer, if both sides have RDMA.
pub(super) fn rails_message(rails: &Result<Arc<Rails>, String>, rdma: bool) -> Option<Message> {
    let rails = rails.as_ref().ok().filter(|_| rdma)?;
    Some(Message::Rails(Box::new(rails.card())))
}
