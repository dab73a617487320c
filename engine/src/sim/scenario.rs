//! What a run is made of: how many engines, which faults, how often.

use std::fmt;

use super::dice::Dice;
use crate::fabric::sim::WireFaults;

/// A family of scenarios; the seed picks one of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// Delays only. Every room must succeed.
    Calm,
    /// Lanes go down, at one end or both, and come back.
    Lossy,
    /// Completions end in errors of every kind.
    Errors,
    /// Sessions are lost, come back, and are given up by one side.
    Sessions,
    /// Engines stop for a while, or for good, without a word.
    Silent,
    /// Engines crash and come back as others.
    Restarts,
    /// All lanes of two engines go down at once, again and again.
    Flaps,
    /// Callers give up, drain, and reuse ids as soon as they can.
    Fickle,
    /// All of it.
    Brutal,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 9] = [
        Self::Calm,
        Self::Lossy,
        Self::Errors,
        Self::Sessions,
        Self::Silent,
        Self::Restarts,
        Self::Flaps,
        Self::Fickle,
        Self::Brutal,
    ];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Lossy => "lossy",
            Self::Errors => "errors",
            Self::Sessions => "sessions",
            Self::Silent => "silent",
            Self::Restarts => "restarts",
            Self::Flaps => "flaps",
            Self::Fickle => "fickle",
            Self::Brutal => "brutal",
        }
    }

    /// The preset of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }
}

/// What goes wrong. Ratios are of 1; those of frames and rooms say how many are hit, those of moments how
/// many of the moments, a few virtual milliseconds apart, in which trouble is looked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Longest usual delay of a step on a lane or a session, in microseconds.
    pub delay_us: u64,
    /// Longest time that closing one end of a lane takes, in microseconds.
    pub reap_us: u64,
    /// Steps that take a hundred times as long.
    pub slow: f32,
    /// Completions and control messages that come again, late: of rooms that are over, and after a
    /// session came back.
    pub duplicate: f32,
    /// Posts that are accepted and not begun for long.
    pub partial_post: f32,
    /// Frames a lane takes before it is full.
    pub window: usize,
    /// Writes that end in `LOC_PROT_ERR`.
    pub local_protection: f32,
    /// Writes that end in `REM_ACCESS_ERR`.
    pub remote_access: f32,
    /// Writes that end in `RNR_RETRY_EXC_ERR`.
    pub receiver_not_ready: f32,
    /// Writes that end in `RETRY_EXC_ERR`, landed or not.
    pub retry_exceeded: f32,
    /// Moments in which a lane goes down, at one end or both.
    pub lane_down: f32,
    /// Moments in which a lane says nothing for a while.
    pub freeze: f32,
    /// Moments in which all lanes of two engines go down.
    pub port_flap: f32,
    /// Moments in which a session is lost.
    pub control_loss: f32,
    /// Moments in which one side alone gives a peer up.
    pub give_up: f32,
    /// Moments in which an engine stops for a while.
    pub stall: f32,
    /// Stalls that never end.
    pub stall_for_ever: f32,
    /// Moments in which an engine crashes, and another comes in its place.
    pub crash: f32,
    /// Moments in which an engine's clock jumps forward.
    pub clock_jump: f32,
    /// Moments in which an engine stops in good order.
    pub shutdown: f32,
    /// Rooms that a caller gives up, at any time, on either side.
    pub abort: f32,
    /// Rooms of which one side never hears.
    pub one_sided: f32,
    /// Rooms with a deadline too short for them.
    pub hasty: f32,
    /// Moments in which an engine drains a peer, or all.
    pub drain: f32,
}

/// One run's make-up.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The family it is of.
    pub preset: Preset,
    /// Engines that send.
    pub prefill: usize,
    /// Engines that receive.
    pub decode: usize,
    /// Both send and receive. Guarded only.
    pub both_ways: bool,
    /// The gate is asked before bytes are placed (TCP); otherwise it only counts them (RDMA).
    pub guarded: bool,
    /// Lanes between two engines.
    pub lanes: usize,
    /// Rooms that are tried.
    pub rooms: usize,
    /// Different room ids; fewer ids are reused more.
    pub ids: u64,
    /// How unequal the two sides' layouts are: 0 same, 1 fewer layers, 2 half the heads.
    pub layouts: u8,
    /// Largest payload of a frame of several page writes, in bytes.
    pub frame_bytes: u64,
    /// Messages that a session's way out holds.
    pub outbox: usize,
    /// `fence_after_ms` of every engine.
    pub fence_after_ms: u64,
    /// `reconnect_grace_ms`, which every engine takes a random part of.
    pub grace_ms: u64,
    /// How long an engine listens to silence, in milliseconds.
    pub silent_ms: u64,
    /// Within how long the first tries to open and grant fall, in microseconds.
    pub rush_us: u64,
    /// How long faults last, in virtual milliseconds.
    pub trouble_ms: u64,
    /// Longest time between two moments of trouble, in microseconds.
    pub pace_us: u64,
    /// What goes wrong.
    pub faults: Faults,
}

impl Scenario {
    /// The scenario that a seed stands for, of any preset.
    #[must_use]
    pub fn any(seed: u64) -> Self {
        Self::of(Preset::ALL[(seed % Preset::ALL.len() as u64) as usize], seed)
    }

