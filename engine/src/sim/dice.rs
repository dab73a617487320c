//! The one source of chance of a simulation.

/// Throws that a seed decides.
#[derive(Debug)]
pub(crate) struct Dice(fastrand::Rng);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Another source, decided by this one.
    pub(crate) fn fork(&mut self) -> Self {
        Self(self.0.fork())
    }

    /// True this often: 0 is never, 1 always.
    pub(crate) fn chance(&mut self, ratio: f32) -> bool {
        ratio > 0.0 && self.0.f32() < ratio
    }

    /// A number of a range, both ends included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0.u64(low..=high.max(low))
    }

    /// An index of a list of this many. Never of none.
    pub(crate) fn pick(&mut self, count: usize) -> usize {
        self.0.usize(0..count.max(1))
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        self.0.shuffle(list);
    }

    /// What the next throw would be, for comparing two runs.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.0.get_seed()
    }
}
