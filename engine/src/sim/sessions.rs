//! How sessions come up, are lost and come back, and how each side gives the other up by itself.

use std::collections::VecDeque;

use tokio::sync::mpsc;

use super::control::{Item, Life, Pair, Session, Side};
use super::run::{Run, Task};
use crate::failure::FailureKind;
use crate::memory::pair_all;
use crate::worker::mail::{PeerUp, ToWorker};

impl Run {
    pub(super) fn connect_later(&mut self, pair: usize, delay_us: u64) {
        if !std::mem::replace(&mut self.pairs[pair].connect_due, true) {
            self.later(delay_us, Task::Connect(pair));
        }
    }

    /// The session that stands, with both sides up on it.
    pub(super) fn standing_session(&self, pair: usize) -> Option<usize> {
        let Pair { sides, sessions, .. } = &self.pairs[pair];
        let session = sides[0].session.filter(|_| sides[0].session == sides[1].session)?;
        (!sessions[session].broken).then_some(session)
    }

    pub(super) fn connect(&mut self, pair: usize) {
        self.pairs[pair].connect_due = false;
        let nodes = self.pairs[pair].nodes;
        if nodes.iter().any(|&node| !self.nodes[node].is_alive() || self.nodes[node].stopping) {
            return;
        }
        if nodes.iter().any(|&node| self.nodes[node].stalled) {
            let delay = self.dice.between(1000, 20_000);
            return self.connect_later(pair, delay);
        }
        if self.pairs[pair].sessions.last().is_some_and(|session| !session.broken) {
            return;
        }
        let session = self.pairs[pair].sessions.len();
        let channels = [VecDeque::new(), VecDeque::new()];
        self.pairs[pair].sessions.push(Session { broken: false, channels, after_us: [0, 0] });
        for side in 0..2 {
            let delay = self.dice.between(10, 2000);
            self.later(delay, Task::SideUp { pair, session, side });
        }
    }

    pub(super) fn side_up(&mut self, pair: usize, session: usize, side: usize) {
        if self.pairs[pair].sessions[session].broken {
            return;
        }
        let nodes = self.pairs[pair].nodes;
        let (node, other) = (nodes[side], nodes[1 - side]);
        let (peer, ours) = (self.nodes[other].incarnation, self.nodes[node].card());
        if self.pairs[pair].sides[side].life == Life::Up {
            // The old session is replaced.
            self.drop_items(pair, side);
            self.mail(node, ToWorker::PeerDown { peer });
        }
        let Ok(pairings) = pair_all(&[ours], &[self.nodes[other].card()]) else { return };
        let (outbox, taken) = mpsc::channel(self.scenario.outbox);
        let addr = std::net::SocketAddr::from(([10, 0, 0, other as u8], 1));
        self.note(node, 30, format_args!("session {session} with engine {other} is up"));
        self.mail(node, ToWorker::PeerUp(PeerUp { peer, addr, pairings, outbox }));
        let at = &mut self.pairs[pair].sides[side];
        (at.life, at.session, at.outbox) = (Life::Up, Some(session), Some(taken));
        at.lives += 1;
        for _ in 0..self.pairs[pair].sessions[session].channels[1 - side].len() {
            let delay = self.dice.between(1, self.scenario.faults.delay_us);
            self.later(delay, Task::Deliver { pair, session, from: 1 - side });
        }
        self.dial_later(pair);
    }

    /// A session breaks: what is on its way is lost, from some point on.
    pub(super) fn break_session(&mut self, pair: usize) {
        let Some(session) = self.pairs[pair].sessions.len().checked_sub(1) else { return };
        if std::mem::replace(&mut self.pairs[pair].sessions[session].broken, true) {
            return;
        }
        let [sender, _] = self.pairs[pair].nodes;
        self.note(sender, 32, format_args!("session {session} of pair {pair} breaks"));
        for from in 0..2 {
            let on_way = self.pairs[pair].sessions[session].channels[from].len();
            let keep = self.dice.pick(on_way + 1);
            let lost = self.pairs[pair].sessions[session].channels[from].split_off(keep);
            lost.into_iter().for_each(|item| self.lose_item(item));
            let until = self.pairs[pair].sessions[session].after_us[from];
            let delay = self.dice.between(1, 10_000) + until.saturating_sub(self.now_us);
            self.later(delay, Task::SideDown { pair, session, side: 1 - from });
        }
        let delay = self.dice.between(500, self.scenario.grace_ms * 1500);
        self.connect_later(pair, delay);
    }

    pub(super) fn lose_item(&self, item: Item) {
        if let Item::Lane(wire) = item {
            self.world.borrow_mut().abandon(wire, 0);
        }
    }

    /// A side leaves its session: what was on its way to it is lost.
    fn drop_items(&mut self, pair: usize, side: usize) {
        let at = &mut self.pairs[pair].sides[side];
        at.outbox = None;
        if let Some(session) = at.session.take() {
            let lost = std::mem::take(&mut self.pairs[pair].sessions[session].channels[1 - side]);
            lost.into_iter().for_each(|item| self.lose_item(item));
        }
    }

