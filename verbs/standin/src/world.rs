//! Worlds, and what a test does to them.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ibverbs_sys as sys;

use crate::clock;
use crate::device::{Device, Element};
use crate::ffi::DeviceHandle;
use crate::options::{Gid, WorldOptions};
use crate::script::{Call, CallRule, Fault, Pick, Rule, RuleId};
use crate::state::{QpRef, State};

static WORLDS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
static NEXT_WORLD: AtomicU64 = AtomicU64::new(0);

/// A world of invented devices. It lives until it is dropped and the last context on it is closed.
pub struct World {
    shared: Arc<Shared>,
    missing_symbols: Vec<&'static str>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("devices", &self.device_names()).finish_non_exhaustive()
    }
}

/// What can be seen of a QP from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpView {
    /// Its number, which another device may use as well.
    pub qp_num: u32,
    /// `IBV_QPS_*`.
    pub state: sys::ibv_qp_state::Type,
    /// Send requests posted since it was made.
    pub posted: u64,
    /// Those of them that its peer has carried out, or that failed.
    pub executed: u64,
}

impl World {
    /// Makes a world; its devices can be listed and opened at once.
    #[must_use]
    pub fn new(options: WorldOptions) -> Self {
        let number = NEXT_WORLD.fetch_add(1, Ordering::Relaxed);
        let name = |index| format!("standin{number}_{index}");
        let devices: Vec<_> = (0..)
            .zip(options.devices)
            .map(|(index, device)| Device::new(name(index), index, device))
            .collect();
        let shared = Arc::new_cyclic(|shared| Shared {
            handles: devices
                .iter()
                .enumerate()
                .map(|(index, device)| DeviceHandle::new(&device.name, number, index, shared))
                .collect(),
            state: Mutex::new(State {
                devices,
                rules: Vec::new(),
                call_rules: Vec::new(),
                waiting: Vec::new(),
                dice: fastrand::Rng::with_seed(options.seed),
                refused_destructions: 0,
                clock_runs: false,
                last_tick: Instant::now(),
            }),
            polls_matter: AtomicBool::new(false),
            clock_changed: Condvar::new(),
            acknowledged: Condvar::new(),
        });
        lock(&WORLDS).push(Arc::downgrade(&shared));
        Self { shared, missing_symbols: options.missing_symbols }
    }

    /// The names of the devices, which no other device of this process has.
    #[must_use]
    pub fn device_names(&self) -> Vec<String> {
        self.shared.lock().devices.iter().map(|device| device.name.clone()).collect()
    }

    /// The C function of libibverbs called `name`, or null if it is missing.
    #[must_use]
    pub fn resolve(&self, name: &str) -> *const std::ffi::c_void {
        if self.missing_symbols.contains(&name) {
            return std::ptr::null();
        }
        crate::ffi::resolve(name)
    }

    /// From now on, `fault` befalls the requests that `pick` describes.
    pub fn script(&self, pick: Pick, fault: Fault) -> RuleId {
        let mut state = self.shared.lock();
        state.rules.push(Rule::new(pick, fault));
        RuleId(state.rules.len() - 1)
    }

    /// How many requests a rule has befallen.
    #[must_use]
    pub fn fired(&self, rule: RuleId) -> u64 {
        self.shared.lock().rules[rule.0].fired
    }

    /// The next `call` on a device fails with `errno`.
    pub fn fail_call(&self, device: usize, call: Call, errno: i32) {
        self.fail_calls(device, call, errno, 0, 1);
    }

    /// After `skip` calls, `times` calls fail with `errno`.
    pub fn fail_calls(&self, device: usize, call: Call, errno: i32, skip: u64, times: u64) {
        self.shared.lock().call_rules.push(CallRule { device, call, errno, skip, times });
    }

    /// Executes up to `requests` of those that devices defer; how many it was.
    pub fn step(&self, requests: usize) -> usize {
        self.shared.lock().step(requests)
    }

    /// What waits for an answer or a receive, for a time that ends, has waited long enough.
    pub fn expire(&self) {
        self.shared.lock().expire_all();
    }

    /// Nothing posted on this QP executes until it is let go; it does not time out meanwhile.
    pub fn hold(&self, device: usize, qp_num: u32) {
        self.set_held(device, qp_num, true);
    }

