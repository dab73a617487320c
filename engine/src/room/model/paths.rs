//! Whether every path comes to an end.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use stateright::Model;

use super::setup::Setup;
use super::world::World;

fn name_of(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// Walks every path, depth first. A state that is met again on the path to it is a cycle, and so is a
/// step that changes nothing. Gives the number of states.
pub(super) fn visit_and_find_no_cycle(setup: &Setup) -> usize {
    // Whether a state lies on the path that is walked.
    let mut on_path: HashMap<u64, bool> = HashMap::new();
    let mut path: Vec<(u64, Vec<World>)> = Vec::new();
    let mut next = setup.init_states().pop();
    loop {
        match next.take() {
            Some(world) => {
                let name = name_of(&world);
                match on_path.get(&name) {
                    Some(true) => panic!("a path comes back to {world:#?}"),
                    Some(false) => {}
                    None => {
                        on_path.insert(name, true);
                        path.push((name, setup.next_states(&world)));
                    }
                }
            }
            None => {
                let Some((name, _)) = path.pop() else { return on_path.len() };
                on_path.insert(name, false);
            }
        }
        next = path.last_mut().and_then(|(_, ahead)| ahead.pop());
    }
}
