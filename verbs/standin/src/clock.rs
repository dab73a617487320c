//! Time that passes while nobody calls: a thread that lives as long as something waits for it.

use std::sync::Arc;
use std::time::Instant;

use crate::state::State;
use crate::world::Shared;

/// Sees to it that whatever waits for a time is looked at then.
pub(crate) fn ensure(shared: &Arc<Shared>, state: &mut State) {
    if state.next_wake().is_none() {
        return;
    }
    if state.clock_runs {
        shared.clock_changed.notify_one();
        return;
    }
    state.clock_runs = true;
    state.last_tick = Instant::now();
    let shared = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("standin-clock".into());
    // Without the thread, a caller that does not poll waits for ever: better to stop here.
    thread.spawn(move || run(&shared)).expect("a thread can be started");
}

fn run(shared: &Arc<Shared>) {
    let mut state = shared.lock_raw();
    while let Some(wake) = state.next_wake() {
        let now = Instant::now();
        if wake <= now {
            state.tick(now);
            shared.publish(&state);
        } else {
            let waited = shared.clock_changed.wait_timeout(state, wake - now);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
    state.clock_runs = false;
}
