//! What two engines tell each other of lanes that went down, so that every write counts once.
//!
//! The side whose lane goes down asks the other: close your end too, and say how far you counted on
//! it. The answer comes when that end is closed and quiet, so nothing of the lane can be placed after
//! it. Writes that were counted are done; the others are sent again on another lane, and only then.
//! A question is repeated on every session until it is answered; answers are remembered.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::ids::LaneId;
use crate::mutations::{self, Mutation};

/// Answers kept, a peer: many more than the lanes that can go down while one question is under way.
const TALLIES: usize = 1024;
/// Rejected frames named in one answer; as many as a lane can have unacknowledged.
pub(crate) const REJECTED_MAX: usize = 256;

/// How far the receiving end of a lane counted before it was closed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Tally {
    /// Frames up to this number came whole: placed and counted, but for the rejected ones.
    pub(crate) completed: u64,
    /// The latest of those that were drained and not placed.
    pub(crate) rejected: Vec<u64>,
}

/// A peer's lanes, standing and down. `T` is what is known of a frame that was sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Links<T> {
    standing: BTreeMap<LaneId, Standing>,
    /// Serial number of the next lane.
    next_serial: u64,
    /// Frames of lanes that are down, until the peer says what it counted.
    lost: BTreeMap<LaneId, Vec<(u64, T)>>,
    /// What was counted here, for a peer that asks: nothing on a lane that was asked about before it was
    /// up. Neither may come up any more.
    tallies: VecDeque<(LaneId, Tally)>,
    /// Whether tallies have been dropped.
    forgot: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Standing {
    serial: u64,
    /// The peer has asked for the tally.
    asked: bool,
}

/// What is to be done about a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Close this end; the answer follows when it is down.
    Close,
    /// Answer with this; `None` when it is not known any more.
    Answer(Option<Tally>),
}

/// What became of a frame of a lane that is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Placed and counted.
    Placed,
    /// Drained.
    Rejected,
    /// Not counted, and nothing of it can be any more: to be sent again.
    Again,
    /// The peer does not know.
    Unknown,
}

impl<T> Links<T> {
    /// `knew`: this peer had lanes before that nothing is known of any more.
    pub(crate) const fn new(knew: bool) -> Self {
        Self {
            standing: BTreeMap::new(),
            next_serial: 0,
            lost: BTreeMap::new(),
            tallies: VecDeque::new(),
            forgot: knew,
        }
    }

    /// A lane comes up. Says whether it may: not if the peer was told that nothing came on it.
    pub(crate) fn up(&mut self, lane: LaneId) -> bool {
        let told = self.tallies.iter().any(|(known, _)| *known == lane);
        if told && !mutations::is(Mutation::LaneUpAfterTally) {
            return false;
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        self.standing.insert(lane, Standing { serial, asked: false });
        true
    }

    pub(crate) fn none_stand(&self) -> bool {
        self.standing.is_empty()
    }

    /// Every lane that stands now, or has stood, has a lower serial number.
    pub(crate) const fn next_serial(&self) -> u64 {
        self.next_serial
    }

    /// Lanes below this serial number are down.
    pub(crate) fn down_before(&self) -> u64 {
        let serials = self.standing.values().map(|lane| lane.serial);
        let first =
            if mutations::is(Mutation::DownTooSoon) { serials.max() } else { serials.min() };
        first.unwrap_or(self.next_serial)
    }

    /// A lane is down and quiet here, with these frames sent and unanswered. Gives the answer that the
    /// peer waits for, if it does.
    pub(crate) fn down(
        &mut self,
        lane: LaneId,
        lost: Vec<(u64, T)>,
        tally: Tally,
    ) -> Option<Tally> {
        let asked = self.standing.remove(&lane).is_some_and(|lane| lane.asked);
        self.keep(lane, tally.clone());
        if !lost.is_empty() {
            self.lost.insert(lane, lost);
        }
        asked.then_some(tally)
    }

    fn keep(&mut self, lane: LaneId, tally: Tally) {
        if self.tallies.len() == TALLIES {
            self.tallies.pop_front();
            self.forgot = true;
        }
        self.tallies.push_back((lane, tally));
    }

    /// The peer's end of a lane is down, and it asks what was counted here.
    pub(crate) fn asked(&mut self, lane: LaneId) -> Asked {
        if let Some(standing) = self.standing.get_mut(&lane) {
            standing.asked = true;
            return Asked::Close;
        }
        if let Some((_, tally)) = self.tallies.iter().find(|(known, _)| *known == lane) {
            return Asked::Answer(Some(tally.clone()));
        }
        if self.forgot {
            return Asked::Answer(None);
        }
        // It went down at the peer before it came up here. From now on it cannot.
        self.keep(lane, Tally::default());
        Asked::Answer(Some(Tally::default()))
    }

    /// Questions that are not answered: to be asked again when the session is back.
    pub(crate) fn questions(&self) -> impl Iterator<Item = LaneId> {
        self.lost.keys().copied()
    }

    /// The peer's answer: tells the fate of each frame of the lane. Says whether it was waited for.
    pub(crate) fn told(
        &mut self,
        lane: LaneId,
        tally: Option<&Tally>,
        mut fate: impl FnMut(T, Fate),
    ) -> bool {
        let Some(lost) = self.lost.remove(&lane) else { return false };
        for (seq, frame) in lost {
            let became = match tally {
                None => Fate::Unknown,
                Some(tally) if tally.rejected.contains(&seq) => Fate::Rejected,
                Some(tally) if mutations::is(Mutation::TallyOffByOne) && seq == tally.completed => {
                    Fate::Again
                }
                Some(tally) if seq <= tally.completed => Fate::Placed,
                Some(_) => Fate::Again,
            };
            fate(frame, became);
        }
        true
    }

    /// Whether a lane has been here and is down.
    pub(crate) fn was_here(&self, lane: LaneId) -> bool {
        self.tallies.iter().any(|(known, _)| *known == lane)
    }

    /// Every frame whose fate is not known.
    pub(crate) fn lost_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.lost.values_mut().flatten().map(|(_, frame)| frame)
    }