    pub(super) fn side_down(&mut self, pair: usize, session: usize, side: usize) {
        let at = &self.pairs[pair].sides[side];
        if at.session != Some(session) || at.life != Life::Up {
            return;
        }
        self.drop_items(pair, side);
        let nodes = self.pairs[pair].nodes;
        let (node, other) = (nodes[side], nodes[1 - side]);
        self.note(node, 33, format_args!("session {session} with engine {other} is down"));
        self.mail(node, ToWorker::PeerDown { peer: self.nodes[other].incarnation });
        let at = &mut self.pairs[pair].sides[side];
        at.life = Life::Down;
        at.lives += 1;
        let life = at.lives;
        let grace_us = self.scenario.grace_ms * 1000;
        let delay = self.dice.between(grace_us / 5, grace_us);
        self.later(delay, Task::GiveUp { pair, side, life });
    }

    /// The grace of a lost peer is over.
    pub(super) fn give_up(&mut self, pair: usize, side: usize, life: u64) {
        let at = &self.pairs[pair].sides[side];
        if at.lives != life || at.life != Life::Down {
            return;
        }
        if self.nodes[self.pairs[pair].nodes[side]].stalled {
            let delay = self.dice.between(1000, 20_000);
            return self.later(delay, Task::GiveUp { pair, side, life });
        }
        self.gone(pair, side, FailureKind::PeerDied);
    }

    /// A side has heard nothing for too long.
    pub(super) fn silence(&mut self, pair: usize, side: usize, life: u64) {
        let at = &self.pairs[pair].sides[side];
        let nodes = self.pairs[pair].nodes;
        let (mine, theirs) = (&self.nodes[nodes[side]], &self.nodes[nodes[1 - side]]);
        // A session that came up just before the other side stopped is silent too.
        if at.life != Life::Up || mine.for_ever || at.lives != life && !theirs.stalled {
            return;
        }
        if mine.stalled {
            // It counts ticks of its own; what it missed meanwhile it does not blame on others.
            return self.later(self.scenario.silent_ms * 1000, Task::Silence { pair, side, life });
        }
        self.gone(pair, side, FailureKind::PeerSilent);
        self.break_session(pair);
    }

    /// An engine leaves: the other side hears that behind everything it said before, or only that the
    /// session is lost.
    pub(super) fn say_goodbye(&mut self, pair: usize, node: usize) {
        let side = usize::from(self.pairs[pair].nodes[1] == node);
        if self.pairs[pair].sides[side].life == Life::Up {
            self.send(pair, side, Item::Bye);
        }
        self.drop_items(pair, side);
        self.pairs[pair].sides[side].life = Life::Gone;
        if !self.pairs[pair].sessions.last().is_some_and(|session| session.broken) {
            self.break_session(pair);
        }
    }

    /// A side gives the other up.
    pub(super) fn gone(&mut self, pair: usize, side: usize, kind: FailureKind) {
        if !matches!(self.pairs[pair].sides[side].life, Life::Up | Life::Down) {
            return;
        }
        self.drop_items(pair, side);
        let at = &mut self.pairs[pair].sides[side];
        at.life = Life::Gone;
        at.lives += 1;
        let nodes = self.pairs[pair].nodes;
        let (node, other) = (nodes[side], nodes[1 - side]);
        self.abandon_lanes(pair, side);
        self.note(node, 34, format_args!("gives engine {other} up: {kind}"));
        self.nodes[node].gone.push((other, kind));
        let peer = self.nodes[other].incarnation;
        self.mail(
            node,
            ToWorker::PeerGone { peer, kind, causes: vec![format!("simulated {kind}")] },
        );
    }

    pub(super) fn sessions_text(&self) -> String {
        let sides = |pair: &Pair| pair.sides.each_ref().map(|side| (side.life, side.session));
        let last = |pair: &Pair| pair.sessions.last().map(|session| session.broken);
        let pairs = self.pairs.iter();
        pairs.map(|pair| format!("{:?} {:?} {:?}; ", pair.nodes, sides(pair), last(pair))).collect()
    }

    /// Whether nobody is between two sessions.
    pub(super) fn sessions_are_settled(&self) -> bool {
        (0..self.pairs.len()).all(|pair| {
            let at = &self.pairs[pair];
            let counts = |&node: &usize| {
                let node = &self.nodes[node];
                node.is_alive() && !node.for_ever
            };
            let is_over = |side: &Side| matches!(side.life, Life::Gone | Life::Stranger);
            if at.nodes.iter().all(counts) {
                self.standing_session(pair).is_some()
            } else {
                (0..2).all(|side| !counts(&at.nodes[side]) || is_over(&at.sides[side]))
            }
        })
    }
}
