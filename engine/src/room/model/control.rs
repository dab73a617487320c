//! Sessions, the words on them, peers that are given up, and crashes.

use super::setup::{Channel, Rule};
use super::world::{Engine, Life, Peer, SendRoom, Turn, Word, World, side};
use crate::failure::FailureKind;
use crate::ids::Role;

impl World {
    /// `Peers::find` of the engine at the other end.
    pub(super) fn peer_of(&self, role: Role) -> Option<u8> {
        let incarnation = self.engines[side(role.other())].incarnation;
        let peers = &self.engines[side(role)].peers;
        let found = peers.iter().position(|peer| !peer.gone && peer.incarnation == incarnation);
        found.map(|index| index as u8)
    }

    /// The peer it has a session with.
    pub(super) fn in_session(&self, role: Role) -> Option<u8> {
        let peers = &self.engines[side(role)].peers;
        peers.iter().position(|peer| peer.has_session).map(|index| index as u8)
    }

    /// Whether the session's other end is gone, so that it will break here too.
    pub(super) fn is_cut_off(&self, role: Role) -> bool {
        let Some(peer) = self.in_session(role) else { return false };
        let (here, there) = (&self.engines[side(role)], &self.engines[side(role.other())]);
        if here.peers[usize::from(peer)].incarnation != there.incarnation {
            return true;
        }
        // It may not have come up there yet.
        let stands = there.session == here.session && self.in_session(role.other()).is_some();
        !stands && there.session >= here.session
    }

    /// Whether a session may come up here.
    pub(super) fn may_connect(&self, role: Role) -> bool {
        let there = self.engines[side(role.other())].incarnation;
        let peers = &self.engines[side(role)].peers;
        let old_is_gone = peers.iter().all(|peer| peer.gone || peer.incarnation == there);
        self.in_session(role).is_none() && old_is_gone
    }

    /// `Peers::revive`: the entry of a peer that was given up, unless it is buried.
    fn entry_left(&self, role: Role, incarnation: u8) -> Option<u8> {
        let peers = &self.engines[side(role)].peers;
        let left = peers.iter().enumerate().rfind(|(_, peer)| peer.incarnation == incarnation);
        let (at, known) = left.map(|(at, known)| (at as u8, known))?;
        let has_rooms = match role {
            Role::Sender => {
                let bound = |room: &SendRoom| room.bound.is_some_and(|bound| bound.peer == at);
                self.sending.iter().flatten().any(bound)
            }
            Role::Receiver => self.receiving.iter().any(|room| room.peer == at),
        };
        (!known.links.none_stand() || has_rooms).then_some(at)
    }

    /// Whether a word waits that can be heard now.
    pub(super) fn hears(&self, role: Role) -> bool {
        let engine = &self.engines[side(role)];
        let next = engine.inbox.front();
        self.in_session(role).is_some()
            && next.is_some_and(|&(said_in, _)| said_in == engine.session)
    }
}