    /// Frames whose fate is not known.
    #[cfg(feature = "sim")]
    pub(crate) fn lost_frames(&self) -> usize {
        self.lost.values().map(Vec::len).sum()
    }

    /// Whether a frame of which this is true went down with a lane and its fate is not known.
    pub(crate) fn holds(&self, is: impl Fn(&T) -> bool) -> bool {
        self.lost.values().flatten().any(|(_, frame)| is(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANE: LaneId = LaneId(5);

    fn fates(links: &mut Links<char>, tally: Option<&Tally>) -> Vec<(char, Fate)> {
        let mut fates = Vec::new();
        assert!(links.told(LANE, tally, |frame, fate| fates.push((frame, fate))));
        fates
    }

    fn lost() -> Links<char> {
        let mut links = Links::new(false);
        assert!(links.up(LANE));
        let lost = vec![(7, 'a'), (8, 'b'), (9, 'c')];
        assert_eq!(links.down(LANE, lost, Tally::default()), None);
        links
    }

    #[test]
    fn a_frame_is_sent_again_only_if_the_peer_did_not_count_it() {
        let mut links = lost();
        let tally = Tally { completed: 8, rejected: vec![7] };
        let want = [('a', Fate::Rejected), ('b', Fate::Placed), ('c', Fate::Again)];
        assert_eq!(fates(&mut links, Some(&tally)), want);
        assert!(!links.told(LANE, Some(&tally), |_, _| ()), "told twice");
    }

    #[test]
    fn nothing_is_sent_again_on_a_guess() {
        assert!(fates(&mut lost(), None).iter().all(|(_, fate)| *fate == Fate::Unknown));
    }

    #[test]
    fn an_answer_waits_until_the_lane_is_down_and_is_remembered() {
        let mut links: Links<char> = Links::new(false);
        links.up(LANE);
        assert_eq!(links.asked(LANE), Asked::Close);
        let tally = Tally { completed: 3, rejected: Vec::new() };
        assert_eq!(links.down(LANE, Vec::new(), tally.clone()), Some(tally.clone()));
        assert_eq!(links.asked(LANE), Asked::Answer(Some(tally)));
    }

    #[test]
    fn a_lane_that_was_asked_about_before_it_came_up_never_does() {
        let mut links: Links<char> = Links::new(false);
        assert_eq!(links.asked(LANE), Asked::Answer(Some(Tally::default())));
        assert!(!links.up(LANE));
    }

    #[test]
    fn an_answer_that_was_dropped_is_never_made_up() {
        let mut links: Links<char> = Links::new(false);
        for lane in 0..=TALLIES as u64 {
            links.up(LaneId(100 + lane));
            links.down(LaneId(100 + lane), Vec::new(), Tally { completed: 1, rejected: vec![] });
        }
        assert_eq!(links.asked(LaneId(100)), Asked::Answer(None));
        let mut returned: Links<char> = Links::new(true);
        assert_eq!(returned.asked(LANE), Asked::Answer(None), "it had lanes before");
    }

    #[test]
    fn lanes_down_are_known_by_serial_number_whatever_order_they_go_in() {
        let mut links: Links<char> = Links::new(false);
        for lane in 1..=3 {
            links.up(LaneId(lane));
        }
        links.down(LaneId(2), Vec::new(), Tally::default());
        assert_eq!(links.down_before(), 0);
        links.down(LaneId(1), Vec::new(), Tally::default());
        assert_eq!(links.down_before(), 2);
        links.down(LaneId(3), Vec::new(), Tally::default());
        assert_eq!(links.down_before(), 3);
    }
}