    /// Lets a QP go on.
    pub fn release(&self, device: usize, qp_num: u32) {
        self.set_held(device, qp_num, false);
    }

    fn set_held(&self, device: usize, qp_num: u32, is_held: bool) {
        let mut state = self.shared.lock();
        if let Some(qp) = state.qp_mut(QpRef { device, qp_num }) {
            qp.is_held = is_held;
        }
        state.push_along();
    }

    /// A QP breaks of itself, and an event says so (`IBV_EVENT_QP_FATAL`).
    pub fn break_qp(&self, device: usize, qp_num: u32) {
        let mut state = self.shared.lock();
        let at = QpRef { device, qp_num };
        if let Some(context) = state.qp(at).map(|qp| qp.context) {
            let element = Element::Qp(qp_num);
            state.devices[device].report(context, sys::IBV_EVENT_QP_FATAL, element);
            state.enter_error(at);
        }
    }

    /// The link of a port goes down, and an event says so.
    ///
    /// # Panics
    /// If the device has no such port; so do the two functions below.
    pub fn port_down(&self, device: usize, port: u8) {
        self.shared.lock().set_port(device, port, false);
    }

    /// The link of a port comes up again, and an event says so.
    pub fn port_up(&self, device: usize, port: u8) {
        self.shared.lock().set_port(device, port, true);
    }

    /// Changes an entry of a port's table; an event says that something has changed.
    pub fn set_gid(&self, device: usize, port: u8, index: usize, gid: Option<Gid>) {
        self.shared.lock().set_gid(device, port, index, gid);
    }

    /// A device is gone for good, and an event says so: nothing executes on it, nothing completes,
    /// and calls that the kernel serves fail with `EIO`. What it had can still be destroyed.
    pub fn kill_device(&self, device: usize) {
        self.shared.lock().kill(device);
    }

    /// The QPs of a device, oldest first.
    #[must_use]
    pub fn qps(&self, device: usize) -> Vec<QpView> {
        let state = self.shared.lock();
        let qps = state.devices[device].qps.iter();
        qps.map(|(qp_num, qp)| QpView {
            qp_num,
            state: qp.state,
            posted: qp.sq.posted,
            executed: qp.sq.executed,
        })
        .collect()
    }

    /// What is alive, one line for each kind of each device; empty when all was destroyed.
    #[must_use]
    pub fn leaks(&self) -> Vec<String> {
        self.shared.lock().leaks()
    }

    /// How often something was to be destroyed that was still in use.
    #[must_use]
    pub fn refused_destructions(&self) -> u64 {
        self.shared.lock().refused_destructions
    }
}

/// What a world's handles share.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Whether a poll may have something to move along.
    polls_matter: AtomicBool,
    pub(crate) clock_changed: Condvar,
    /// An event was acknowledged.
    pub(crate) acknowledged: Condvar,
    /// The devices as C sees them.
    pub(crate) handles: Box<[DeviceHandle]>,
}

impl Shared {
    pub(crate) fn lock(self: &Arc<Self>) -> Locked<'_> {
        Locked { state: self.lock_raw(), shared: self }
    }

    /// For those who wait on a condition, and publish what they change.
    pub(crate) fn lock_raw(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn publish(&self, state: &State) {
        let matter = !state.waiting.is_empty() || !state.call_rules.is_empty();
        self.polls_matter.store(matter, Ordering::Release);
    }

    pub(crate) fn polls_matter(&self) -> bool {
        self.polls_matter.load(Ordering::Acquire)
    }
}

/// A world's state, locked. When it is let go, the clock learns what has changed.
pub(crate) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    shared: &'a Arc<Shared>,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.shared.publish(&self.state);
        if !self.state.waiting.is_empty() {
            clock::ensure(self.shared, &mut self.state);
        }
    }
}

/// The worlds that are alive.
pub(crate) fn worlds() -> Vec<Arc<Shared>> {
    let mut worlds = lock(&WORLDS);
    worlds.retain(|world| world.strong_count() > 0);
    worlds.iter().filter_map(Weak::upgrade).collect()
}

/// A panic elsewhere is that test's failure, not this one's.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
