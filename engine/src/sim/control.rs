//! The control plane's part: sessions that carry messages in order, are lost, come back, and are given
//! up, by the rules of the real one: of a peer, up comes before the session's messages, down or gone
//! behind them.

use std::collections::VecDeque;

use tokio::sync::mpsc;

use super::run::{Run, Task};
use crate::failure::FailureKind;
use crate::memory::pair_all;
use crate::wire::message::{CONTROL_FRAME_BYTES_MAX, Message, encode};
use crate::worker::mail::{PeerUp, ToControl, ToWorker};

/// Messages said again after a session came back, at most.
const ECHOES: usize = 8;

/// Two engines that talk: side 0 sends, side 1 receives.
pub(super) struct Pair {
    pub(super) nodes: [usize; 2],
    pub(super) sides: [Side; 2],
    pub(super) sessions: Vec<Session>,
    connect_due: bool,
    pub(super) dial_due: bool,
    /// Lanes that are to be said to side 0 once they are up at side 1, and their session.
    pub(super) unsaid_lanes: Vec<(usize, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Stranger,
    Up,
    Down,
    Gone,
}

/// One side's view of the other.
pub(super) struct Side {
    pub(super) life: Life,
    /// Changes of `life` so far.
    pub(super) lives: u64,
    pub(super) session: Option<usize>,
    outbox: Option<mpsc::Receiver<Message>>,
    /// The last messages that were delivered to this side.
    heard: VecDeque<Message>,
}

pub(super) struct Session {
    pub(super) broken: bool,
    /// By the side they come from.
    channels: [VecDeque<Item>; 2],
    after_us: [u64; 2],
}

pub(super) enum Item {
    Message(Vec<u8>),
    /// A lane that is up at the side this comes from.
    Lane(usize),
    /// The engine at the side this comes from leaves.
    Bye,
}

impl Run {
    /// Two engines get to know each other.
    pub(super) fn meet(&mut self, sender: usize, receiver: usize) {
        let side = || Side {
            life: Life::Stranger,
            lives: 0,
            session: None,
            outbox: None,
            heard: VecDeque::new(),
        };
        let pair = self.pairs.len();
        self.pairs.push(Pair {
            nodes: [sender, receiver],
            sides: [side(), side()],
            sessions: Vec::new(),
            connect_due: false,
            dial_due: false,
            unsaid_lanes: Vec::new(),
        });
        self.nodes[sender].pairs.push(pair);
        self.nodes[receiver].pairs.push(pair);
        let delay = self.dice.between(1, 3000);
        self.connect_later(pair, delay);
    }

    pub(super) fn pair_of(&self, a: usize, b: usize) -> Option<(usize, usize)> {
        self.nodes[a].pairs.iter().find_map(|&pair| {
            let nodes = self.pairs[pair].nodes;
            let side = nodes.iter().position(|&node| node == a)?;
            (nodes[1 - side] == b).then_some((pair, side))
        })
    }

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

    /// Takes what a worker says and puts it on its way.
    pub(super) fn pump(&mut self, node: usize) {
        for at in 0..self.nodes[node].pairs.len() {
            let pair = self.nodes[node].pairs[at];
            let side = usize::from(self.pairs[pair].nodes[1] == node);
            while let Some(message) =
                self.pairs[pair].sides[side].outbox.as_mut().and_then(|outbox| outbox.try_recv().ok())
            {
                self.note(node, 31, format_args!("says {}", brief(&message)));
                if let Message::Finished { epoch, .. } = &message {
                    self.check_left(node, self.pairs[pair].nodes[1 - side], *epoch);
                }
                match encode(&message, CONTROL_FRAME_BYTES_MAX) {
                    Ok(frame) => self.send(pair, side, Item::Message(frame)),
                    Err(error) => {
                        let text = format!("engine {node} says what cannot be sent: {error}");
                        self.world.borrow_mut().violation.get_or_insert(text);
                    }
                }
            }
            if side == 1 {
                self.say_lanes(pair);
            }
        }
    }