    /// The scenario of a preset that a seed stands for.
    #[must_use]
    pub fn of(preset: Preset, seed: u64) -> Self {
        let mut dice = Dice::new(seed ^ 0x5ce7_a710_0000_0000);
        let guarded = dice.chance(0.4);
        let sizes = [(1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1)];
        let (prefill, decode) = sizes[dice.pick(sizes.len())];
        let rooms = dice.between(4, 8 + 6 * prefill.max(decode) as u64) as usize;
        let mut scenario = Self {
            preset,
            prefill,
            decode,
            both_ways: guarded && dice.chance(0.2),
            guarded,
            lanes: dice.between(1, 4) as usize,
            rooms,
            ids: dice.between(1, rooms as u64),
            layouts: if dice.chance(0.3) { dice.between(1, 2) as u8 } else { 0 },
            frame_bytes: [128, 300, 1000, 4000][dice.pick(4)],
            outbox: if dice.chance(0.3) { 3 } else { 256 },
            fence_after_ms: [20, 100, 500][dice.pick(3)],
            grace_ms: [20, 100, 500, 2000][dice.pick(4)],
            silent_ms: [60, 200, 600][dice.pick(3)],
            rush_us: 0,
            trouble_ms: 30 + [30, 200, 600][dice.pick(3)],
            pace_us: [2000, 8000, 20_000][dice.pick(3)],
            faults: Faults::none(&mut dice),
        };
        let part = if dice.chance(0.5) { 100 } else { 700 };
        scenario.rush_us = scenario.trouble_ms * part;
        scenario.faults.be(preset, guarded, &mut dice);
        scenario
    }

    /// Whether nothing goes wrong, so that every room must succeed.
    pub(super) fn must_succeed(&self) -> bool {
        self.preset == Preset::Calm
    }

    pub(super) fn wire_faults(&self) -> WireFaults {
        let Faults { delay_us, reap_us, slow, duplicate, partial_post, window, .. } = self.faults;
        WireFaults {
            delay_us,
            reap_us,
            slow,
            duplicate,
            partial_post,
            window,
            local_protection: self.faults.local_protection,
            remote_access: self.faults.remote_access,
            receiver_not_ready: self.faults.receiver_not_ready,
            retry_exceeded: self.faults.retry_exceeded,
        }
    }
}

impl Faults {
    /// Delays only.
    fn none(dice: &mut Dice) -> Self {
        Self {
            delay_us: [20, 200, 2000][dice.pick(3)],
            reap_us: [300, 5000, 40_000][dice.pick(3)],
            window: dice.between(1, 12) as usize,
            ..Self::default()
        }
    }

    fn be(&mut self, preset: Preset, guarded: bool, dice: &mut Dice) {
        let all = preset == Preset::Brutal;
        let mut of = |this: Preset, ratio: f32| {
            let ratio = ratio * [0.3, 1.0, 2.0][dice.pick(3)];
            if preset == this || all && dice.chance(0.6) { ratio } else { 0.0 }
        };
        self.lane_down = of(Preset::Lossy, 0.3);
        self.freeze = of(Preset::Lossy, 0.1);
        self.port_flap = of(Preset::Flaps, 0.2);
        self.control_loss = of(Preset::Sessions, 0.15);
        self.give_up = of(Preset::Sessions, 0.06);
        self.stall = of(Preset::Silent, 0.15);
        self.stall_for_ever = of(Preset::Silent, 0.1);
        self.crash = of(Preset::Restarts, 0.08);
        self.shutdown = of(Preset::Restarts, 0.03);
        self.clock_jump = of(Preset::Silent, 0.03);
        self.abort = of(Preset::Fickle, 0.3);
        self.one_sided = of(Preset::Fickle, 0.2);
        self.hasty = of(Preset::Fickle, 0.3);
        self.drain = of(Preset::Fickle, 0.02);
        if !guarded {
            self.local_protection = of(Preset::Errors, 0.02);
            self.remote_access = of(Preset::Errors, 0.02);
            self.receiver_not_ready = of(Preset::Errors, 0.02);
            self.retry_exceeded = of(Preset::Errors, 0.04);
        }
        if preset != Preset::Calm {
            self.slow = if dice.chance(0.5) { 0.02 } else { 0.0 };
            self.partial_post = if dice.chance(0.5) { 0.2 } else { 0.0 };
            self.duplicate = if dice.chance(0.5) { 0.3 } else { 0.0 };
            self.abort = self.abort.max([0.02, 0.1, 0.3][dice.pick(3)]);
            // Trouble of other kinds now and then, so that kinds meet.
            let mut spice = |ratio: &mut f32, much: f32| {
                if dice.chance(0.15) {
                    *ratio = ratio.max(much);
                }
            };
            spice(&mut self.lane_down, 0.15);
            spice(&mut self.control_loss, 0.08);
            spice(&mut self.give_up, 0.03);
            spice(&mut self.stall, 0.05);
            spice(&mut self.freeze, 0.05);
            spice(&mut self.hasty, 0.2);
            spice(&mut self.one_sided, 0.1);
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {self:?}", self.preset.name())
    }
}
