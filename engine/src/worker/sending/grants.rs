//! Grants and the rooms they are for: whichever comes first waits for the other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::{Granted, SendRoom, SentHash, WaitingGrant, pages_of};
use crate::config::ROOM_TIMEOUT_MS_MAX;
use crate::fabric::{Fabric, PeerIndex};
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Incarnation, Micros, Role};
use crate::memory::{PageHash, PoolId};
use crate::room::cell::{Bound, BoundPool, RoomCell};
use crate::room::release::Release;
use crate::room::sender::{Sender, SenderEvent};
use crate::wire::message::{Grant, Message};
use crate::worker::{TABLE_FULL, Timer, Worker};

/// How much later than the receiver the sender lets a room's deadline pass, so that the receiver's word
/// on it, which is the room's, is there first.
const VERDICT_LEAD_MS: u64 = 100;

const DRAINING: &str = "the prefill side was told to drain";

impl<F: Fabric> Worker<F> {
    pub(in crate::worker) fn open(
        &mut self,
        now: Micros,
        cell: Arc<RoomCell>,
        peer: Option<Incarnation>,
        deadline: Micros,
    ) {
        if self.stopping {
            return self.end_unstarted(
                now,
                &cell,
                FailureKind::Shutdown,
                "the engine was shut down",
            );
        }
        let room = SendRoom {
            cell: Arc::clone(&cell),
            core: Sender::new(deadline),
            wanted: peer,
            bound: None,
            chunks: VecDeque::new(),
            next_piece: 0,
            aux: Bytes::new(),
            ready: false,
            suspicion: None,
            asked: None,
            release: Release::new(),
            replayed: 0,
            checksum: None,
        };
        let Ok((slot, generation)) = self.sending.rooms.insert(room) else {
            debug_assert!(false, "callers reserve a place first");
            return self.end_unstarted(now, &cell, FailureKind::Aborted, TABLE_FULL);
        };
        cell.slot.store(slot, Ordering::Relaxed);
        self.timers.set(deadline, Timer::Send { slot, generation });
        let peers = &self.peers;
        let fits = |waiting: &WaitingGrant| {
            let from = peers.get(waiting.peer).map(|peer| peer.incarnation);
            waiting.until > now && (peer.is_none() || peer == from)
        };
        let mut fitting = self.sending.take_grants(cell.room, fits);
        if !fitting.is_empty() {
            let waiting = fitting.remove(0);
            for other in fitting {
                self.sending.keep_grant(other);
            }
            self.bind(now, slot, waiting.peer, waiting.session, waiting.until, waiting.grant);
            return;
        }
        self.sending.waiting.entry(cell.room).or_default().push(slot);
    }