    /// Puts an item into the session that a side is on; it is lost if that is broken.
    pub(super) fn send(&mut self, pair: usize, side: usize, item: Item) {
        let Some(session) = self.pairs[pair].sides[side].session else { return };
        let delay = self.dice.between(1, self.scenario.faults.delay_us);
        let slow = !self.is_over && self.dice.chance(self.scenario.faults.slow);
        let at = self.now_us + if slow { delay * 100 } else { delay };
        let on = &mut self.pairs[pair].sessions[session];
        if on.broken {
            return self.lose_item(item);
        }
        on.after_us[side] = on.after_us[side].max(at);
        let at = on.after_us[side];
        on.channels[side].push_back(item);
        self.later(at - self.now_us, Task::Deliver { pair, session, from: side });
    }

    pub(super) fn deliver(
        &mut self,
        pair: usize,
        session: usize,
        from: usize,
    ) -> Result<(), String> {
        if self.pairs[pair].sides[1 - from].session != Some(session) {
            return Ok(());
        }
        let Some(item) = self.pairs[pair].sessions[session].channels[from].pop_front() else {
            return Ok(());
        };
        let nodes = self.pairs[pair].nodes;
        let (node, peer) = (nodes[1 - from], self.nodes[nodes[from]].incarnation);
        match item {
            Item::Message(frame) => {
                let message = Message::decode(&frame[4..])
                    .map_err(|error| format!("a message is not read back: {error}"))?;
                let heard = &mut self.pairs[pair].sides[1 - from].heard;
                if is_echoed(&message) {
                    heard.push_back(message.clone());
                    if heard.len() > ECHOES {
                        heard.pop_front();
                    }
                }
                let first_of_session = message == Message::Sync;
                self.mail(node, ToWorker::Message { peer, message });
                if first_of_session && !self.is_over {
                    self.echo(pair, 1 - from);
                }
            }
            Item::Lane(wire) => self.lane_arrives(pair, wire, from ^ 1),
            Item::Bye => self.gone(pair, 1 - from, FailureKind::Shutdown),
        }
        Ok(())
    }

    /// A side hears again what it heard on the session before.
    fn echo(&mut self, pair: usize, side: usize) {
        let nodes = self.pairs[pair].nodes;
        let (node, peer) = (nodes[side], self.nodes[nodes[1 - side]].incarnation);
        for message in self.pairs[pair].sides[side].heard.clone() {
            if self.dice.chance(self.scenario.faults.duplicate) {
                self.mail(node, ToWorker::Message { peer, message });
            }
        }
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

    fn lose_item(&self, item: Item) {
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
        self.mail(node, ToWorker::PeerGone { peer, kind, causes: vec![format!("simulated {kind}")] });
    }

    pub(super) fn mail(&mut self, node: usize, mail: ToWorker) {
        if self.nodes[node].is_alive() {
            if self.nodes[node].mail.try_send(mail).is_err() {
                let text = format!("the simulation overran the mailbox of engine {node}");
                self.world.borrow_mut().violation.get_or_insert(text);
            }
            self.wake(node);
        }
    }

    /// What a worker reports to its control plane.
    pub(super) fn take_reports(&mut self, node: usize) -> Result<(), String> {
        while let Ok(report) = self.nodes[node].control.try_recv() {
            match report {
                ToControl::Ended(cell) => self.ended(node, &cell)?,
                ToControl::LaneDown { lane, .. } => self.lane_reported_down(node, lane)?,
                ToControl::Expel { peer, cause } => {
                    return Err(format!("engine {node} expels {peer}: {cause}"));
                }
            }
        }
        Ok(())
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

/// Whether a message may come again on a later session and change nothing.
const fn is_echoed(message: &Message) -> bool {
    matches!(
        message,
        Message::Landed { .. }
            | Message::Failed { .. }
            | Message::Finished { .. }
            | Message::Drained { .. }
            | Message::LaneLost { .. }
            | Message::LaneTally { .. }
    )
}

/// A message on one line.
fn brief(message: &Message) -> String {
    match message {
        Message::Grant(grant) => format!("grant of room {} epoch {}", grant.room, grant.epoch),
        Message::Failed { epoch, to, failure, .. } => {
            format!("failed epoch {epoch} to the {to}: {}: {}", failure.kind, failure.causes.join(": "))
        }
        Message::Finished { epoch, sent, .. } => format!("finished epoch {epoch}: {sent:?}"),
        other => format!("{other:?}"),
    }
}
