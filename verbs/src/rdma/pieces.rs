//! Ranges of memory, and how they are cut.

use super::error::VerbsError;

/// # Errors
/// [`VerbsError::OutOfRange`] unless all of the range is in `within` bytes of memory.
pub(crate) fn within(offset: u64, bytes: u64, within: u64) -> Result<(), VerbsError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= within => Ok(()),
        _ => Err(VerbsError::OutOfRange { offset, bytes, within }),
    }
}

/// Address and bytes of pieces of at most `max_bytes`, but of a page at least, cut where pages
/// begin.
pub(crate) fn pieces(
    addr: u64,
    bytes: u64,
    max_bytes: u64,
    page_bytes: u64,
) -> Result<Vec<(u64, u64)>, VerbsError> {
    let past_the_end = VerbsError::OutOfRange { offset: addr, bytes, within: u64::MAX };
    let end = addr.checked_add(bytes).ok_or(past_the_end)?;
    let max_bytes = max_bytes.max(page_bytes);
    let mut pieces = Vec::new();
    let mut at = addr;
    while at < end {
        let next = if end - at <= max_bytes {
            end
        } else {
            let most = at + max_bytes;
            most - most % page_bytes
        };
        pieces.push((at, next - at));
        at = next;
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    proptest! {
        #[test]
        fn pieces_cover_the_memory_in_order_and_are_cut_at_pages(
            addr in 0..1u64 << 47,
            bytes in 0..1u64 << 24,
            max_bytes in prop_oneof![PAGE..1u64 << 20, 1u64 << 20..1u64 << 25, Just(u64::MAX)],
        ) {
            let pieces = pieces(addr, bytes, max_bytes, PAGE).unwrap();
            let mut at = addr;
            for &(start, bytes) in &pieces {
                prop_assert_eq!(start, at);
                prop_assert!(bytes > 0 && bytes <= max_bytes);
                prop_assert!(start == addr || start % PAGE == 0);
                at += bytes;
            }
            prop_assert_eq!(at, addr + bytes);
            // None could have been joined with its neighbour: no more of them than needed.
            for pair in pieces.windows(2) {
                prop_assert!(pair[0].1 + PAGE > max_bytes);
            }
        }

        #[test]
        fn a_range_is_within_exactly_if_all_its_bytes_are(
            offset in any::<u64>(), bytes in any::<u64>(), len in any::<u64>(),
        ) {
            let inside = u128::from(offset) + u128::from(bytes) <= u128::from(len);
            prop_assert_eq!(within(offset, bytes, len).is_ok(), inside);
        }
    }

    #[test]
    fn a_range_may_end_where_the_memory_does() {
        assert!(within(4096, 4096, 8192).is_ok() && within(8192, 0, 8192).is_ok());
        assert!(within(4097, 4096, 8192).is_err() && within(8193, 0, 8192).is_err());
    }

    #[test]
    fn a_limit_below_a_page_is_taken_for_a_page() {
        assert_eq!(pieces(100, 8000, 1, PAGE).unwrap(), [(100, 3996), (4096, 4004)]);
    }

    #[test]
    fn memory_beyond_the_address_space_is_refused() {
        let error = pieces(u64::MAX - 10, 11, PAGE, PAGE).unwrap_err();
        assert!(matches!(error, VerbsError::OutOfRange { bytes: 11, .. }), "{error}");
    }
}
