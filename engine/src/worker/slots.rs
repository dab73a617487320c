//! Rooms and peers by number: a table whose places are reused and whose uses are told apart.

use crate::mutations::{self, Mutation};

/// A table of at most `limit` values. A place's generation changes each time it is given up.
#[derive(Debug)]
pub(super) struct Slots<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
    limit: usize,
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slots<T> {
    pub(super) fn new(limit: usize) -> Self {
        Self { places: Vec::new(), free: Vec::new(), limit }
    }

    /// Puts a value in; gives it back when the table is full.
    pub(super) fn insert(&mut self, value: T) -> Result<(u32, u32), T> {
        if let Some(index) = self.free.pop() {
            let place = &mut self.places[index as usize];
            place.value = Some(value);
            return Ok((index, place.generation));
        }
        if self.places.len() >= self.limit {
            return Err(value);
        }
        self.places.push(Place { generation: 0, value: Some(value) });
        Ok(((self.places.len() - 1) as u32, 0))
    }

    pub(super) fn get(&self, index: u32) -> Option<&T> {
        self.places.get(index as usize)?.value.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.places.get_mut(index as usize)?.value.as_mut()
    }

    /// The value, if its place has not been given up since.
    pub(super) fn get_exact(&mut self, index: u32, generation: u32) -> Option<&mut T> {
        let place = self.places.get_mut(index as usize)?;
        if place.generation == generation || mutations::is(Mutation::GenerationIgnored) {
            place.value.as_mut()
        } else {
            None
        }
    }

    pub(super) fn generation(&self, index: u32) -> u32 {
        self.places.get(index as usize).map_or(0, |place| place.generation)
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<T> {
        let place = self.places.get_mut(index as usize)?;
        let value = place.value.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(index);
        Some(value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.places
            .iter()
            .enumerate()
            .filter_map(|(i, place)| Some((i as u32, place.value.as_ref()?)))
    }

    pub(super) fn indices(&self) -> Vec<u32> {
        self.iter().map(|(index, _)| index).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_given_up_is_reused_under_another_generation() {
        let mut slots = Slots::new(2);
        let (index, generation) = slots.insert('a').unwrap();
        assert_eq!(slots.remove(index), Some('a'));
        let (again, later) = slots.insert('b').unwrap();
        assert_eq!(again, index);
        assert!(slots.get_exact(index, generation).is_none());
        assert_eq!(slots.get_exact(again, later), Some(&mut 'b'));
    }

    #[test]
    fn a_full_table_hands_the_value_back() {
        let mut slots = Slots::new(1);
        slots.insert('a').unwrap();
        assert_eq!(slots.insert('b'), Err('b'));
    }
}