impl Turn<'_> {
    /// `Peers::tell`.
    pub(super) fn tell(&mut self, role: Role, peer: u8, word: Word) {
        let world = &mut self.world;
        if !world.peer(role, peer).has_session {
            return;
        }
        let session = world.engines[side(role)].session;
        let listens = world.in_session(role.other()).is_some();
        let there = world.engine(role.other());
        if self.setup.channel == Channel::Chaos {
            if !there.inbox.iter().any(|(_, said)| *said == word) {
                there.inbox.push_back((session, word));
            }
        } else if there.session < session || there.session == session && listens {
            there.inbox.push_back((session, word));
        }
    }

    pub(super) fn deliver(&mut self, role: Role, at: u8) {
        let Some(peer) = self.world.in_session(role) else { return };
        let inbox = &mut self.world.engine(role).inbox;
        let word = match self.setup.channel {
            Channel::Session => inbox.pop_front(),
            Channel::Chaos => inbox.get(usize::from(at)).cloned(),
        };
        if let Some((_, word)) = word {
            self.message(role, peer, word);
        }
    }

    /// `Worker::message`.
    fn message(&mut self, role: Role, peer: u8, word: Word) {
        match word {
            Word::Grant { life } => self.granted(peer, life),
            Word::Finished { life, sent } => self.told_finished(peer, life, sent),
            Word::Landed { life } => self.sender_told(peer, life, true),
            Word::Failed { life, to: Role::Sender } => self.sender_told(peer, life, false),
            Word::Failed { life, to: Role::Receiver } => self.receiver_told_failed(peer, life),
            Word::Drained { life } => self.told_drained(peer, life),
            Word::LaneLost { lane } => self.told_lane_lost(role, peer, lane),
            // A decode engine has no sending rooms, and loses no frames.
            Word::LaneTally { .. } | Word::Sync if role == Role::Receiver => {}
            Word::LaneTally { lane, tally } => self.told_lane_tally(peer, lane, tally),
            Word::Sync => self.senders_synced(peer),
            Word::LaneReady { lane } => self.lane_up(role, peer, lane),
        }
    }

    /// `Peer::session_down`: what was said on it and not heard is lost.
    pub(super) fn session_down(&mut self, role: Role) {
        if let Some(peer) = self.world.in_session(role) {
            self.world.peer(role, peer).has_session = false;
            let Engine { inbox, session, .. } = self.world.engine(role);
            inbox.retain(|(said_in, _)| said_in > session);
        }
    }

    /// `Worker::peer_up`. The first end to come up begins a session; the other joins it.
    pub(super) fn session_up(&mut self, role: Role) {
        let revive = self.setup.broken != Some(Rule::ReturnToItsEntry);
        let incarnation = self.world.engines[side(role.other())].incarnation;
        let left = || self.world.entry_left(role, incarnation).filter(|_| revive);
        let known = self.world.peer_of(role).or_else(left);
        let (here, there) =
            (&self.world.engines[side(role)], &self.world.engines[side(role.other())]);
        let to_me = |peer: &Peer| peer.has_session && peer.incarnation == here.incarnation;
        let joins = there.session > here.session && there.peers.iter().any(to_me);
        let session = if joins { there.session } else { here.session.max(there.session) + 1 };
        let engine = self.world.engine(role);
        engine.session = session;
        engine.inbox.retain(|(said_in, _)| *said_in >= session);
        let peer = known.unwrap_or_else(|| {
            let before = engine.peers.iter().rfind(|peer| peer.incarnation == incarnation);
            engine.peers.push(Peer::new(incarnation, before));
            (engine.peers.len() - 1) as u8
        });
        let entry = self.world.peer(role, peer);
        (entry.has_session, entry.gone) = (true, false);
        self.say_again(role, peer, incarnation, known.is_some());
    }

    fn say_again(&mut self, role: Role, peer: u8, incarnation: u8, known: bool) {
        let verdicts = self.world.engine(role).verdicts.iter();
        let told: Vec<Word> =
            verdicts.filter(|told| told.0 == incarnation).map(|told| told.2.clone()).collect();
        for word in told {
            self.tell(role, peer, word);
        }
        if known && self.setup.broken != Some(Rule::SayAgain) {
            match role {
                Role::Sender => self.resume_senders(peer),
                Role::Receiver => self.resume_receivers(peer),
            }
            let questions: Vec<_> = self.world.peer(role, peer).links.questions().collect();
            for lane in questions {
                self.tell(role, peer, Word::LaneLost { lane: lane.0 as u8 });
            }
        }
        self.tell(role, peer, Word::Sync);
    }

    /// `Worker::peer_gone`.
    pub(super) fn peer_gone(&mut self, role: Role, peer: u8, kind: FailureKind) {
        match role {
            Role::Sender => self.fail_senders_of(peer, kind),
            Role::Receiver => self.fail_receivers_of(peer, kind),
        }
        if self.world.in_session(role) == Some(peer) {
            self.session_down(role);
        }
        let known = self.world.peer(role, peer);
        known.returned.clear();
        known.gone = true;
        self.close_peer(role, peer);
    }

    /// `Verdicts::keep`.
    pub(super) fn keep_verdict(&mut self, role: Role, peer: u8, life: Life, word: Word) {
        let incarnation = self.world.peer(role, peer).incarnation;
        let verdicts = &mut self.world.engine(role).verdicts;
        match verdicts.iter_mut().find(|told| (told.0, told.1) == (incarnation, life)) {
            Some(told) => told.2 = word,
            None => verdicts.push((incarnation, life, word)),
        }
    }

    /// `Verdicts::find`.
    pub(super) fn find_verdict(&self, role: Role, peer: u8, life: Life) -> Option<Word> {
        let engine = &self.world.engines[side(role)];
        let incarnation = engine.peers[usize::from(peer)].incarnation;
        let told = engine.verdicts.iter().find(|told| (told.0, told.1) == (incarnation, life));
        told.map(|told| told.2.clone())
    }

    /// An engine's process dies, and another one starts in its place.
    pub(super) fn crash(&mut self, role: Role) {
        self.world.faults.crashes[side(role)] -= 1;
        self.lose_rooms(role);
        self.lose_lanes(role);
        let engine = self.world.engine(role);
        let (incarnation, session) = (engine.incarnation + 1, engine.session);
        let (peers, verdicts) = (Vec::new(), Vec::new());
        let inbox = std::collections::VecDeque::new();
        *engine = Engine { incarnation, session, peers, verdicts, inbox };
    }
}