    /// A grant came from a peer.
    pub(in crate::worker) fn granted(&mut self, now: Micros, peer: PeerIndex, grant: Grant) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        let (incarnation, session) = (known.incarnation, known.session);
        known.latest = known.latest.max(grant.epoch);
        if let Some(&slot) = self.sending.by_epoch.get(&(peer, grant.epoch)) {
            if let Some(bound) =
                self.sending.rooms.get_mut(slot).and_then(|room| room.bound.as_mut())
            {
                bound.session = session;
            }
            return;
        }
        if let Some(verdict) = self.verdicts.find(incarnation, grant.epoch, Role::Sender).cloned() {
            self.stats.late_events += 1;
            self.peers.tell(peer, verdict);
            self.say_drained(peer, grant.epoch);
            return;
        }
        if let Some(error) = self.check_grant(peer, &grant) {
            self.refuse_grant(peer, &grant, FailureKind::ProtocolViolation, error);
            return;
        }
        let until = now.after_ms(grant.deadline_ms.min(ROOM_TIMEOUT_MS_MAX) + VERDICT_LEAD_MS);
        let waiting = self.sending.waiting.get(&grant.room).map_or(&[][..], Vec::as_slice);
        let slot = waiting.iter().copied().find(|&slot| {
            self.sending
                .rooms
                .get(slot)
                .is_some_and(|room| room.wanted.is_none_or(|wanted| wanted == incarnation))
        });
        if let Some(slot) = slot {
            self.bind(now, slot, peer, session, until, grant);
            return;
        }
        let busy = self.sending.by_room.get(&(peer, grant.room)).is_some_and(|&slot| {
            self.sending.rooms.get(slot).is_some_and(|room| room.core.is_live())
        });
        if busy {
            let error = "an earlier epoch of this room id is still live on the sender".to_owned();
            self.refuse_grant(peer, &grant, FailureKind::RoomBusy, error);
            return;
        }
        if self.draining || self.peers.get(peer).is_some_and(|peer| peer.draining) {
            let error = DRAINING.to_owned();
            self.refuse_grant(peer, &grant, FailureKind::PeerDraining, error);
            return;
        }
        let pages = pages_of(&grant);
        if !self.sending.has_place_for(pages) {
            self.sending.forget_grants(|waiting| waiting.until <= now);
        }
        if !self.sending.has_place_for(pages) {
            let error = "too many grants wait on the sender for rooms to be opened".to_owned();
            self.refuse_grant(peer, &grant, FailureKind::GrantRefused, error);
            return;
        }
        // The same grant said again after a reconnect, or a newer epoch of the same peer's room.
        let room = grant.room;
        self.sending.take_grants(room, |waiting| waiting.peer == peer);
        self.sending.keep_grant(WaitingGrant { peer, session, until, grant });
    }

    /// Refuses the grants that wait for rooms, of a peer or of all: this side was told to drain.
    pub(in crate::worker) fn refuse_waiting(&mut self, peer: Option<PeerIndex>) {
        for waiting in self.sending.take_all_grants(peer) {
            let error = DRAINING.to_owned();
            self.refuse_grant(waiting.peer, &waiting.grant, FailureKind::PeerDraining, error);
        }
    }

    fn check_grant(&self, peer: PeerIndex, grant: &Grant) -> Option<String> {
        let peer = self.peers.get(peer)?;
        for (index, granted) in grant.pools.iter().enumerate() {
            let Some(pool) =
                peer.pools.iter().find(|pool| pool.pairing.remote_pool == granted.pool)
            else {
                return Some(format!(
                    "grant names pool {}, which the peer did not announce",
                    granted.pool
                ));
            };
            if grant.pools[..index].iter().any(|other| other.pool == granted.pool) {
                return Some(format!("grant names pool {} twice", granted.pool));
            }
            let pages = pool.pairing.remote_pages;
            if let Some(page) = granted.pages.iter().find(|&&page| page >= pages) {
                return Some(format!("grant names page {page} of a pool of {pages}"));
            }
        }
        None
    }

    fn refuse_grant(&mut self, peer: PeerIndex, grant: &Grant, kind: FailureKind, cause: String) {
        let Some(known) = self.peers.get(peer) else { return };
        let failure = Failure {
            kind,
            room: grant.room,
            epoch: grant.epoch,
            seen_by: Role::Sender,
            reporter: self.identity,
            peer: Some(known.incarnation),
            peer_addr: Some(known.addr.clone()),
            lane: None,
            landed: Landed::default(),
            retries: 0,
            causes: vec![cause],
        };
        let (room, epoch) = (grant.room, grant.epoch);
        self.peers.tell(
            peer,
            Message::Failed { room, epoch, to: Role::Receiver, failure: Box::new(failure) },
        );
        self.say_drained(peer, epoch);
    }

    fn bind(
        &mut self,
        now: Micros,
        slot: u32,
        peer: PeerIndex,
        session: u64,
        until: Micros,
        grant: Grant,
    ) {
        let Some(known) = self.peers.get(peer) else { return };
        self.sending.stop_waiting(grant.room, slot);
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let mut pools = vec![None; known.pools.len()];
        let mut bound_pools = Vec::new();
        for granted in grant.pools {
            let Some(ours) =
                known.pools.iter().position(|pool| pool.pairing.remote_pool == granted.pool)
            else {
                continue;
            };
            let pairing = &known.pools[ours].pairing;
            bound_pools.push(BoundPool {
                pool: PoolId(ours as u8),
                positions: granted.pages.len() as u32,
                layers: pairing.layers.clone(),
                planes: pairing.planes,
            });
            pools[ours] = Some(granted.pages.into());
        }
        let shown = Bound {
            peer: known.incarnation,
            peer_addr: known.addr.clone(),
            epoch: grant.epoch,
            note: grant.note,
            checksum: grant.checksum,
            aux_bytes: grant.aux_bytes,
            pools: bound_pools,
        };
        if grant.checksum {
            room.checksum = Some(Box::new(SentHash { hash: PageHash::new(), extents: Vec::new() }));
        }
        room.bound = Some(Granted { peer, epoch: grant.epoch, slot: grant.slot, session, pools });
        self.sending.by_epoch.insert((peer, grant.epoch), slot);
        self.sending.by_room.insert((peer, grant.room), slot);
        self.step_sender(
            now,
            slot,
            SenderEvent::Granted { epoch: grant.epoch, deadline: until },
            Vec::new(),
        );
        // Shown last: whoever sees the grant sees the state that goes with it.
        if let Some(room) = self.sending.rooms.get(slot) {
            room.cell.bind(shown, now.0);
        }
        let generation = self.sending.rooms.generation(slot);
        self.timers.set(until, Timer::Send { slot, generation });
    }
}
