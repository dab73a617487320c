//! The control plane's part: sessions that carry messages in order, are lost, come back, and are given
//! up, by the rules of the real one: of a peer, up comes before the session's messages, down or gone
//! behind them.

use std::collections::VecDeque;

use tokio::sync::mpsc;

use super::run::{Run, Task};
use crate::failure::FailureKind;
use crate::wire::message::{CONTROL_FRAME_BYTES_MAX, Message, encode};
use crate::worker::mail::{ToControl, ToWorker};

/// Messages said again after a session came back, at most.
const ECHOES: usize = 8;

/// Two engines that talk: side 0 sends, side 1 receives.
pub(super) struct Pair {
    pub(super) nodes: [usize; 2],
    pub(super) sides: [Side; 2],
    pub(super) sessions: Vec<Session>,
    pub(super) connect_due: bool,
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
    pub(super) outbox: Option<mpsc::Receiver<Message>>,
    /// The last messages that were delivered to this side.
    heard: VecDeque<Message>,
}

pub(super) struct Session {
    pub(super) broken: bool,
    /// By the side they come from.
    pub(super) channels: [VecDeque<Item>; 2],
    pub(super) after_us: [u64; 2],
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

    /// Takes what a worker says and puts it on its way.
    pub(super) fn pump(&mut self, node: usize) {
        for at in 0..self.nodes[node].pairs.len() {
            let pair = self.nodes[node].pairs[at];
            let side = usize::from(self.pairs[pair].nodes[1] == node);
            while let Some(message) = self.pairs[pair].sides[side]
                .outbox
                .as_mut()
                .and_then(|outbox| outbox.try_recv().ok())
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
                // Simulated lanes are open from the start.
                ToControl::LaneOpen { .. } => {}
                ToControl::LaneDown { lane, .. } => self.lane_reported_down(node, lane)?,
                ToControl::Expel { peer, cause } => {
                    return Err(format!("engine {node} expels {peer}: {cause}"));
                }
            }
        }
        Ok(())
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
            format!(
                "failed epoch {epoch} to the {to}: {}: {}",
                failure.kind,
                failure.causes.join(": ")
            )
        }
        Message::Finished { epoch, sent, .. } => format!("finished epoch {epoch}: {sent:?}"),
        other => format!("{other:?}"),
    }
}
